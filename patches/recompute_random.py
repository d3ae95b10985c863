"""megatron.core.tensor_parallel.random: what runs again draws from Megatron's RNG trackers as it did before.

Why here: dropout in layers draws from a tracker's states, which torch's own generators know nothing of; without them
gradients with dropout are wrong. The functions are those that Megatron's checkpoints use.
"""

from __future__ import annotations

import sys

from mindspeed_mem.patching import replace

_RANDOM = "megatron.core.tensor_parallel.random"


def _capture(tensors=()):
    return sys.modules[_RANDOM]._get_all_rng_states()


def _restore(states):
    host, device, trackers = states
    # The tracker keeps the dict that it gets, and writes to it with the next number that it draws.
    sys.modules[_RANDOM]._set_all_rng_states(host, device, dict(trackers))


replace("mindspeed_mem.activation.rerun.rng:capture", _capture, declared_by=__name__)
replace("mindspeed_mem.activation.rerun.rng:restore", _restore, declared_by=__name__)

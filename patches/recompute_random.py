"""megatron.core.tensor_parallel.random: what runs again draws from Megatron's RNG trackers as it did before.

Why here: dropout in layers draws from a tracker's states, which torch's own generators know nothing of; without them
gradients with dropout are wrong. The functions are those that Megatron's checkpoints use.
"""

from __future__ import annotations

import functools
import sys

from mindspeed_mem.activation.rerun import rng
from mindspeed_mem.patching import replace

_RANDOM = "megatron.core.tensor_parallel.random"


def _capture(tensors=()):
    """As Megatron's ``_get_all_rng_states``, which asks for the host's twice where that stands in for a device."""
    megatron = sys.modules[_RANDOM]
    tracker, host = megatron.get_cuda_rng_tracker(), rng.host_state()
    if rng.host_is_all:
        return host, host, tracker.get_states()
    if _graph_safe(tracker):  # no copy of the state, but something that follows it
        device = megatron._get_cuda_rng_state(graph_safe=True)
    else:
        device = rng.device_state(None, functools.partial(megatron._get_cuda_rng_state, graph_safe=False))
    return host, device, tracker.get_states()


@functools.lru_cache(maxsize=1)  # it parses TransformerEngine's version each time
def _graph_safe(tracker):
    of = getattr(sys.modules[_RANDOM], "is_graph_safe_cuda_rng_tracker", None)
    return of is not None and of(tracker)


def _restore(states):
    host, device, trackers = states
    # The tracker keeps the dict that it gets, and writes to it with the next number that it draws.
    sys.modules[_RANDOM]._set_all_rng_states(host, device, dict(trackers))


replace("mindspeed_mem.activation.rerun.rng:capture", _capture, declared_by=__name__)
replace("mindspeed_mem.activation.rerun.rng:restore", _restore, declared_by=__name__)

"""The host's default generator serves as the device's, so that Megatron's RNG tracker forks and restores something.

torch.cuda's own functions (manual_seed, get_rng_state, set_rng_state, manual_seed_all) then work as they are: they go
through the three names below. Host and device share one generator: what draws in another order draws other numbers.
"""

from __future__ import annotations

import torch

from mindspeed_mem.patching import around, replace


class _OneGenerator:
    """``torch.cuda.default_generators``: any index, "cpu" included, is the host's default generator."""

    def __getitem__(self, index):
        return torch.default_generator

    def __len__(self):
        return 1


@around("torch.cuda:_lazy_call")
def _lazy_call(original, callable, **kwargs):
    """Run it now.

    On a build without CUDA the original queues for an initialisation that never comes. Without an error: no fork of
    Megatron's tracker takes effect, and no recomputation restores the state (wrong dropout masks). Megatron holds a
    copy of the name in tensor_parallel.random.
    """
    callable()


@around("torch.cuda:_lazy_init")
def _lazy_init(original):
    """Nothing to initialise; the original raises without a driver."""


replace("torch.cuda:default_generators", _OneGenerator(), declared_by=__name__)

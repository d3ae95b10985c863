"""The host's default generator serves as the device's, so that Megatron's RNG tracker forks and restores something.

torch.cuda's own functions (manual_seed, get_rng_state, set_rng_state, manual_seed_all) then work as they are: they go
through the three names below. Host and device share one generator: what draws in another order draws other numbers.
"""

from __future__ import annotations

import itertools

import torch

from mindspeed_mem.device.limited_cpu import on_host
from mindspeed_mem.patching import around, replace

_iterators = itertools.count()


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


def _get_rng_state(original, *args, **kwargs):
    """In host memory: where CPU memory stands for a device's and is limited, states do not count as it.

    A device's states lie on the host. On the CPU the same calls allocate what the limit counts, some kilobytes each
    time, and may fail in places where nobody can make room. Here, because a generator allocates where no dispatch mode
    sees it, and all who ask (Megatron's tracker, checkpointing, fork_rng) go through these two.
    """
    with on_host():
        return original(*args, **kwargs)


for _generator in ("torch", "torch.cuda"):
    around(f"{_generator}.random:get_rng_state")(_get_rng_state)


@around("torch.utils.data.dataloader:_BaseDataLoaderIter.__init__", optional=True)
def _data_iterator(original, self, loader):
    """The seed of the loader's workers comes from a generator of its own.

    It is drawn from the host's, which on a device leaves the device's alone. Here it would shift all dropout masks, and
    a resumed run, which makes its iterators after restoring the state, would draw others than an uninterrupted one.
    """
    given = loader.generator
    if given is None:
        seed = (torch.initial_seed() + next(_iterators)) % 2**63
        loader.generator = torch.Generator().manual_seed(seed)
    try:
        original(self, loader)
    finally:
        loader.generator = given

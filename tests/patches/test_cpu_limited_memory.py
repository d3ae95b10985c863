"""Random states do not count as device memory on the CPU, however they are asked for."""

from __future__ import annotations

import pytest

from mindspeed_mem.device.limited_cpu import CompilerError, LimitedMemory
from tests.worlds import on_ranks

pytestmark = pytest.mark.distributed


def states_at_the_limit() -> int:
    """Take random states where not one more byte can be had; returns how many bytes they were counted as."""
    import torch
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("a", 7)
    with LimitedMemory() as memory:
        before = memory.limit = memory.allocated
        kept = [torch.get_rng_state(), torch.random.get_rng_state(), torch.cuda.get_rng_state()]
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(kept[0].numel(), dtype=torch.uint8)
        memory.limit = None  # the tracker compares states by an operator, which allocates its result
        with tracker.fork("a"):
            kept.append(torch.cuda.random.get_rng_state())
        return memory.allocated - before


def test_random_states_are_host_memory():
    try:
        LimitedMemory()
    except CompilerError as error:
        pytest.skip(str(error))
    assert on_ranks(1, states_at_the_limit) == [0]


def states_without_a_limit() -> bool:
    import torch

    state = torch.get_rng_state()
    first = torch.rand(3)
    torch.set_rng_state(state)
    return torch.equal(torch.rand(3), first) and torch.equal(torch.cuda.get_rng_state(), torch.get_rng_state())


def test_without_a_limit_they_are_what_they_were():
    assert on_ranks(1, states_without_a_limit) == [True]

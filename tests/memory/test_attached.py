"""Attached plain models survive a lack of device memory, with every bit the same."""

import gc

import pytest
import torch

import mindspeed_mem
from tests.attachment.plain_models import MIXED, TEXT, Net, loss_of, same
from tests.limited_runs import counted


def step(attached, memory, above=None):
    """Peak above what is there, loss and gradients of a step that may allocate so much."""
    model = attached.model
    model.zero_grad()
    gc.collect()
    before = memory.allocated
    memory.reset_peak()
    memory.limit = None if above is None else before + above
    torch.manual_seed(4)
    try:
        with attached.step():
            loss = loss_of(model, TEXT.repeat(8, 8))
            loss.backward()
    finally:
        memory.limit = None
    return memory.peak - before, [loss.detach().clone(), *(one.grad.clone() for one in model.parameters())]


@pytest.mark.parametrize("plan", [None, MIXED], ids=["no plan", "a plan"])
def test_half_of_the_memory_is_enough(plan, limited_memory):
    model = Net(4, 64)
    with counted() as memory:
        with mindspeed_mem.attach(model, None) as attached:
            peak, expected = step(attached, memory)
        with mindspeed_mem.attach(model, plan, survive=True) as attached:
            assert same(step(attached, memory)[1], expected)
            for _ in range(2):
                used, found = step(attached, memory, peak // 2)
                assert same(found, expected) and used <= peak // 2
            assert attached.engine.mover.evicted_bytes


def test_device_memory_is_limited_as_long_as_attached(limited_memory):
    model = Net()
    with mindspeed_mem.attach(model, MIXED, device_memory_gib=0.5) as attached:
        backend = attached.engine.backend
        assert backend.limit() == 2**29
        loss_of(model).backward()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**29)
    assert backend.limit() is None
    with pytest.raises(ValueError, match="device_memory_gib: "):
        mindspeed_mem.attach(model, MIXED, device_memory_gib=2**20)

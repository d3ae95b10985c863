"""Host slabs: exact sizes, recycling, the budget, and never freeing what a copy still uses."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mindspeed_mem.device.cpu import CpuBackend
from mindspeed_mem.device.simulated import SimulatedBackend
from mindspeed_mem.device.slabs import HostSlabs


def test_a_steady_state_allocates_nothing():
    slabs = HostSlabs(CpuBackend())
    sizes = [100, 200, 100, 333]
    for _ in range(5):
        taken = [slabs.take(n) for n in sizes]
        assert [s.nbytes for s in taken] == [s.buffer.numel() for s in taken] == sizes
        assert len({s.buffer.data_ptr() for s in taken}) == 4
        for slab in taken:
            slabs.give(slab)
    assert slabs.allocations == 4
    assert (slabs.bytes_held, slabs.bytes_in_use, slabs.peak_in_use) == (733, 0, 733)


def test_slabs_come_back_oldest_first():
    slabs = HostSlabs(CpuBackend())
    first, second = slabs.take(8), slabs.take(8)
    slabs.give(second)
    slabs.give(first)
    assert slabs.take(8) is second and slabs.take(8) is first


def test_over_the_budget_there_is_none_and_idle_slabs_stay():
    slabs = HostSlabs(CpuBackend(), limit_bytes=100)
    a, b = slabs.take(60), slabs.take(40)
    assert slabs.take(1) is None
    slabs.give(b)
    assert slabs.take(41) is None
    assert slabs.bytes_held == 100  # freeing 40 would not have made room for 41
    slabs.give(a)
    assert slabs.take(100).nbytes == 100 and slabs.bytes_held == 100


def test_idle_slabs_of_other_sizes_make_room_largest_first():
    slabs = HostSlabs(CpuBackend(), limit_bytes=100)
    for slab in [slabs.take(n) for n in (10, 50, 40)]:
        slabs.give(slab)
    slabs.take(30)
    assert slabs.bytes_held == 80  # the 50 went; 10 and 40 are still there
    fresh = slabs.allocations
    slabs.take(10), slabs.take(40)
    assert slabs.allocations == fresh


def test_zero_budget_and_bad_sizes():
    slabs = HostSlabs(CpuBackend(), limit_bytes=0)
    assert slabs.take(1) is None
    assert slabs.take(0).buffer.numel() == 0
    with pytest.raises(ValueError, match="-1"):
        slabs.take(-1)
    with pytest.raises(ValueError, match="host budget: got -5"):
        HostSlabs(CpuBackend(), limit_bytes=-5)


def test_a_slab_is_given_back_once_and_to_its_own_pool():
    slabs, others = HostSlabs(CpuBackend()), HostSlabs(CpuBackend())
    slab = slabs.take(8)
    with pytest.raises(ValueError, match="not lent out by this pool"):
        others.give(slab)
    slabs.give(slab)
    with pytest.raises(ValueError, match="once"):
        slabs.give(slab)
    assert slabs.bytes_in_use == 0 and slabs.bytes_held == 8


def test_a_failed_allocation_leaves_the_budget_as_it_was():
    class Full(CpuBackend):
        def host_empty(self, nbytes):
            raise MemoryError

    slabs = HostSlabs(Full(), limit_bytes=100)
    with pytest.raises(MemoryError):
        slabs.take(10)
    assert slabs.bytes_held == slabs.bytes_in_use == slabs.allocations == 0


def copying_slab(backend, slabs, nbytes):
    """A slab given back while a copy from it to the device has not run."""
    side = backend.new_stream("in")
    slab, target = slabs.take(nbytes), backend.empty(nbytes)
    slab.buffer.fill_(7)
    backend.copy(target, slab.buffer, side)
    event = backend.record(side)
    slabs.give(slab, event)
    return target, event


def test_the_next_user_is_told_what_to_wait_for():
    backend = SimulatedBackend()
    slabs = HostSlabs(backend)
    target, event = copying_slab(backend, slabs, 64)
    slab = slabs.take(64)
    assert slab.ready is event and slabs.allocations == 1
    backend.synchronize(event)
    slabs.give(slab, event)
    assert slabs.take(64).ready is None  # it has happened
    assert torch.equal(target, torch.full((64,), 7, dtype=torch.uint8))
    backend.check()


@pytest.mark.parametrize("how", ["clear", "make room"])
def test_no_slab_is_freed_under_a_running_copy(how):
    backend = SimulatedBackend()
    slabs = HostSlabs(backend, limit_bytes=100)
    target, event = copying_slab(backend, slabs, 64)
    if how == "clear":
        assert slabs.clear() == 64
    else:
        assert slabs.take(50).nbytes == 50
    assert backend.done(event)
    assert torch.equal(target, torch.full((64,), 7, dtype=torch.uint8))
    backend.check()


def test_clear_keeps_what_is_lent():
    slabs = HostSlabs(CpuBackend())
    lent, idle = slabs.take(10), slabs.take(20)
    slabs.give(idle)
    assert slabs.clear() == 20
    assert (slabs.bytes_held, slabs.bytes_in_use) == (10, 10)
    slabs.give(lent)
    assert slabs.clear() == 10 and slabs.bytes_held == 0


LIMIT = 64


class SlabMachine(RuleBasedStateMachine):
    """Any order of takes and gives keeps the books, the budget and the buffers apart."""

    lent = Bundle("lent")

    def __init__(self):
        super().__init__()
        self.backend = SimulatedBackend()
        self.slabs = HostSlabs(self.backend, limit_bytes=LIMIT)
        self.side = self.backend.new_stream("in")
        self.out = {}
        self.mark = 0

    @rule(target=lent, nbytes=st.integers(1, 24))
    def take(self, nbytes):
        in_use = sum(s.nbytes for s in self.out)
        slab = self.slabs.take(nbytes)
        assert (slab is None) == (in_use + nbytes > LIMIT)
        if slab is not None:
            assert slab.buffer.numel() == nbytes <= slab.nbytes <= nbytes + nbytes // 4
            if slab.ready is not None:
                self.backend.synchronize(slab.ready)
            self.mark = (self.mark + 1) % 251
            slab.buffer.fill_(self.mark)
            self.out[slab] = self.mark
        return slab

    @rule(slab=consumes(lent), copying=st.booleans())
    def give(self, slab, copying):
        if slab is None:
            return
        assert bool((slab.buffer == self.out.pop(slab)).all())
        event = None
        if copying:
            target = self.backend.empty(slab.buffer.numel())
            self.backend.copy(target, slab.buffer, self.side)
            event = self.backend.record(self.side)
            self.backend.wait(self.backend.current_stream(), event, "read")
        self.slabs.give(slab, event)

    @rule()
    def clear(self):
        self.slabs.clear()
        assert self.slabs.bytes_held == self.slabs.bytes_in_use

    @invariant()
    def books_are_right(self):
        in_use = sum(s.nbytes for s in self.out)
        assert self.slabs.bytes_in_use == in_use <= self.slabs.bytes_held <= LIMIT
        assert in_use <= self.slabs.peak_in_use <= LIMIT
        self.backend.check()


TestSlabMachine = SlabMachine.TestCase
TestSlabMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_sizes_that_keep_changing_do_not_pile_up():
    slabs = HostSlabs(CpuBackend())
    for size in range(1000, 1400):
        taken = [slabs.take(size), slabs.take(2 * size)]
        for slab in taken:
            slabs.give(slab)
        assert slabs.bytes_held <= 2 * slabs.peak_in_use

"""The simulated device as a backend: when its copies run, what is in their targets until then, and its figures."""

import pytest
import torch

from mindspeed_mem.device.simulated import SimulatedBackend

N = 64


@pytest.fixture
def backend():
    return SimulatedBackend()


def filled(n=N, value=3):
    return torch.full((n,), value, dtype=torch.uint8)


def test_a_target_is_poison_until_somebody_waits(backend):
    side, target, source = backend.new_stream("in"), backend.empty(8), filled(8)
    backend.copy(target, source, side)
    event = backend.record(side)
    assert target.tolist() == [255] * 8
    assert target.view(torch.float32).isnan().all()
    assert not backend.done(event)
    backend.synchronize(event)
    assert torch.equal(target, source) and backend.done(event)


def test_a_copy_runs_for_compute_but_the_host_is_not_told(backend):
    side, target, source = backend.new_stream("in"), backend.empty(8), filled(8)
    backend.copy(target, source, side)
    event = backend.record(side)
    backend.wait(backend.current_stream(), event, "x")
    assert torch.equal(target, source)
    assert not backend.done(event)
    backend.synchronize()
    assert backend.done(event)


def test_a_wait_between_side_streams_runs_nothing_yet(backend):
    first, second = backend.new_stream("copy"), backend.new_stream("copy")
    source, middle, last = filled(8), backend.host_empty(8), backend.empty(8)
    backend.copy(middle, source, first)
    backend.wait(second, backend.record(first), "order")
    backend.copy(last, middle, second)
    assert last.tolist() == middle.tolist() == [255] * 8
    backend.wait(backend.current_stream(), backend.record(second), "x")
    assert last.tolist() == middle.tolist() == [3] * 8
    backend.synchronize()
    assert second.name != first.name


def test_only_the_bytes_that_are_copied_are_poisoned(backend):
    side, target, source = backend.new_stream("in"), backend.empty(10), filled(4)
    target.fill_(1)
    backend.copy(target[2:6], source, side)
    assert target.tolist() == [1, 1, 255, 255, 255, 255, 1, 1, 1, 1]
    backend.synchronize()
    assert target.tolist() == [1, 1, 3, 3, 3, 3, 1, 1, 1, 1]


def test_poison_destroys_nothing_that_an_ordered_copy_has_yet_to_read(backend):
    in_, out = backend.new_stream("in"), backend.new_stream("out")
    host, target, source = backend.host_empty(8), backend.empty(8), filled(8, 5)
    host.fill_(4)
    backend.copy(target, host, in_)
    backend.wait(out, backend.record(in_), "slab")
    backend.copy(host, source, out)
    backend.synchronize()
    assert target.tolist() == [4] * 8 and host.tolist() == [5] * 8
    backend.check()


def test_a_copy_on_the_compute_stream_is_in_order(backend):
    target = backend.empty(N)
    with backend.tracker():
        source = filled() + 1
        backend.copy(target, source, backend.current_stream())
        total = target.sum()
    assert int(total) == 4 * N
    backend.check()


def test_copies_leave_version_counters_alone(backend):
    side, target, source = backend.new_stream("in"), backend.empty(8), filled(8)
    versions = target._version, source._version
    backend.copy(target, source, side)
    backend.synchronize()
    assert (target._version, source._version) == versions


def test_device_bytes_are_counted_and_host_buffers_are_not(backend):
    with backend.tracker():
        a = backend.empty(1000)
        host = backend.host_empty(4000)
        host[:10].fill_(1)
        view = a[10:20]
        b = torch.zeros(50)
        assert backend.allocated() == backend.peak() == 1200
        del b
        assert backend.allocated() == 1000
        backend.reset_peak()
        assert backend.peak() == 1000
    assert backend.owns(a) and backend.owns(view) and not backend.owns(host)
    del a, view
    assert backend.allocated() == 0


def test_stall_is_the_virtual_time_that_computation_stood_still():
    backend = SimulatedBackend(bandwidth=100.0, latency=1.0, op_seconds=0.5)
    side, target, source = backend.new_stream("in"), backend.empty(100), filled(100)
    compute = backend.current_stream()
    with backend.tracker():
        backend.copy(target, source, side)
        event = backend.record(side)
        source.sum()
        backend.wait(compute, event, "x")
        assert backend.stall_seconds() == 1.5  # 2 seconds of copying, half a second of work beside it
        backend.wait(compute, event, "x")
        assert backend.stall_seconds() == 1.5
        late = backend.new_stream("late")
        backend.wait(late, backend.record(compute), "x")
        backend.copy(target, source, late)
        for _ in range(4):
            source.sum()
        backend.wait(compute, backend.record(late), "x")
    assert backend.stall_seconds() == 1.5 and backend.bytes_copied == 200

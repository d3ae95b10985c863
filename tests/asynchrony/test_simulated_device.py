"""The simulated device finds each kind of race in a direct test, and nothing in programs that are right."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from mindspeed_mem.device.races import RaceError
from mindspeed_mem.device.simulated import SimulatedBackend

N = 64


@pytest.fixture
def backend():
    return SimulatedBackend()


def filled(n=N, value=3):
    return torch.full((n,), value, dtype=torch.uint8)


def round_trip(backend, leave_out=()):
    """Compute, copy out, release, reuse, copy in, compute: the right program, less the waits of some reasons."""
    backend.leave_out = set(leave_out)
    compute, out, in_ = backend.current_stream(), backend.new_stream("out"), backend.new_stream("in")
    with backend.tracker():
        source = filled() * 2
        host = backend.host_empty(N)
        backend.wait(out, backend.record(compute), "written")
        backend.copy(host, source, out)
        copied = backend.record(out)
        backend.wait(compute, copied, "copied out")
        del source
        other = filled(value=9)
        target = backend.empty(N)
        backend.wait(in_, backend.record(compute), "allocated")
        backend.copy(target, host, in_)
        back = backend.record(in_)
        backend.wait(compute, back, "copied in")
        result = (target + other).sum()
    backend.synchronize(back)
    del host
    backend.check()
    return int(result)


def test_a_right_program_passes_and_computes(backend):
    assert round_trip(backend) == (3 * 2 + 9) * N
    assert backend.faults == []
    assert backend.reasons == {"written": 1, "copied out": 1, "allocated": 1, "copied in": 1}


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("written", "copy of 64 bytes: stream out reads .* the write by stream compute"),
        ("copied out", "device memory of 64 bytes freed while stream out may still use it"),
        ("allocated", "stream in .* without being ordered after"),
        ("copied in", "stream compute reads device memory .* the write by stream in"),
    ],
)
def test_each_wait_left_out_is_found_every_time(reason, says):
    for _ in range(3):
        backend = SimulatedBackend()
        with pytest.raises(RaceError):
            round_trip(backend, leave_out=[reason])
        with pytest.raises(RaceError, match=says):
            backend.check()  # it stays on record, should somebody have swallowed it


def test_without_the_check_a_missing_wait_shows_as_poison():
    backend = SimulatedBackend(check=False)
    assert round_trip(backend, leave_out=["copied in"]) != (3 * 2 + 9) * N


# ---- hazards


def copy_in_flight(backend):
    side, target, source = backend.new_stream("side"), backend.empty(N), filled()
    backend.copy(target, source, side)
    return target, source, backend.record(side)


@pytest.mark.parametrize("write", [lambda t: t.fill_(0), lambda t: torch.add(t, 1, out=t), lambda t: t[3:5].zero_()])
def test_writing_a_source_that_is_being_copied(backend, write):
    target, source, event = copy_in_flight(backend)
    with backend.tracker():
        source.sum()  # reading it is no conflict
        with pytest.raises(RaceError, match="compute writes device memory .* the read by stream side"):
            write(source)


def test_a_list_of_tensors_written_at_once(backend):
    target, source, event = copy_in_flight(backend)
    with backend.tracker(), pytest.raises(RaceError, match="_foreach_zero_.* writes"):
        torch._foreach_zero_([filled(), source])


def test_writing_a_target_before_its_copy(backend):
    target, source, event = copy_in_flight(backend)
    with backend.tracker(), pytest.raises(RaceError, match="compute .* the write by stream side"):
        target.zero_()


def test_reading_a_target_through_a_view_made_before(backend):
    view = (target := backend.empty(N)).view(torch.float32)[2:]
    side, source = backend.new_stream("side"), filled()
    backend.copy(target, source, side)
    with backend.tracker():
        again = view.view(-1, 2)  # views look at no element
        with pytest.raises(RaceError, match="reads"):
            again + 1


def test_views_and_metadata_of_a_copy_in_flight_are_no_race(backend):
    target, source, event = copy_in_flight(backend)
    with backend.tracker():
        view = target.view(torch.int32).detach()[1:].t()
        torch.empty_like(view), view.new_empty(3), view.shape, view.is_contiguous()
        torch.empty(0, dtype=torch.float32).set_(target.untyped_storage(), 0, (16,), (1,))
        torch.empty(0, dtype=torch.uint8).set_(target)
    assert backend.faults == []


def test_an_event_recorded_too_early_orders_nothing_after_it(backend):
    compute, side, host = backend.current_stream(), backend.new_stream("out"), backend.host_empty(N)
    with backend.tracker():
        early = backend.record(compute)
        source = filled() + 1
        backend.wait(side, early, "too early")
        with pytest.raises(RaceError, match="side|out"):
            backend.copy(host, source, side)


def test_order_is_transitive(backend):
    compute, first, second = backend.current_stream(), backend.new_stream("first"), backend.new_stream("second")
    host = backend.host_empty(N)
    with backend.tracker():
        source = filled() + 1
        backend.wait(first, backend.record(compute), "a")
        backend.wait(second, backend.record(first), "b")
        backend.copy(host, source, second)
        backend.wait(first, backend.record(second), "c")
        backend.wait(compute, backend.record(first), "d")
        source.zero_()
    backend.synchronize()
    assert host.tolist() == [4] * N
    backend.check()


def test_a_recycled_block_must_not_be_filled_before_compute_has_left_it(backend):
    side, host = backend.new_stream("in"), backend.host_empty(N)
    host.fill_(1)
    with backend.tracker():
        early = backend.record(backend.current_stream())
        previous = filled() + 1
        del previous  # its memory may be what `empty` returns
        target = backend.empty(N)
        backend.wait(side, early, "too early")
        with pytest.raises(RaceError, match="before it was allocated by stream compute"):
            backend.copy(target, host, side)


def test_a_block_freed_by_another_copy_stream_counts_too(backend):
    compute, out, in_ = backend.current_stream(), backend.new_stream("out"), backend.new_stream("in")
    first, second, source = backend.host_empty(N), backend.host_empty(N), filled()
    backend.copy(first, source, out)
    early = backend.record(compute)
    backend.wait(compute, backend.record(out), "release")
    del source
    target = backend.empty(N)
    backend.wait(in_, early, "before the release")
    with pytest.raises(RaceError, match="allocated by stream out"):
        backend.copy(target, second, in_)


def test_an_allocation_alone_asks_for_no_further_wait(backend):
    side, host = backend.new_stream("in"), backend.host_empty(N)
    with backend.tracker():
        filled() + 1
        backend.wait(side, backend.record(backend.current_stream()), "compute so far")
        target = backend.empty(N)  # no work of compute since the event
        backend.copy(target, host, side)
    backend.synchronize()
    backend.check()


@pytest.mark.parametrize("ordered", [True, False])
def test_a_host_buffer_filled_again_while_a_copy_in_reads_it(backend, ordered):
    in_, out = backend.new_stream("in"), backend.new_stream("out")
    host, target, source = backend.host_empty(N), backend.empty(N), filled()
    host.fill_(1)
    backend.copy(target, host, in_)
    if ordered:
        backend.wait(out, backend.record(in_), "slab")
        backend.copy(host, source, out)
    else:
        with pytest.raises(RaceError, match="writes host buffer .* the read by stream in"):
            backend.copy(host, source, out)
    backend.synchronize()


def test_a_copy_in_before_its_copy_out(backend):
    in_, out = backend.new_stream("in"), backend.new_stream("out")
    host, target, source = backend.host_empty(N), backend.empty(N), filled()
    backend.copy(host, source, out)
    with pytest.raises(RaceError, match="in reads host buffer .* the write by stream out"):
        backend.copy(target, host, in_)


def test_the_host_touches_its_buffers_only_after_synchronizing(backend):
    side, host, source = backend.new_stream("out"), backend.host_empty(N), filled()
    backend.copy(host, source, side)
    event = backend.record(side)
    backend.wait(backend.current_stream(), event, "x")  # orders compute, but the host runs ahead of it
    with backend.tracker():
        with pytest.raises(RaceError, match="host reads host buffer"):
            host.sum()
        backend.synchronize(event)
        assert int(host.sum()) == 3 * N


@pytest.mark.parametrize("end", ["target", "source", "host"])
def test_freeing_an_end_of_a_copy_in_flight(backend, end):
    side = backend.new_stream("side")
    ends = {"target": backend.empty(N), "source": filled()}
    if end == "host":
        ends = {"target": backend.empty(N), "host": backend.host_empty(N)}
    backend.copy(*ends.values(), side)
    event = backend.record(side)
    del ends[end]
    with pytest.raises(RaceError, match="freed while stream side may still use it"):
        backend.check()
    with pytest.raises(RaceError, match="was freed before it ran"):
        backend.wait(backend.current_stream(), event, "x")


def test_a_host_buffer_needs_the_host_to_know_before_it_is_freed(backend):
    side, target, host = backend.new_stream("in"), backend.empty(N), backend.host_empty(N)
    backend.copy(target, host, side)
    backend.wait(backend.current_stream(), backend.record(side), "x")
    del host
    with pytest.raises(RaceError, match="host buffer of 64 bytes freed while stream in"):
        backend.check()


def test_freeing_after_the_host_has_waited_is_no_fault(backend):
    target, source, event = copy_in_flight(backend)
    backend.synchronize(event)
    del target, source
    backend.check()


# ---- a small network


def swapped_gradients(backend, leave_out=()):
    """Gradients of a small network all of whose saved tensors travel to the host and back."""
    backend.leave_out = set(leave_out)
    compute, out, in_ = backend.current_stream(), backend.new_stream("out"), backend.new_stream("in")
    kept = []  # host buffers, until the end

    def pack(tensor):
        if not tensor.is_contiguous() or tensor.nbytes != tensor.untyped_storage().nbytes() or tensor.is_leaf:
            return tensor
        source = tensor.detach().view(-1).view(torch.uint8)
        host = backend.host_empty(source.numel())
        kept.append(host)
        backend.wait(out, backend.record(compute), "written")
        backend.copy(host, source, out)
        backend.wait(compute, backend.record(out), "copied out")
        return host, tensor.dtype, tensor.shape

    def unpack(packed):
        if isinstance(packed, torch.Tensor):
            return packed
        host, dtype, shape = packed
        target = backend.empty(host.numel())
        backend.wait(in_, backend.record(compute), "allocated")
        backend.copy(target, host, in_)
        backend.wait(compute, backend.record(in_), "copied in")
        return target.view(dtype).view(shape)

    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(4)])
    with backend.tracker(), saved_tensors_hooks(pack, unpack):
        net(torch.randn(8, 16)).square().sum().backward()
    backend.synchronize()
    backend.check()
    return [p.grad for p in net.parameters()], len(kept)


def test_a_network_through_the_host_is_exact_and_without_a_false_alarm(backend):
    gradients, moved = swapped_gradients(backend)
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(4)])
    net(torch.randn(8, 16)).square().sum().backward()
    assert moved >= 8
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, net.parameters(), strict=True))


@pytest.mark.parametrize("reason", ["written", "copied out", "allocated", "copied in"])
def test_a_network_with_one_wait_left_out_is_caught(backend, reason):
    with pytest.raises(RaceError):
        swapped_gradients(backend, leave_out=[reason])

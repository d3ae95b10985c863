"""The accelerator's process groups: what gloo gives, on streams, as asynchronous as the real ones."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist

from tests.accelerator.lags import LAGS
from tests.sweeping import but
from tests.worlds import on_ranks

KINDS = ("cuda", "npu")


class Place:
    """Where operations run: on the accelerator, or by gloo on the host; asynchronous or not."""

    def __init__(self, device, group, overlapped):
        self.device, self.group, self.overlapped = device, group, overlapped

    def tensor(self, *shape, dtype=torch.float32):
        """Other numbers on each rank, written by the current stream just now."""
        generator = torch.Generator().manual_seed(dist.get_rank())
        return torch.randn(shape, generator=generator).to(self.device).mul(3).to(dtype)

    def empty(self, *shape):
        return torch.empty(shape, device=self.device)

    def run(self, operation, *args, **kwargs):
        work = operation(*args, group=self.group, async_op=self.overlapped, **kwargs)
        if work is not None:
            work.wait()


def reduced_all(place, operation=dist.ReduceOp.SUM, dtype=torch.float32):
    tensor = place.tensor(1000, dtype=dtype)
    place.run(dist.all_reduce, tensor, op=operation)
    return tensor


def reduced_all_bf16(place):
    return reduced_all(place, dtype=torch.bfloat16)


def reduced_all_largest(place):
    return reduced_all(place, dist.ReduceOp.MAX)


def averaged(place):
    if place.device == "cpu":  # gloo has none
        return reduced_all(place) / 2
    return reduced_all(place, dist.ReduceOp.AVG)


def reduced(place):
    tensor = place.tensor(1000)
    place.run(dist.reduce, tensor, 1)
    return tensor if dist.get_rank() == 1 else place.empty(0)


def told(place):
    tensor = place.tensor(7, 3)
    place.run(dist.broadcast, tensor, 1)
    return tensor


def gathered_by_all(place):
    parts = [place.empty(5), place.empty(5)]
    place.run(dist.all_gather, parts, place.tensor(5))
    return torch.cat(parts)


def gathered_into_one(place):
    whole = place.empty(10)
    place.run(dist.all_gather_into_tensor, whole, place.tensor(5))
    return whole


def gathered_in_place(place):
    whole = place.empty(10)
    mine = whole[5 * dist.get_rank() :][:5]
    mine.copy_(place.tensor(5))
    place.run(dist.all_gather_into_tensor, whole, mine)
    return whole


def gathered_at_one(place):
    parts = [place.empty(5), place.empty(5)] if dist.get_rank() == 0 else None
    place.run(dist.gather, place.tensor(5), parts, 0)
    return torch.cat(parts) if parts else place.empty(0)


def scattered(place):
    out = place.empty(5)
    place.run(dist.scatter, out, list(place.tensor(2, 5)) if dist.get_rank() == 1 else None, 1)
    return out


def reduced_in_parts(place):
    out = place.empty(500)
    place.run(dist.reduce_scatter_tensor, out, place.tensor(1000))
    return out


def reduced_lists(place):
    out = place.empty(5)
    place.run(dist.reduce_scatter, out, list(place.tensor(2, 5)))
    return out


def exchanged_unevenly(place):
    rank = dist.get_rank()
    given, taken = ([1, 4], [1, 2]) if rank == 0 else ([2, 3], [4, 3])
    out = place.empty(sum(taken))
    place.run(dist.all_to_all_single, out, place.tensor(5), taken, given)
    return out


def exchanged_lists(place):
    out = [place.empty(3), place.empty(3)]
    if place.device == "cpu":  # gloo has none
        place.run(dist.all_to_all_single, whole := place.empty(6), place.tensor(2, 3).flatten())
        return whole
    place.run(dist.all_to_all, out, list(place.tensor(2, 3)))
    return torch.cat(out)


def together(place):
    wholes = [place.empty(6), place.empty(8)]
    with dist._coalescing_manager(place.group, async_ops=place.overlapped) as manager:
        for whole in wholes:
            dist.all_gather_into_tensor(whole, place.tensor(len(whole) // 2), group=place.group)
    if place.overlapped:
        manager.wait()
    return torch.cat(wholes)


def reduced_together(place):
    outs, tensors = [place.empty(3), place.empty(4)], [place.tensor(6), place.tensor(8)]
    with dist._coalescing_manager(place.group, async_ops=place.overlapped) as manager:
        for out, tensor in zip(outs, tensors, strict=True):
            dist.reduce_scatter_tensor(out, tensor, group=place.group)
    if place.overlapped:
        manager.wait()
    return torch.cat(outs)


def swapped(place):
    """Both send first and then receive, which only a batch can do."""
    other, out = 1 - dist.get_rank(), place.empty(100_000)
    operations = [dist.P2POp(dist.isend, place.tensor(100_000), other, place.group)]
    operations += [dist.P2POp(dist.irecv, out, other, place.group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return out


def sent(place):
    tensors = [place.tensor(4), place.tensor(4) + 1]
    works = []
    for tensor in tensors:
        if dist.get_rank() == 0:
            works.append(dist.isend(tensor, 1, place.group))
        else:
            works.append(dist.irecv(tensor, 0, place.group))
    for work in reversed(works):
        work.wait()
    return torch.cat(tensors)


OPERATIONS = (
    *(reduced_all, reduced_all_bf16, reduced_all_largest, averaged, reduced, told, gathered_by_all, gathered_into_one),
    *(gathered_in_place, gathered_at_one, scattered, reduced_in_parts, reduced_lists, exchanged_unevenly),
    *(exchanged_lists, together, reduced_together, swapped, sent),
)


def different(kind):
    """The operations that give other bits on the accelerator than on the host."""
    from tests.accelerator import stand_in

    host = Place("cpu", dist.new_group(backend="gloo"), False)
    expected = {operation: operation(host) for operation in OPERATIONS}
    found = []
    for lags in ({}, *LAGS.values()):
        for overlapped in (False, True):
            place = Place(kind, dist.group.WORLD, overlapped)
            with stand_in.lagging(**lags):
                for operation in OPERATIONS:
                    if not torch.equal(operation(place).cpu(), expected[operation]):
                        found.append((operation.__name__, lags, overlapped))
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    dist.barrier()
    assert objects == [{"rank": 0}, {"rank": 1}]
    return found


@pytest.mark.parametrize("kind", but(KINDS, "npu"))
def test_operations_give_the_bits_of_gloo(kind):
    assert on_ranks(2, different, kind, device=kind) == [[], []]


def host_goes_on(kind):
    """While the stream that writes the input waits at a gate; returns what was complete before and after."""
    from tests.accelerator import stand_in

    own, device = torch.ops.accelerator, torch.get_device_module(kind)
    tensor = torch.zeros(100, device=kind)
    dist.all_reduce(tensor)  # the first one makes the group's stream
    dist.barrier()
    device.synchronize()
    gate = own.new_gate()
    with stand_in.promised():
        own.wait_at_gate(gate)
        tensor.add_(1)
        work = dist.all_reduce(tensor, async_op=True)
        early = work.is_completed()
        work.wait()
        tensor.mul_(3)
        last = dist.all_reduce(tensor, async_op=True)
        future = last.get_future()
        early = early or last.is_completed()
        last.wait()
    own.open_gate(gate)
    future.wait()
    return early, tensor.tolist() == [12.0] * 100, work.is_completed() and last.is_success(), len(future.value())


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_waits_for_no_operation(kind):
    assert on_ranks(2, host_goes_on, kind, device=kind) == [(False, True, True, 1)] * 2


def mistakes(kind):
    """What is said of a result read and an input written before anybody has waited; then, that memory may be freed."""
    said = []
    for mistake in (lambda whole, mine: whole + 1, lambda whole, mine: mine.zero_()):
        mine, whole = torch.ones(100, device=kind), torch.empty(200, device=kind)
        work = dist.all_gather_into_tensor(whole, mine, async_op=True)
        try:
            mistake(whole, mine)
        except RuntimeError as error:
            said.append("race" in str(error) and "all_gather_into_tensor" in str(error))
        work.wait()
    for waits in (True, False):
        work = dist.all_reduce(torch.ones(100, device=kind), async_op=True)
        if waits:
            work.wait()
        del work
        for _ in range(3):
            torch.ones(100, device=kind)
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_using_what_nobody_waited_for_is_found(kind):
    assert on_ranks(2, mistakes, kind, device=kind) == [[True, True]] * 2


def in_groups(kind):
    """Two groups whose operations the ranks begin in different orders, and groups of one."""
    device = torch.get_device_module(kind)
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    tensors = [torch.full((3,), float(dist.get_rank() + 1 + 10 * i), device=kind) for i in range(2)]
    order = (0, 1) if dist.get_rank() == 0 else (1, 0)
    for work in [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]:
        work.wait()
    dist.all_reduce(tensors[0], group=alone)
    device.synchronize()
    return [tensor.tolist()[0] for tensor in tensors], dist.get_backend(groups[0])


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_apart(kind):
    name = {"cuda": "nccl", "npu": "hccl"}[kind]
    assert on_ranks(2, in_groups, kind, device=kind) == [([3.0, 23.0], name)] * 2


def left_alone(kind, leaves):
    """What a rank hears whose partner does not come; `leaves`: he is gone, with his connections."""
    device = torch.get_device_module(kind)
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=60 if leaves else 1))
    tensor = torch.ones(3, device=kind)
    dist.all_reduce(tensor, group=group)
    device.synchronize()
    said, start = [], time.monotonic()
    if dist.get_rank() == 0:
        for _ in range(2):  # a group that has failed stays so
            try:
                dist.all_reduce(tensor, group=group, async_op=True).wait()
                device.synchronize()
            except RuntimeError as error:
                said.append(str(error))
    elif leaves:
        dist.destroy_process_group(group)
        del group
    dist.new_group(backend="gloo").barrier().wait()
    return said, time.monotonic() - start < 30


@pytest.mark.parametrize("leaves", (True, False))
def test_a_rank_that_does_not_come_is_heard_of(leaves):
    ((heard, soon), _) = on_ranks(2, left_alone, "cuda", leaves, device="cuda")
    assert soon and len(heard) == 2
    assert all(("by peer" if leaves else "imed out") in one for one in heard), heard

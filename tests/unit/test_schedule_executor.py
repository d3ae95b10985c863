"""The executor brings every order to its end on transports as reluctant as NCCL, and frees what has arrived."""

from __future__ import annotations

import functools
import itertools
import threading

import pytest

from mindspeed_mem.passes import BACKWARD, FORWARD, WEIGHT
from mindspeed_mem.schedule import Placement, executor, in_flight, order, peak, problems
from mindspeed_mem.schedule.wires import group_name
from tests.pipeline_loops import Stuck, Wires

SIZES = [
    (stages, virtual, number, group, cap)
    for stages, virtual, number in itertools.product((2, 3, 4, 5), (1, 2, 3), (1, 2, 5, 8))
    for group in ((None,) if virtual == 1 else (None, stages + 1))
    for cap in (None, 1, 2, 3, virtual + 1, virtual * stages)
    if not problems(stages, virtual, number, group_size=group, cap=cap)
]


class _Lines:
    """One stage's lines on `tests.pipeline_loops.Wires`; a member of a group is a stage of its own there."""

    def __init__(self, wires: Wires, stage: int) -> None:
        self.wires, self.stage = wires, stage

    def send(self, direction, receiver, value):
        return self._post("send", group_name((direction, self.stage, receiver)), receiver, value)

    def receive(self, direction, sender):
        return self._post("recv", group_name((direction, sender, self.stage)), sender, None)

    def _post(self, kind, group, peer, value):
        [op] = self.wires.post([(kind, (group, self.stage), (group, peer), value)])
        return _Pending(self.wires, op)


class _Pending:
    def __init__(self, wires, op):
        self.wires, self.op = wires, op

    def wait(self):
        self.wires.wait([self.op])
        return self.op.value


def play(orders, virtual, streams, v=False) -> list[list[tuple]]:
    """The passes of each stage as the executor runs them, one thread for each; outputs freed are among them."""
    stages = len(orders)
    placement = Placement(stages, virtual, v)
    wires = Wires(stages, streams)
    ran: list[list[tuple]] = [[] for _ in orders]
    errors: list[BaseException] = []
    last = stages * virtual - 1

    def of_weights(stage, micro_batch, chunk):
        ran[stage].append((WEIGHT, micro_batch, chunk))

    def of_stage(stage):
        def forward(micro_batch, chunk, given):
            part = placement.part(stage, chunk)
            assert given == ((FORWARD, micro_batch, part - 1) if part else None)
            ran[stage].append((FORWARD, micro_batch, chunk))
            return FORWARD, micro_batch, part

        def backward(micro_batch, chunk, given, output, gradient):
            part = placement.part(stage, chunk)
            assert given == ((FORWARD, micro_batch, part - 1) if part else None)
            assert output == (FORWARD, micro_batch, part)
            assert gradient == ((BACKWARD, micro_batch, part + 1) if part < last else None)
            ran[stage].append((BACKWARD, micro_batch, chunk))
            return BACKWARD, micro_batch, part

        def release(output):
            _, micro_batch, part = output
            ran[stage].append(("freed", micro_batch, placement.place(part)[1]))

        try:
            mine = _Lines(wires, stage)
            weight = functools.partial(of_weights, stage)
            executor.run(
                orders, stage, placement, mine, forward=forward, backward=backward, release=release, weight=weight
            )
        except BaseException as error:
            errors.append(error)
        finally:
            wires.leave()

    threads = [threading.Thread(target=of_stage, args=(stage,), daemon=True) for stage in range(stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, Stuck)):
        raise error
    assert not wires.open
    return ran


@pytest.mark.parametrize("streams", [None, "batched"])
def test_every_order_comes_to_its_end(streams):
    """ "batched": what a stage does in a group comes one after the other, a receive that waits holding up all else."""
    for stages, virtual, number, group, cap in SIZES:
        orders = order(stages, virtual, number, group_size=group, cap=cap)
        ran = play(orders, virtual, streams)
        for stage, passes in enumerate(ran):
            assert [one for one in passes if one[0] != "freed"] == orders[stage]
            freed = [one[1:] for one in passes if one[0] == "freed"]
            sent = {(n, c) for n, c in itertools.product(range(number), range(virtual))}
            if stage == stages - 1:
                sent -= {(n, virtual - 1) for n in range(number)}
            assert len(freed) == len(sent) and set(freed) == sent
            for which in freed:
                assert passes.index(("freed", *which)) < passes.index((BACKWARD, *which))
        held = [max(in_flight(one for one in passes if one[0] != "freed")) for passes in ran]
        assert held == peak(stages, virtual, number, group_size=group, cap=cap)


@pytest.mark.parametrize("streams", [None, "batched"])
def test_orders_with_a_split_backward_come_to_their_end(streams):
    for stages, virtual, number, cap in itertools.product((2, 3, 5), (1, 2), (1, 2, 5, 6), (None, 1, 2, 4)):
        if problems(stages, virtual, number, cap=cap, split=True):
            continue
        orders = order(stages, virtual, number, cap=cap, split=True)
        ran = play(orders, virtual, streams)
        assert [[one for one in passes if one[0] != "freed"] for passes in ran] == orders


@pytest.mark.parametrize("streams", [None, "batched"])
def test_orders_of_parts_in_a_v_come_to_their_end(streams):
    """Those of evaluations, too; what goes from a part to the next on one stage is handed over there."""
    for stages, number, cap in itertools.product((2, 3, 5), (1, 2, 5, 6), (None, 2, 3, 4)):
        for forward_only in (False, True) if cap is None else (False,):
            orders = order(stages, 2, number, cap=cap, split=True, v=True, forward_only=forward_only)
            ran = play(orders, 2, streams, v=True)
            assert [[one for one in passes if one[0] != "freed"] for passes in ran] == orders
            for stage, passes in enumerate(ran):
                freed = [one[1:] for one in passes if one[0] == "freed"]
                assert sorted(freed) == sorted(itertools.product(range(number), (0, 1) if stage else (0,)))


def test_other_orders_than_ours():
    """All forwards first; and each stage as far ahead of the next as it can be."""
    gpipe = [(FORWARD, n, 0) for n in range(6)] + [(BACKWARD, n, 0) for n in range(6)]
    backwards_reversed = [(FORWARD, n, 0) for n in range(6)] + [(BACKWARD, n, 0) for n in reversed(range(6))]
    one_by_one = [(direction, n, 0) for n in range(6) for direction in (FORWARD, BACKWARD)]
    ahead = [gpipe, order(4, 1, 6)[1], order(4, 1, 6)[2], one_by_one]
    for orders in ([gpipe] * 4, [backwards_reversed] * 4, [one_by_one] * 4, ahead):
        for streams in (None, "batched"):
            ran = play(orders, 1, streams)
            assert [[one for one in passes if one[0] != "freed"] for passes in ran] == orders


def test_an_order_that_cannot_end_is_stuck():
    crossed = [[(FORWARD, 0, 0), (BACKWARD, 0, 0), (FORWARD, 1, 0), (BACKWARD, 1, 0)]]
    crossed.append([(FORWARD, 0, 0), (FORWARD, 1, 0), (BACKWARD, 0, 0), (BACKWARD, 1, 0)])
    with pytest.raises(Stuck):
        play(crossed, 1, None)


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_what_a_pass_raises_leaves_at_once(direction):
    class Arrived:
        def wait(self):
            return "arrived"

    class Never:
        def wait(self):
            raise AssertionError("waited for a send that nobody takes")

    class OneWay:
        def send(self, *_):
            return Never()

        def receive(self, *_):
            return Arrived()

    def fails(*_):
        raise ValueError("in a pass")

    calls = {"forward": lambda *_: "output", "backward": lambda *_: "gradient", "release": lambda _: None}
    calls[direction] = fails
    with pytest.raises(ValueError, match="in a pass"):
        executor.run(order(2, 1, 4), 1, Placement(2), OneWay(), **calls)


@pytest.mark.parametrize("virtual, v", [(1, False), (2, False), (2, True)], ids=["line", "circle", "v"])
@pytest.mark.parametrize("stages", [2, 3, 4, 7])
def test_in_a_group_a_stage_sends_or_receives_and_has_one_neighbour(stages, virtual, v):
    """What makes it safe that all of a stage's operations in a group come one after the other."""
    found = list(Placement(stages, virtual, v).lines())
    assert len(set(found)) == len(found)
    assert len(found) == {(1, False): 2 * (stages - 1), (2, False): 2 * stages, (2, True): 4 * (stages - 1)}[virtual, v]
    ends = [(group_name(line), end) for line in found for end in line[1:]]
    assert len(ends) == len(set(ends))
    assert len({group_name(line) for line in found}) <= {(1, False): 4, (2, False): 6, (2, True): 8}[virtual, v]

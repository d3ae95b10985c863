"""The order of uses: recorded, followed, lost; and what farthest-next-use eviction makes of it."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_mem.passes import FORWARD
from mindspeed_mem.schedule import order
from mindspeed_mem.zero.core.chunk import Chunk, Piece
from mindspeed_mem.zero.core.gathering import Gathering, Reading
from mindspeed_mem.zero.core.gradients import GradientShards
from mindspeed_mem.zero.core.use_order import UseOrder


class OneRank:
    """A group of one rank, without communication."""

    def size(self):
        return 1

    def rank(self):
        return 0


def chunks(number: int, params: int = 1) -> list[Chunk]:
    """Chunks of 8 bytes for each of their parameters."""
    group, found = OneRank(), []
    for index in range(number):
        whole, grad = torch.arange(2.0 * params) + index, torch.zeros(2 * params)
        pieces = []
        for place in range(params):
            param = torch.nn.Parameter(torch.empty(2))
            param.data = whole[2 * place : 2 * place + 2]
            pieces.append((param, Piece(2 * place, 2 * place + 2)))
        found.append(Chunk(index, pieces, whole, grad, group))
    return found


def gathering(number: int, slots: int, ahead: int = 0) -> Gathering:
    managed = Gathering(8 * slots, ahead)
    for chunk in chunks(number):
        chunk.keep_shard()
        managed.add(chunk)
    return managed


def gathers(managed: Gathering, sequence: list[int], key: str = "pass") -> int:
    """Run a pass that uses one chunk after the other; how often one was gathered."""
    before = managed.counts.gathers
    managed.begin(key)
    for index in sequence:
        chunk = managed.chunks[index]
        reading = Reading(chunk.params)
        managed.acquire(reading)
        assert torch.equal(chunk.whole, torch.arange(2.0) + index)
        assert managed.live_bytes <= managed.budget
        managed.done(reading)
    managed.end()
    assert managed.live_bytes == 0
    return managed.counts.gathers - before


def without_order(sequence: list[int], slots: int, recent: bool) -> int:
    """Gathers if the oldest leaves first, or if `recent` the one not used for longest."""
    held, count = [], 0
    for chunk in sequence:
        if chunk in held:
            if recent:
                held.append(held.pop(held.index(chunk)))
            continue
        count += 1
        held = [*held[len(held) >= slots :], chunk]
    return count


def fewest(sequence: list[int], slots: int) -> int:
    """The least gathers that any policy needs, by looking at all."""
    states = {frozenset(): 0}
    for chunk in sequence:
        after: dict[frozenset, int] = {}
        for held, count in states.items():
            if chunk in held:
                options = [(held, count)]
            elif len(held) < slots:
                options = [(held | {chunk}, count + 1)]
            else:
                options = [(held - {out} | {chunk}, count + 1) for out in held]
            for state, cost in options:
                after[state] = min(cost, after.get(state, cost))
        states = after
    return min(states.values())


def accesses(stages: int, rank: int, micro_batches: int, layers: int, virtual: int = 1) -> list[int]:
    """Layers that a rank uses in one step of Megatron's pipeline schedule."""
    per, found = layers // virtual, []
    for act, _, part in order(stages, virtual, micro_batches)[rank]:
        inside = range(part * per, part * per + per)
        found += inside if act == FORWARD else reversed(inside)
    return found


@pytest.mark.parametrize(
    ("shape", "expected"),  # gathers with 2, 3, 4, 6 slots
    [
        ((1, 0, 4, 12), (82, 75, 68, 54)),
        ((4, 0, 16, 8), (198, 165, 132, 70)),
        ((4, 3, 16, 8), (194, 163, 132, 70)),
        ((4, 0, 16, 8, 2), (174, 121, 68, 38)),
    ],
    ids=["one stage", "1F1B, first", "1F1B, last", "interleaved"],
)
def test_gathers_of_pipeline_schedules(shape, expected):
    sequence, found = accesses(*shape), []
    for slots, least in zip((2, 3, 4, 6), expected, strict=True):
        managed = gathering(shape[3], slots)
        recorded, followed = gathers(managed, sequence), gathers(managed, sequence)
        assert recorded == without_order(sequence, slots, recent=True)
        assert followed <= min(recorded, without_order(sequence, slots, recent=False))
        found.append((followed, least))
        if slots > 2:  # fetching ahead changes when chunks come, not how many
            managed = gathering(shape[3], slots, ahead=1)
            gathers(managed, sequence)
            assert gathers(managed, sequence) == followed
            assert managed.counts.ahead > 0
    assert [one for one, _ in found] == list(expected)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=24), st.integers(1, 4))
def test_a_known_order_takes_as_few_gathers_as_can_be(sequence, slots):
    managed = gathering(6, slots)
    gathers(managed, sequence)
    assert gathers(managed, sequence) == fewest(sequence, slots)
    assert managed.order.deviations == 0


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=20), st.lists(st.integers(0, 4), max_size=20), st.integers(0, 2)
)
def test_another_order_falls_back_and_is_recorded_anew(first, second, ahead):
    managed = gathering(5, 2 + ahead, ahead)
    gathers(managed, first)
    assert managed.order.following is False
    gathers(managed, second)
    gathers(managed, second)
    gathers(managed, second)
    assert managed.order.deviations == (first != second)


def test_a_gather_that_fails_leaves_nothing_behind(monkeypatch):
    managed = gathering(4, slots=2)
    managed.begin("pass")
    chunk, reading = managed.chunks[0], Reading(managed.chunks[0].params)
    with monkeypatch.context() as patch:
        patch.setattr(chunk, "_bring_own", lambda: (_ for _ in ()).throw(MemoryError))
        for _ in range(2):
            with pytest.raises(MemoryError):
                managed.acquire(reading)
            assert managed.live_bytes == 0 and not chunk.gathered
    managed.acquire(reading)
    assert managed.live_bytes == chunk.nbytes and chunk.gathered
    managed.end()
    assert managed.live_bytes == managed.counts.over_budget == 0


def test_each_kind_of_pass_has_an_order_of_its_own():
    managed = gathering(4, 2)
    training, evaluation = [0, 1, 2, 3, 3, 2, 1, 0], [0, 1, 2, 3]
    for _ in range(3):
        gathers(managed, training, "training")
        gathers(managed, evaluation, "evaluation")
    assert managed.order.deviations == 0
    assert gathers(managed, training, "training") == fewest(training, 2)


def test_a_pass_that_is_broken_off_is_not_kept():
    follower = UseOrder()
    follower.begin("pass")
    follower.use((0,))
    follower.end(completed=False)
    follower.begin("pass")
    assert not follower.following
    follower.use((0,))
    follower.use((1,))
    follower.end()
    follower.begin("pass")
    follower.use((0,))
    assert follower.coming(5) == [1]
    assert follower.next_use(1) == 1
    assert follower.next_use(0) == float("inf")
    follower.end(completed=False)
    assert follower.deviations == 0
    follower.begin("pass")
    follower.use((0,))
    follower.end()
    assert follower.deviations == 1  # it ended too early


# ---- reductions


class Step:
    """Gradients of three chunks of two parameters each, in passes with uses between them."""

    def __init__(self):
        self.chunks = chunks(3, params=2)
        self.follower, self.done = UseOrder(), []
        self.gradients = GradientShards(self.chunks, lambda chunk: self.done.append(chunk.index), self.follower)

    def run(self, *events: str) -> list[str]:
        """``u1``: chunk 1 is used; ``1a``, ``1b``: the gradient of its first, second parameter comes. Returns what had
        been reduced after each event, and finally at the end of the step."""
        self.done, found = [], []
        self.follower.begin("step")
        self.gradients.begin_step()
        for event in events:
            if event[0] == "u":
                self.follower.use((int(event[1]),))
            else:
                param = self.chunks[int(event[0])].params["ab".index(event[1])]
                self.gradients.before(param)
                self.chunks[int(event[0])].grad.add_(1)
                self.gradients.after(param, last=True)
            found.append("".join(map(str, self.done)))
        for chunk in self.chunks:
            self.gradients.finish(chunk)
        self.follower.end()
        assert all(chunk.grad_shard is not None for chunk in self.chunks)
        assert not any(chunk.grad.untyped_storage().nbytes() for chunk in self.chunks)
        return [*found, "".join(map(str, self.done))]


WHOLE = ("u2", "2a", "2b", "u1", "1a", "1b", "u0", "0a", "0b")


def test_gradients_are_reduced_when_they_are_complete():
    step = Step()
    for _ in range(3):
        assert step.run(*WHOLE) == ["", "", "2", "2", "2", "21", "21", "21", "210", "210"]
    assert step.follower.deviations == 0


def test_a_gradient_that_never_comes_is_reduced_at_the_end():
    step = Step()
    for _ in range(2):
        assert step.run("u2", "2a", "u1", "1a", "1b", "u0", "0a") == ["", "", "", "", "1", "1", "1", "102"]
    assert step.follower.deviations == 0


def test_a_reduction_is_not_later_than_the_use_behind_it():
    """On the ranks that have the gradient it is reduced there, so it is here."""
    step = Step()
    step.run(*WHOLE)
    assert step.run("u2", "2a", "u1", "1a", "1b", "u0", "0a", "0b") == [
        "",
        "",
        "2",
        "2",
        "21",
        "21",
        "21",
        "210",
        "210",
    ]
    assert step.follower.deviations == 0
    # It comes after all: what is already reduced stays, and the rest is added at the end.
    assert step.run("u2", "2a", "u1", "2b", "1a", "1b", "u0", "0a", "0b")[-1] == "2102"
    assert torch.equal(step.chunks[2].grad_shard, torch.full((4,), 2.0))


def test_without_uses_reductions_keep_their_order(caplog):
    step = Step()
    step.run("2a", "2b", "1a", "1b", "0a", "0b")
    with caplog.at_level(logging.WARNING):
        assert step.run("2a", "1a", "1b", "0a", "0b") == ["", "", "", "", "", "210"]
    assert "chunk 2 (gradients of shape (2,)) did not come before them" in caplog.text
    assert step.run("2a", "1a", "1b", "2b", "0a", "0b") == ["", "", "", "21", "21", "210", "210"]


def test_a_parameter_of_two_modules_waits_for_the_end():
    step = Step()
    param = step.chunks[1].params[0]
    step.gradients = GradientShards(step.chunks, lambda chunk: step.done.append(chunk.index), step.follower, [param])
    for _ in range(2):
        assert step.run("2a", "2b", "1a", "1b", "0a", "0b", "1a")[-2:] == ["20", "201"]
    assert torch.equal(step.chunks[1].grad_shard, torch.full((4,), 3.0))


def test_a_pass_in_which_operators_are_tried_in_forward_is_not_followed():
    """Their second runs gather what the pass after it does not gather again."""
    managed = gathering(3, slots=1)
    managed.begin("pass")
    for index in (0, 1, 2):
        with managed.during(Reading(managed.chunks[index].params)):
            pass
    managed.end()
    for _ in range(3):
        gathers(managed, [0, 2, 1])
    assert managed.order.deviations == 0

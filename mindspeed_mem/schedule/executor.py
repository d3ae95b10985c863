"""Runs one stage's part of an order of passes: any order that `simulate` brings to its end.

It knows passes, callables that run them, and `Carrier` that carry results between stages. Receives are asked for one
pass ahead, so that data travel while a stage computes; nothing but arrivals is waited for, as in `simulate`.

[Note: when a send is done] gloo and NCCL may complete a send only after its receiver has asked for it. Waiting for that
right after the send could make two stages wait for each other. So a send is waited for when a result has arrived that
its receiver made later than it took what was sent: then the wait ends at once, on every transport. A forward's output
is known to be received at the latest when its gradient arrives; where there are none, in an evaluation, at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mindspeed_mem.passes import BACKWARD, FORWARD, WEIGHT, Pass
from mindspeed_mem.schedule.placement import Placement
from mindspeed_mem.schedule.simulation import after, before


class Pending(Protocol):
    """A send or a receive that was started."""

    def wait(self) -> Any:
        """Until it is done; a receive returns what arrived."""


class Carrier(Protocol):
    """Carries results between this stage and its neighbours; for each direction and sender, first in, first out."""

    def send(self, direction: str, receiver: int, value: Any) -> Pending:
        """Start to send `value`, the result of a pass in this direction, to a stage."""

    def receive(self, direction: str, sender: int) -> Pending:
        """Ask for what that stage sends next in this direction."""


def run(
    orders: Sequence[Sequence[Pass]],
    stage: int,
    placement: Placement,
    wires: Carrier,
    *,
    forward: Callable[[int | None, int, Any], Any],
    backward: Callable[[int | None, int, Any, Any, Any], Any],
    release: Callable[[Any], object],
    weight: Callable[[int | None, int], object] | None = None,
    turn: Callable[[Any], Any] = lambda output: output,
) -> None:
    """Run the passes of one stage; call it on all stages at once, with the same orders of at least two stages.

    Args:
        orders: the passes of each stage; those of an evaluation are all forward.
        placement: where the parts of the model lie.
        forward: (micro-batch, chunk, input) -> output; the input is None where the model begins.
        backward: (micro-batch, chunk, input, output, gradient of the output) -> gradient of the input; the gradient
            of the output is None where the model ends.
        release: called with each output that was sent, when its receiver has it, and before its backward.
        weight: (micro-batch, chunk), for orders in which gradients of weights are passes of their own.
        turn: makes of a forward's output the input of the next part where that lies on the same stage.

    What a pass raises, or the wires do, leaves at once: nothing is waited for.
    """
    mail = _Mail(orders, stage, placement, wires, release, turn)
    goes_back = any(work[0] == BACKWARD for work in orders[stage])
    held: dict[tuple[int | None, int], tuple[Any, Any]] = {}
    for place, work in enumerate(orders[stage]):
        direction, micro_batch, chunk = work
        given = mail.take(work)
        mail.ask_ahead(place)
        if direction == WEIGHT:
            assert weight is not None
            weight(micro_batch, chunk)
            continue
        if direction == FORWARD:
            result = forward(micro_batch, chunk, given)
            if goes_back:
                held[micro_batch, chunk] = given, result
        else:
            result = backward(micro_batch, chunk, *held.pop((micro_batch, chunk)), given)
        mail.send(work, result)
        del given, result  # or the next pass would compute beside them
    mail.close()


@dataclass(frozen=True)
class _Sent:
    place: int
    """Where the pass that takes it stands in the receiver's order."""
    direction: str
    value: Any
    pending: Pending


class _Mail:
    """What this stage sends and receives, and what of it is done."""

    def __init__(
        self,
        orders: Sequence[Sequence[Pass]],
        stage: int,
        placement: Placement,
        wires: Carrier,
        release: Callable[[Any], object],
        turn: Callable[[Any], Any],
    ) -> None:
        self._stage, self._placement = stage, placement
        self._wires, self._release, self._turn = wires, release, turn
        neighbours = {peer for _, *ends in placement.lines() if stage in ends for peer in ends if peer != stage}
        self._turned: dict[Pass, Any] = {}
        self._places = {peer: {work: place for place, work in enumerate(orders[peer])} for peer in neighbours}
        self._coming: dict[tuple[str, int], deque[Pass]] = {}
        for peer in neighbours:
            for work in orders[peer]:
                goal = after(work, peer, placement)
                if goal is not None and goal[0] == stage:
                    self._coming.setdefault((work[0], peer), deque()).append(goal[1])
        self._asked: dict[Pass, Pending] = {}
        self._sent: dict[int, list[_Sent]] = {peer: [] for peer in neighbours}
        self._next: list[tuple[Pass, int] | None] = []  # for each place, the next pass that waits, and for which stage
        following = None
        for work in reversed(orders[stage]):
            self._next.append(following)
            source = self._source(work)
            following = following if source is None else (work, source[0])
        self._next.reverse()

    def take(self, work: Pass) -> Any:
        """What this pass works on, as soon as it is there; None if no other pass hands it on."""
        source = self._source(work)
        if source is None:
            return self._turned.pop(work, None)
        self._ask(work, source[0])
        value = self._asked.pop(work).wait()
        self._settle(source[0], self._places[source[0]][source[1]])
        return value

    def ask_ahead(self, place: int) -> None:
        """Ask for what the next pass after this place needs."""
        following = self._next[place]
        if following is not None:
            self._ask(*following)

    def send(self, work: Pass, value: Any) -> None:
        """Send the result of this pass to where the model goes on, if it does so on another stage, or keep it."""
        goal = after(work, self._stage, self._placement)
        if goal is not None:
            peer, taker = goal
            if peer == self._stage:
                self._turned[taker] = self._turn(value) if work[0] == FORWARD else value
                if work[0] == FORWARD:
                    self._release(value)
                return
            pending = self._wires.send(work[0], peer, value)
            self._sent[peer].append(_Sent(self._places[peer][taker], work[0], value, pending))

    def close(self) -> None:
        """Wait for the sends that nothing has shown to be done."""
        for peer, of_peer in self._places.items():
            self._settle(peer, len(of_peer))

    def _source(self, work: Pass) -> tuple[int, Pass] | None:
        source = before(work, self._stage, self._placement)
        return None if source is None or source[0] == self._stage else source

    def _ask(self, work: Pass, sender: int) -> None:
        """Ask for what comes on this line, in the order in which it is sent, up to what this pass needs."""
        coming = self._coming[work[0], sender]
        while work not in self._asked:
            self._asked[coming.popleft()] = self._wires.receive(work[0], sender)

    def _settle(self, peer: int, place: int) -> None:
        """That stage has begun its passes up to this place, and so taken what was sent to them."""
        sent, self._sent[peer] = self._sent[peer], []
        for one in sent:
            if one.place > place:
                self._sent[peer].append(one)
                continue
            one.pending.wait()
            if one.direction == FORWARD:
                self._release(one.value)

"""Many plans of one stage played at once: what `simulation.StageTrack` finds for each of them, to the bit.

Plans that are changed a little are played by the thousand when a plan is improved. Those of one distance have the same
events at the same places; which of them there are is a row of zeros and ones over the plans. So a walk over the events
of a pass, each a few operations on arrays with a number for each plan ("lane"), plays them all. Sums and maxima of
whole ticks (`layer_script.exact`) come out alike however they are ordered. There is no window for late copies here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

from mindspeed_mem.adaptive.problem.definition import Problem
from mindspeed_mem.adaptive.problem.orders import Order
from mindspeed_mem.adaptive.search.decisions import StagePlan
from mindspeed_mem.adaptive.search.layer_script import exact
from mindspeed_mem.adaptive.search.many_scripts import ManyScripts, Passes, key_of
from mindspeed_mem.adaptive.search.pass_script import AHEAD, BACK, OUT, WAIT
from mindspeed_mem.adaptive.search.simulation import fewer, most_played
from mindspeed_mem.passes import BACKWARD, FORWARD, WEIGHT, Pass
from mindspeed_mem.schedule import Span
from mindspeed_mem.schedule.simulation import play

if TYPE_CHECKING:
    from mindspeed_mem.adaptive.search.many_scripts import Array

LANES = 512
"""Plans played at once; more are played in turns, so that memory stays small."""
_REMEMBERED = 4
"""Ways in which a pass found the streams that are remembered, each with what followed."""


class Several(NamedTuple):
    """What plans of a stage take, a number for each."""

    seconds: Array
    peaks: Array
    """Bytes."""
    stalls: Array


def letters_of(plans: Sequence[StagePlan]) -> Array:
    """(plans, places) of uint8: the letters of all layers of all parts in a row."""
    import numpy

    text = "".join(["".join(map("".join, plan.parts)) for plan in plans])
    return numpy.frombuffer(text.encode(), numpy.uint8).reshape(len(plans), -1)


def plan_of(problem: Problem, number: int, row: Array, distance: int) -> StagePlan:
    """The plan of a stage whose letters these are."""
    text, first, parts = row.tobytes().decode(), 0, []
    for part in problem.stages[number].parts:
        letters = []
        for name in part.layers:
            end = first + len(problem.class_of[name].groups)
            letters.append(text[first:end])
            first = end
        parts.append(tuple(letters))
    return StagePlan(parts=tuple(parts), distance=distance)


def alone(problem: Problem, number: int, letters: Array, distance: int) -> Several:
    """Stage `number` by itself under plans of this distance: nothing is waited for but copies.

    letters: see `letters_of`.
    """

    found = []
    for first in range(0, len(letters), LANES):
        track = ManyTracks(problem, number, letters[first : first + LANES], distance)
        found.append(Several(track.alone(), track.peaks, track.stall))
    return _joined(found)


class Together:
    """All stages, of which one changes; without a window."""

    def __init__(self, problem: Problem, stages: Sequence[StagePlan], number: int):
        few, count = most_played(problem), problem.pipeline.micro_batches
        counts = [count] if count <= few else [few, fewer(problem)]
        self._more = (count - few) / (few - counts[-1]) if count > few else 0.0
        self._problem, self._number = problem, number
        self._short = [problem.with_micro_batches(each) for each in counts]
        self._shared = self._short[0].shared_passes(counts[-1]) if count > few else []
        self._stages = [
            (letters_of([plan]), plan.distance, _parts(problem, place, letters_of([plan]), plan.distance))
            for place, plan in enumerate(stages)
        ]

    def play(self, letters: Array, distance: int) -> Several:
        """With this stage under plans of one distance: seconds as those of `simulate`, its own peaks and stalls."""
        turns = (letters[first : first + LANES] for first in range(0, len(letters), LANES))
        return _joined([self._play(some, distance) for some in turns])

    def _play(self, letters: Array, distance: int) -> Several:
        import numpy

        line, number = self._problem.pipeline, self._number
        parts = _parts(self._problem, number, letters, distance)
        ends, mine = list[Any](), list[ManyTracks]()
        before: list[ManyTracks] = []
        for short in self._short:
            tracks = []
            for place, fixed in enumerate(self._stages):
                tracks.append(ManyTracks(short, place, *((letters, distance, parts) if place == number else fixed)))
            for track, other in zip(tracks, before, strict=False):
                track.go_on(other)
            for track, place in zip(tracks, [] if before else self._shared, strict=False):
                track.mark(place)
            play(tracks, short.placement, exact(line.send_seconds))
            ends.append(reduce(numpy.maximum, (track.now for track in tracks)))
            mine.append(tracks[number])
            before = tracks
        seconds = ends[0] + self._more * (ends[0] - ends[-1]) + max(one.step_seconds for one in self._problem.stages)
        stalls = mine[0].stall + self._more * (mine[0].stall - mine[-1].stall)
        return Several(seconds, mine[0].peaks, stalls)


def _joined(several: Sequence[Several]) -> Several:
    import numpy

    return several[0] if len(several) == 1 else Several(*map(numpy.concatenate, zip(*several, strict=True)))


def _parts(problem: Problem, number: int, letters: Array, distance: int) -> list[ManyScripts]:
    made, first = [], 0
    for place, part in enumerate(problem.stages[number].parts):
        end = first + sum(len(problem.class_of[name].groups) for name in part.layers)
        made.append(ManyScripts(problem, number, place, letters[:, first:end], distance))
        first = end
    return made


def _alike(one: Array, other: Array) -> bool:
    return one is other or (len(one) == len(other) and bool((one == other).all()))


class ManyTracks:
    """`simulation.StageTrack` for many plans of one distance; a track for `schedule.simulation.play`."""

    def __init__(
        self, problem: Problem, number: int, letters: Array, distance: int, parts: list[ManyScripts] | None = None
    ):
        """parts: of the same plans, if they are there."""
        import numpy

        order = problem.orders[number]
        self.passes, self.spans, self._coming = order.passes, list[Span](), order.coming
        self._blocking = problem.link.blocking
        self._stage, self._whole = problem.stages[number], problem.whole[number]
        self.parts = parts or _parts(problem, number, letters, distance)
        self._kinds = self._kinds_of(order)
        self._moves = any(kind.events for kind in self._kinds)
        self.now = self.stall = numpy.zeros(len(letters))
        self._out = self._back = self.now
        self._none = numpy.zeros((0, 1))
        self._fetched: Array = self._none
        """(copies, lanes)"""
        self._known: dict[int, list[tuple[tuple[Array, Array, Array], tuple]]] = {}
        self._marked = -1
        self._mark: tuple[Array, Array, Array, Array, Array] = self._state

    @cached_property
    def peaks(self) -> Array:
        """Bytes."""
        import numpy

        held = numpy.zeros(self.parts[0].lanes, numpy.int64)
        highest = held - self._stage.operator_temporary_bytes
        for kind in self._kinds_of(self._whole):
            highest = numpy.maximum(highest, held + kind.highest)
            held = held + kind.net
        highest = highest + (self._stage.static_bytes + self._stage.temporary_bytes)
        return numpy.maximum(highest, self._stage.in_step_bytes)

    @property
    def _state(self) -> tuple[Array, Array, Array, Array, Array]:
        return self.now, self.stall, self._out, self._back, self._fetched

    def mark(self, place: int) -> None:
        """See `StageTrack.mark`."""
        self._marked = place

    def go_on(self, other: ManyTracks) -> None:
        """See `StageTrack.go_on`."""
        if other._marked < 0:
            return
        self.spans, self._known = other.spans[: other._marked], other._known
        self.now, self.stall, self._out, self._back, self._fetched = other._mark

    @property
    def next(self) -> Pass | None:
        return self.passes[len(self.spans)] if len(self.spans) < len(self.passes) else None

    def alone(self) -> Array:
        while self.next is not None:
            self.run(0.0)
        return self.now

    def run(self, arrival: Any) -> Any:
        """Run the next pass; returns when it ends."""
        import numpy

        place = len(self.spans)
        kind = self._kinds[place]
        if place == self._marked:
            self._mark = self._state
        at_once = isinstance(arrival, float) and not arrival  # it waits for nobody
        start = self.now if at_once else numpy.maximum(self.now, arrival)
        if self._blocking:
            stall = kind.copied
        elif not kind.events:  # such are all gradients of weights, or those that no plan fetches anything for
            stall, ended = None, start + kind.whole
            if self._moves:
                self._later(ended - self.now)
            if self.passes[place][0] != WEIGHT:
                self._fetched = self._none
            self.now = ended
        else:
            if not at_once:
                self._later(start - self.now)
            stall = self._played(place, kind)
        if stall is not None:
            self.now, self.stall = start + kind.whole + stall, self.stall + stall
        times: Any = start, self.now
        self.spans.append(Span(self.passes[place], *times))
        return self.now

    def _later(self, seconds: Array) -> None:
        import numpy

        self._out = numpy.maximum(self._out - seconds, 0.0)
        self._back = numpy.maximum(self._back - seconds, 0.0)
        if len(self._fetched):
            self._fetched = numpy.maximum(self._fetched - seconds, 0.0)

    def _played(self, place: int, kind: Passes) -> Array:
        """The stall of a pass; passes that all plans find as they found one before take the same."""
        state = self._out, self._back, self._fetched
        known = self._known.setdefault(id(kind), [])
        after = next((after for before, after in known if all(map(_alike, before, state))), None)
        if after is None:
            after = self._play(place, kind)
            known[:0] = [(state, after)]
            del known[_REMEMBERED:]
        stall, self._out, self._back, self._fetched = after
        return stall

    def _play(self, place: int, kind: Passes) -> tuple[Array, Array, Array, Array]:
        import numpy

        maximum = numpy.maximum
        direction, _, part = self.passes[place]
        out, back = self._out, self._back
        lag = numpy.zeros(len(out))
        outs: dict[int, Array] = {}
        backs: dict[int, Array] = {}
        if direction == BACKWARD and len(self._fetched):
            backs = {key_of(one): done for one, done in zip(self.parts[part].early, self._fetched, strict=True)}
        following = self._coming[place]
        fetched = list(self._fetched) if direction == WEIGHT else []
        moments = kind.moments
        for what, copy, row, seconds, has in kind.events:
            moment = 0.0 if row < 0 else moments[row]
            if what == OUT:
                out = maximum(out, moment + lag) + seconds
                outs[copy] = out * has
            elif what == BACK:
                back = maximum(back, moment + lag) + seconds
                backs[copy] = back * has
            elif what == AHEAD:
                back = maximum(back, moment + lag) + seconds
                fetched.append(back * has)
            else:
                lag = maximum(lag, (backs[copy] if what == WAIT else outs[copy]) - moment)
        ended = kind.whole + lag
        out, back = maximum(out - ended, 0.0), maximum(back - ended, 0.0)
        assert following is not None or not fetched or direction == WEIGHT
        return lag, out, back, maximum(numpy.stack(fetched) - ended, 0.0) if fetched else self._none

    def _kinds_of(self, order: Order) -> list[Passes]:
        kinds = []
        for direction, number, ahead, begun in order.kinds:
            part = self.parts[number]
            kinds.append(
                part.weights if direction == WEIGHT else part.passes(direction == FORWARD, ahead, self.parts, begun)
            )
        return [kinds[place] for place in order.places]

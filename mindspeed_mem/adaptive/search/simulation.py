"""A plan played over time: each stage has a compute stream and one copy stream each way.

Every stream runs in the order in which it is given work, and what waits for what is known beforehand (pass_script.py).
So time follows from one walk over each stage's passes; stages wait for each other as in schedule/simulation.py. Over a
link that blocks, copies run in the compute stream.

What is swapped is released at its release point or when its copy is done, but no later than when copies that are late
hold more than the plan's window. How late they are is a matter of time, but the window bounds what they hold: it is
added to the peak.

Where the plan has copies back start in idle time (activation/idle_time.py), these are the last that a pass does, as
many as there is room for by what is held when backwards begin: a matter of the order, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mindspeed_mem.adaptive.problem.definition import Problem
from mindspeed_mem.adaptive.problem.orders import Kind, Order
from mindspeed_mem.adaptive.search.decisions import Plan, StagePlan, host_bytes, under
from mindspeed_mem.adaptive.search.layer_script import exact
from mindspeed_mem.adaptive.search.pass_script import AHEAD, BACK, OUT, RELEASE, WAIT, PartScripts, Script, scripts_of
from mindspeed_mem.passes import BACKWARD, FORWARD, WEIGHT, Pass
from mindspeed_mem.schedule import Span, Timeline
from mindspeed_mem.schedule.simulation import play

_ROUNDS = 3
"""Micro-batches simulated, in pipeline depths, before the rest is taken to go on at the same pace."""
_FEW = 24


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What a plan takes."""

    seconds: float
    """One step."""
    peaks: tuple[int, ...]
    """The most bytes each stage holds."""
    late: tuple[int, ...]
    """How much of these is for copies that are late, and may be held by nobody."""
    stalls: tuple[float, ...]
    """Seconds of a step in which each stage's compute stands still for copies."""
    timeline: Timeline
    """The passes that were simulated."""


def simulate(problem: Problem, plan: Plan) -> Simulated:
    """Play a step. With very many micro-batches only the first are played, if their order goes on as it began, and the
    pace of the last of them goes on."""
    problem = under(problem, plan)
    micro_batches, send = problem.pipeline.micro_batches, exact(problem.pipeline.send_seconds)
    few, once = most_played(problem), max(stage.step_seconds for stage in problem.stages)
    tracks = _tracks(problem.with_micro_batches(min(few, micro_batches)), plan)
    placement, less = problem.placement, fewer(problem)
    if micro_batches > few and not plan.idle_prefetch:  # which looks at what is held in the whole order
        for track, count in zip(tracks, problem.with_micro_batches(few).shared_passes(less), strict=True):
            track.mark(count)
    timeline = play(tracks, placement, send)
    seconds, stalls = timeline.makespan, tuple(track.stall for track in tracks)
    if micro_batches > few:
        before = _tracks(problem.with_micro_batches(less), plan, tracks)
        more = (micro_batches - few) / (few - less)
        seconds += more * (seconds - play(before, placement, send).makespan)
        stalls = tuple(late + more * (late - track.stall) for late, track in zip(stalls, before, strict=True))
    return Simulated(
        seconds=seconds + once,
        peaks=tuple(track.peak for track in tracks),
        late=tuple(track.late for track in tracks),
        stalls=stalls,
        timeline=timeline,
    )


def fits(problem: Problem, plan: Plan) -> bool:
    """Whether no stage holds more than the device's limit, which hangs on the order alone."""
    problem = under(problem, plan)
    problem = problem.with_micro_batches(min(most_played(problem), problem.pipeline.micro_batches))
    tracks = (_track(problem, number, plan) for number in range(len(plan.stages)))
    return all(track.peak <= problem.device_limit for track in tracks)


def most_played(problem: Problem) -> int:
    """Micro-batches that are played at most: all, where the order is found by simulation, as it has no pace that the
    first of them would show."""
    if problem.pipeline.apart:
        return problem.pipeline.micro_batches
    step = _step(problem)
    return -(-max(_FEW, _ROUNDS * len(problem.stages)) // step) * step + problem.pipeline.micro_batches % step


def fewer(problem: Problem) -> int:
    """Micro-batches that are played besides, to see the pace of those that the others are more."""
    return most_played(problem) - -(-len(problem.stages) // _step(problem)) * _step(problem)


def _step(problem: Problem) -> int:
    """Micro-batches that a schedule takes together."""
    return problem.pipeline.group_size or (len(problem.stages) if problem.virtual_stages > 1 else 1)


def _tracks(problem: Problem, plan: Plan, others: Sequence[StageTrack] = ()) -> list[StageTrack]:
    """others: of the same plan with more micro-batches, which have run."""
    tracks = [
        _track(problem, number, plan, None if other is None else other.parts)
        for number, (_, other) in enumerate(itertools.zip_longest(plan.stages, others))
    ]
    for track, other in zip(tracks, others, strict=False):
        track.go_on(other)
    return tracks


def _track(problem: Problem, number: int, plan: Plan, parts: Sequence[PartScripts] | None = None) -> StageTrack:
    return StageTrack(problem, number, plan.stages[number], plan.window_bytes, parts, plan.idle_prefetch)


class _Streams(NamedTuple):
    """The copy streams at the moment when a pass ends or begins; all in seconds from then on, 0 for what is done."""

    out: float = 0.0
    """Until the stream of copies out is free."""
    back: float = 0.0
    fetched: tuple[float, ...] = ()
    """Until each of the next pass's copies back that were started early is done."""
    due: tuple[tuple[int, int, int, float], ...] = ()
    """Copies out that may be late: micro-batch, part, copy, and until it is done."""

    def later(self, seconds: float) -> _Streams:
        if not seconds or self == _IDLE:
            return self
        return _Streams(
            max(0.0, self.out - seconds),
            max(0.0, self.back - seconds),
            tuple(max(0.0, one - seconds) for one in self.fetched),
            tuple((one, part, copy, max(0.0, done - seconds)) for one, part, copy, done in self.due),
        )


_IDLE = _Streams()


class _Run(NamedTuple):
    """What a pass takes, and how it leaves the streams."""

    seconds: float
    stall: float
    streams: _Streams


class _Mark(NamedTuple):
    """A track before it runs a pass."""

    now: float
    stall: float
    streams: _Streams
    micro_batch: int
    known: int
    """Runs that it knows."""


class StageTrack:
    """One stage with its three streams.

    Passes that find the streams alike take the same: as all times are whole ticks (`layer_script.exact`), those of a
    pipeline in its pace are found alike to the bit, and looked up.
    """

    def __init__(
        self,
        problem: Problem,
        number: int,
        plan: StagePlan,
        window: int = 0,
        parts: Sequence[PartScripts] | None = None,
        idle_prefetch: bool = False,
    ):
        """parts: of the same plan, if they are there. idle_prefetch: as in `Plan`."""
        stage = problem.stages[number]
        self._blocking = problem.link.blocking
        order, whole = problem.orders[number], problem.whole[number]
        self.passes, self._coming = order.passes, order.coming
        self.parts = parts or scripts_of(problem, number, plan)
        self._window = 0 if self._blocking else window
        most = self._most_at_backwards(whole) if idle_prefetch else None
        self._scripts = self._scripts_of(order, most)
        held = self._scripts if whole is order else self._scripts_of(whole, most)
        self.late = 0 if self._blocking or not window else min(window, host_bytes(problem, number, plan))
        highest = _most_held(held, -stage.operator_temporary_bytes)
        in_passes = stage.static_bytes + stage.temporary_bytes + highest + self.late
        self.peak = max(in_passes, stage.in_step_bytes)
        self.spans: list[Span] = []
        self.stall = 0.0
        self._now, self._streams = 0.0, _IDLE
        self._micro_batch = 0  # from which those of the streams are counted
        self._runs: dict[tuple[int, _Streams], _Run] = {}
        self._marked, self._mark = -1, _Mark(0.0, 0.0, _IDLE, 0, 0)

    @property
    def next(self) -> Pass | None:
        place = len(self.spans)
        return self.passes[place] if place < len(self.passes) else None

    def mark(self, place: int) -> None:
        """Remember how this pass finds the stage."""
        self._marked = place

    def go_on(self, other: StageTrack) -> None:
        """Go on from the mark of a track that has begun with the same passes."""
        if other._marked < 0:
            return
        self.spans = other.spans[: other._marked]
        self._now, self.stall, self._streams, self._micro_batch, known = other._mark
        self._runs = dict(itertools.islice(other._runs.items(), known))

    def alone(self) -> float:
        """The time of all passes if nothing has to be waited for but copies."""
        while self.next is not None:
            self.run(0.0)
        return self._now

    def run(self, arrival: float) -> float:
        """Run the next pass, no earlier than what it works on arrives; returns when it ends."""
        place, now = len(self.spans), self._now
        work, script = self.passes[place], self._scripts[place]
        if place == self._marked:
            self._mark = _Mark(now, self.stall, self._streams, self._micro_batch, len(self._runs))
        start = arrival if arrival > now else now
        streams = self._streams if start == now else self._streams.later(start - now)
        if self._blocking:
            stall = self._copy_seconds(place)
            seconds, streams = script.seconds + stall, _IDLE
        elif script.steps or (streams.due and work[0] != WEIGHT):
            seconds, stall, streams = self._run(place, work[1] or 0, script, streams)
        else:
            seconds, stall, streams = script.seconds, 0.0, streams.later(script.seconds)
            if streams.fetched and work[0] != WEIGHT:
                streams = streams._replace(fetched=())
        self._now = end = start + seconds
        self._streams = streams
        self.stall += stall
        self.spans.append(Span(work, start, end))
        return end

    def _run(self, place: int, micro_batch: int, script: Script, streams: _Streams) -> _Run:
        if streams.due and micro_batch != self._micro_batch:
            due = _from(micro_batch - self._micro_batch, streams.due)
            streams = _Streams(streams.out, streams.back, streams.fetched, due)
        self._micro_batch = micro_batch
        key = id(script), streams
        found = self._runs.get(key)
        if found is None:
            found = self._runs[key] = self._play(place, script, streams)
        return found

    def _play(self, place: int, script: Script, streams: _Streams) -> _Run:
        """A pass from moment 0 on, micro-batches counted from its own."""
        work = self.passes[place]
        weights = work[0] == WEIGHT
        part, mine = self.parts[work[2]], (0, work[2])
        copies = part.weight_copies if weights else part.copies
        out_free, back_free, now, stall = streams.out, streams.back, 0.0, 0.0
        out_done = [] if weights else [0.0] * len(copies)
        back_done = [0.0] * len(copies) if weights or not streams.fetched else list(streams.fetched)
        late = _Late({key[:3]: key[3] for key in streams.due}, self._window, self.parts) if self._window else None
        ahead, coming = [], mine
        ahead_done = list(streams.fetched) if weights else []
        following = self._coming[place]
        if following is not None and script.ahead:
            coming = (following[1] or 0) - (work[1] or 0), following[2]
            ahead = self.parts[coming[1]].copies
            ahead_done = [0.0] * len(ahead)
        for seconds, what, copy in script.steps:
            now += seconds
            if what == OUT:
                out_free = (out_free if out_free > now else now) + copies[copy].out_seconds
                out_done[copy] = out_free
            elif what == BACK:
                if late is not None:
                    late.stays((*mine, part.weight_returns[copy] if weights else copy))
                back_free = (back_free if back_free > now else now) + copies[copy].back_seconds
                back_done[copy] = back_free
            elif what == AHEAD:
                if late is not None:
                    late.stays((*coming, copy))
                back_free = (back_free if back_free > now else now) + ahead[copy].back_seconds
                ahead_done[copy] = back_free
            else:
                if what == WAIT:
                    done = back_done[copy]
                else:
                    done = out_done[copy] if late is None else late.released((*mine, copy), out_done[copy])
                if done > now:
                    stall += done - now
                    now = done
        now += script.rest
        due = () if late is None else tuple((*key, done) for key, done in late.due.items())
        return _Run(now, stall, _Streams(out_free, back_free, tuple(ahead_done), due).later(now))

    def _copy_seconds(self, place: int) -> float:
        """All copies that start in a pass, one after the other."""
        direction, _, part = self.passes[place]
        copies = self.parts[part].weight_copies if direction == WEIGHT else self.parts[part].copies
        following, total = self._coming[place], 0.0
        ahead = [] if following is None else self.parts[following[2]].copies
        for _, what, copy in self._scripts[place].steps:
            if what == OUT:
                total += copies[copy].out_seconds
            elif what == BACK:
                total += copies[copy].back_seconds
            elif what == AHEAD:
                total += ahead[copy].back_seconds
        return total

    def _scripts_of(self, order: Order, most: int | None) -> list[Script]:
        """most: bytes up to which copies back start where a pass has ended; None: they do not."""
        if most is not None:
            return self._scripts_with_idle(order, most)
        scripts = [self._script_of(kind) for kind in order.kinds]
        return [scripts[place] for place in order.places]

    def _script_of(self, kind: Kind) -> Script:
        part, ahead = self.parts[kind.part], None if kind.ahead is None else self.parts[kind.ahead]
        return part.weights if kind.direction == WEIGHT else part.script(kind.direction == FORWARD, ahead, kind.begun)

    def _scripts_with_idle(self, order: Order, most: int) -> list[Script]:
        found = []
        begun = False  # the first copies back of the next backward, in the pass before
        idle: tuple[int, ...] = ()  # of these, those that started when it had ended
        held, late = 0, _Late({}, self._window, self.parts)
        later = sorted((nbytes for part in self.parts for _, nbytes in part.later), reverse=True)
        gradients = [nbytes for part in self.parts for nbytes, _ in part.gradients.values()]
        between = sum(later[:2]) + 2 * max(gradients, default=0)
        for work, following in zip(order.passes, order.coming, strict=True):
            direction, _, part = work
            if direction == WEIGHT:
                found.append(self.parts[part].weights)
                late.go_through(work, following, found[-1])
                held += found[-1].net
                continue
            ahead = None if following is None else self.parts[following[2]]
            there, idle = idle, ()
            script = self.parts[part].script(direction == FORWARD, ahead, begun, there=there)
            late.go_through(work, following, script)
            if ahead is not None and following is not None:  # gradients of weights come first
                idle = ahead.fitting(most - held - script.net - late.nbytes - between)
                for copy in idle:
                    late.stays((following[1] or 0, following[2], copy))
                script = self.parts[part].script(direction == FORWARD, ahead, begun, idle, there)
            found.append(script)
            held += script.net
            begun = following is not None
        return found

    def _most_at_backwards(self, order: Order) -> int:
        """The most bytes that are held when a backward begins, with what is late."""
        held, most, late = 0, 0, _Late({}, self._window, self.parts)
        rows = zip(order.passes, order.coming, self._scripts_of(order, None), strict=True)
        for work, following, script in rows:
            if work[0] == BACKWARD:
                most = max(most, held + late.nbytes)
            late.go_through(work, following, script)
            held += script.net
        return most


def _most_held(scripts: Sequence[Script], highest: int) -> int:
    held = itertools.accumulate((script.net for script in scripts), initial=0)
    return max(highest, *(before + script.highest for before, script in zip(held, scripts, strict=False)))


_Key = tuple[int, int, int]
"""Micro-batch, part, copy."""


class _Late:
    """Copies out that are due, in the order in which they became so, as far as the window lets them be late."""

    def __init__(self, due: dict[_Key, float], window: int, parts: Sequence[PartScripts]):
        self.due, self._window, self._parts = due, window, parts
        self.nbytes = sum(map(self._size, due))
        """Of these."""

    def released(self, key: _Key, done: float) -> float:
        """A copy is due, and done then; returns when those are that the window has no room for."""
        if not self._window:
            return done
        self.due[key] = done
        self.nbytes += self._size(key)
        done = 0.0
        while self.nbytes > self._window:
            oldest = next(iter(self.due))
            done = self.due.pop(oldest)
            self.nbytes -= self._size(oldest)
        return done

    def stays(self, key: _Key) -> None:
        """It is needed again: if it is late yet, it does not leave at all (its copy back is counted all the same)."""
        if key in self.due:
            del self.due[key]
            self.nbytes -= self._size(key)

    def go_through(self, work: Pass, following: Pass | None, script: Script) -> None:
        """A pass, of which only the order matters: what is late at its end hangs on nothing else."""
        part, mine = self._parts[work[2]], (work[1] or 0, work[2])
        for _, what, copy in script.steps if self._window else ():
            if what == RELEASE:
                self.released((*mine, copy), 0.0)
            elif what == BACK:
                self.stays((*mine, part.weight_returns[copy] if work[0] == WEIGHT else copy))
            elif what == AHEAD and following is not None:
                self.stays((following[1] or 0, following[2], copy))

    def _size(self, key: _Key) -> int:
        return self._parts[key[1]].copies[key[2]].nbytes


def _from(micro_batch: int, due: tuple[tuple[int, int, int, float], ...]) -> tuple[tuple[int, int, int, float], ...]:
    """The same with micro-batches counted from this one."""
    return tuple((one - micro_batch, part, copy, done) for one, part, copy, done in due)

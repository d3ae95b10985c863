"""A plan played over time: each stage has a compute stream and one copy stream each way.

Every stream runs in the order in which it is given work, and what waits for what is known beforehand (pass_script.py).
So time follows from one walk over each stage's passes; stages wait for each other as in schedule/simulation.py. Over a
link that blocks, copies run in the compute stream.

What is swapped is released at its release point or when its copy is done, but no later than when copies that are late
hold more than the plan's window. How late they are is a matter of time, but the window bounds what they hold: it is
added to the peak.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_mem.adaptive.problem.definition import Problem
from mindspeed_mem.adaptive.search.decisions import Plan, StagePlan, host_bytes
from mindspeed_mem.adaptive.search.pass_script import AHEAD, BACK, OUT, WAIT, Copy, PartScripts, Script
from mindspeed_mem.passes import BACKWARD, FORWARD, Pass
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
    """Play a step. With very many micro-batches only the first are played, and the pace of the last of them goes on."""
    tracks = _tracks(problem, plan)
    memory = {"peaks": tuple(track.peak for track in tracks), "late": tuple(track.late for track in tracks)}
    micro_batches, send = problem.pipeline.micro_batches, problem.pipeline.send_seconds
    step = problem.pipeline.group_size or (len(problem.stages) if problem.virtual_stages > 1 else 1)
    few = -(-max(_FEW, _ROUNDS * len(problem.stages)) // step) * step + micro_batches % step
    once = max(stage.step_seconds for stage in problem.stages)
    if micro_batches <= few:
        timeline = play(tracks, problem.virtual_stages, send)
        stalls = tuple(track.stall for track in tracks)
        return Simulated(seconds=timeline.makespan + once, **memory, stalls=stalls, timeline=timeline)
    less = -(-len(problem.stages) // step) * step
    played = []
    for count in (few - less, few):
        tracks = _tracks(problem.with_micro_batches(count), plan)
        played.append((play(tracks, problem.virtual_stages, send), [track.stall for track in tracks]))
    (early, early_stalls), (late, late_stalls) = played
    more = (micro_batches - few) / less
    seconds = late.makespan + more * (late.makespan - early.makespan)
    stalls = tuple(b + more * (b - a) for a, b in zip(early_stalls, late_stalls, strict=True))
    return Simulated(seconds=seconds + once, **memory, stalls=stalls, timeline=late)


def _tracks(problem: Problem, plan: Plan) -> list[StageTrack]:
    return [StageTrack(problem, number, stage, plan.window_bytes) for number, stage in enumerate(plan.stages)]


class StageTrack:
    """One stage with its three streams."""

    def __init__(self, problem: Problem, number: int, plan: StagePlan, window: int = 0):
        stage = problem.stages[number]
        self._blocking = problem.link.blocking
        self.passes = problem.passes[number]
        self.parts = [
            PartScripts(problem, part, letters, plan.distance)
            for part, letters in zip(stage.parts, plan.parts, strict=True)
        ]
        self._scripts = [self._script(place) for place in range(len(self.passes))]
        self.late = 0 if self._blocking or not window else min(window, host_bytes(problem, number, plan))
        self.peak = stage.static_bytes + stage.temporary_bytes + self._most_held() + self.late
        self.spans: list[Span] = []
        self.stall = 0.0
        self._now = self._out_free = self._back_free = 0.0
        self._back_done: dict[tuple[int | None, int], list[float]] = {}
        self._window, self._due_bytes = window, 0
        self._due: dict[tuple, tuple[float, int]] = {}  # when a copy that is due is done, and its bytes

    @property
    def next(self) -> Pass | None:
        return self.passes[len(self.spans)] if len(self.spans) < len(self.passes) else None

    def alone(self) -> float:
        """The time of all passes if nothing has to be waited for but copies."""
        while self.next is not None:
            self.run(0.0)
        return self._now

    def run(self, arrival: float) -> float:
        """Run the next pass, no earlier than what it works on arrives; returns when it ends."""
        place = len(self.spans)
        work, script = self.passes[place], self._scripts[place]
        now = start = max(self._now, arrival)
        if self._blocking:
            stall = self._copy_seconds(place)
            return self._end(work, start, start + script.seconds + stall, stall)
        part = self.parts[work[2]]
        out_free, back_free, stall = self._out_free, self._back_free, 0.0
        copies = part.copies
        out_done = [0.0] * len(copies) if work[0] == FORWARD else []
        back_done = self._back_done.pop(work[1:], None) or [0.0] * len(copies)
        ahead: list[Copy] = []
        ahead_done: list[float] = []
        if self._fetches(place):
            key = self.passes[place + 1][1:]
            ahead = self.parts[key[1]].copies
            ahead_done = self._back_done[key] = [0.0] * len(ahead)
        for seconds, what, copy in script.steps:
            now += seconds
            if what == OUT:
                out_free = (out_free if out_free > now else now) + copies[copy].out_seconds
                out_done[copy] = out_free
            elif what == BACK:
                self._stays(work[1:], copy)
                back_free = (back_free if back_free > now else now) + copies[copy].back_seconds
                back_done[copy] = back_free
            elif what == AHEAD:
                self._stays(key, copy)
                back_free = (back_free if back_free > now else now) + ahead[copy].back_seconds
                ahead_done[copy] = back_free
            else:
                done = back_done[copy] if what == WAIT else self._released(work[1:], copy, out_done[copy])
                if done > now:
                    stall += done - now
                    now = done
        self._out_free, self._back_free = out_free, back_free
        return self._end(work, start, now + script.rest, stall)

    def _released(self, key: tuple[int | None, int], copy: int, done: float) -> float:
        """A copy out is due, and done then; returns when those are that the window has no room for."""
        nbytes = self.parts[key[1]].copies[copy].nbytes
        self._due[key, copy] = done, nbytes
        self._due_bytes += nbytes
        done = 0.0
        while self._due_bytes > self._window:
            done, nbytes = self._due.pop(next(iter(self._due)))
            self._due_bytes -= nbytes
        return done

    def _stays(self, key: tuple[int | None, int], copy: int) -> None:
        """It is needed again: if it is late yet, it does not leave at all (its copy back is counted all the same)."""
        self._due_bytes -= self._due.pop((key, copy), (0.0, 0))[1]

    def _end(self, work: Pass, start: float, end: float, stall: float) -> float:
        self._now = end
        self.stall += stall
        self.spans.append(Span(work, start, end))
        return end

    def _copy_seconds(self, place: int) -> float:
        """All copies that start in a pass, one after the other."""
        copies = self.parts[self.passes[place][2]].copies
        ahead = self.parts[self.passes[place + 1][2]].copies if self._fetches(place) else []
        total = 0.0
        for _, what, copy in self._scripts[place].steps:
            if what == OUT:
                total += copies[copy].out_seconds
            elif what == BACK:
                total += copies[copy].back_seconds
            elif what == AHEAD:
                total += ahead[copy].back_seconds
        return total

    def _fetches(self, place: int) -> bool:
        """Whether the pass after this one is the backward of another pass, whose first copies back start here."""
        if place + 1 >= len(self.passes):
            return False
        work, coming = self.passes[place], self.passes[place + 1]
        return coming[0] == BACKWARD and coming[1:] != work[1:]

    def _script(self, place: int) -> Script:
        direction, _, part = self.passes[place]
        ahead = self.parts[self.passes[place + 1][2]] if self._fetches(place) else None
        return self.parts[part].script(direction == FORWARD, ahead, place > 0 and self._fetches(place - 1))

    def _most_held(self) -> int:
        held = highest = 0
        for script in self._scripts:
            highest = max(highest, held + script.highest)
            held += script.net
        return highest

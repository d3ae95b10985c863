"""An order of passes played over time: when each pass runs on its stage, how long stages idle, and whether it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

from mindspeed_mem.passes import BACKWARD, FORWARD, WEIGHT, Pass
from mindspeed_mem.schedule.placement import Placement


class DeadlockError(RuntimeError):
    """The order cannot be completed: each stage that is not done waits for a pass that never runs."""


class Span(NamedTuple):
    """One pass with the time it starts and ends at."""

    work: Pass
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What `simulate` found: the spans of each stage in the order they run."""

    stages: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """The time from the first pass of any stage to the end of the last."""
        return max((spans[-1].end for spans in self.stages if spans), default=0.0)

    def idle_share(self, stage: int | None = None) -> float:
        """The share of the makespan in which this stage, or the average one, computes nothing."""
        stages = self.stages if stage is None else self.stages[stage : stage + 1]
        whole = self.makespan * len(stages)
        return 1 - sum(span.end - span.start for spans in stages for span in spans) / whole if whole else 0.0


def before(work: Pass, stage: int, placement: Placement) -> tuple[int, Pass] | None:
    """The (stage, pass) whose result this pass works on, or None for the first part's forward.

    A forward works on what the part before it sends, a backward on what the part after it sends, and the last part's
    backward on its own forward; gradients of weights on what the backward before them has left.
    """
    direction, micro_batch, chunk = work
    if direction == WEIGHT:
        return stage, (BACKWARD, micro_batch, chunk)
    part = placement.part(stage, chunk)
    if direction == BACKWARD and part == placement.parts - 1:
        return stage, (FORWARD, micro_batch, chunk)
    return _neighbour(work, part + (-1 if direction == FORWARD else 1), placement)


def after(work: Pass, stage: int, placement: Placement) -> tuple[int, Pass] | None:
    """The (stage, pass) that works on what this pass hands on, or None where the model ends in this direction."""
    if work[0] == WEIGHT:
        return None
    return _neighbour(work, placement.part(stage, work[2]) + (1 if work[0] == FORWARD else -1), placement)


def _neighbour(work: Pass, part: int, placement: Placement) -> tuple[int, Pass] | None:
    if not 0 <= part < placement.parts:
        return None
    stage, chunk = placement.place(part)
    return stage, (work[0], work[1], chunk)


def simulate(
    passes: Sequence[Sequence[Pass]],
    virtual_stages: int = 1,
    *,
    v: bool = False,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    weight: float | Sequence[float] = 1.0,
    send: float = 0.0,
) -> Timeline:
    """Play the order of each stage: a pass starts when its stage is free and what it works on has arrived.

    Args:
        passes: of each stage, as `order` returns them.
        virtual_stages: model chunks of each stage.
        v: they lie in a V (placement.py).
        forward, backward: the time of one pass, of every stage or of each; in any unit, the result has the same.
        weight: the time of the gradients of weights, where they are passes of their own and no part of the backward.
        send: what passes between the end of a pass and the arrival of its result on another stage. Sends and receives
            occupy no stage.

    Raises:
        DeadlockError: the order cannot be completed.
    """
    count = len(passes)
    times = {way: _of_each(time, count) for way, time in ((FORWARD, forward), (BACKWARD, backward), (WEIGHT, weight))}
    tracks = [
        _Uniform(of_stage, {way: of_way[stage] for way, of_way in times.items()})
        for stage, of_stage in enumerate(passes)
    ]
    placement = Placement(count, virtual_stages, v)
    timeline = play(tracks, placement, send)
    _check_done(passes, timeline, placement)
    return timeline


class Track(Protocol):
    """A stage as `play` sees it."""

    spans: list[Span]
    """The passes that it has run."""

    @property
    def next(self) -> Pass | None:
        """The pass that comes next; None: it has run all."""

    def run(self, arrival: float) -> float:
        """Run that pass, no earlier than what it works on arrives; returns when it ends."""


def play(tracks: Sequence[Track], placement: Placement, send: float) -> Timeline:
    """Run the passes of all stages, each when what it works on has arrived, for as long as any can run; those that
    tracks have run already have ended as they say."""
    ended: list[dict[Pass, float]] = [{one.work: one.end for one in track.spans} for track in tracks]
    waiting: list[dict[Pass, list[int]]] = [{} for _ in tracks]
    runnable = deque(range(len(tracks)))
    while runnable:
        stage = runnable.popleft()
        track, sources = tracks[stage], _sources(stage, placement)
        while (work := track.next) is not None:
            direction, micro_batch, chunk = work
            source, arrival = sources[direction, chunk], 0.0
            if source is not None:
                there, way, part = source
                need = way, micro_batch, part
                if need not in ended[there]:
                    waiting[there].setdefault(need, []).append(stage)
                    break
                arrival = ended[there][need]
                if there != stage:
                    arrival = arrival + send  # not in place: it may be an array
            ended[stage][work] = track.run(arrival)
            if work in waiting[stage]:
                runnable.extend(waiting[stage].pop(work))
    return Timeline(tuple(tuple(track.spans) for track in tracks))


@lru_cache(maxsize=1024)
def _sources(stage: int, placement: Placement) -> dict[tuple[str, int], tuple[int, str, int] | None]:
    """`before` for a stage's passes of any micro-batch: stage, direction and chunk by direction and chunk."""
    found: dict[tuple[str, int], tuple[int, str, int] | None] = {}
    for direction in (FORWARD, BACKWARD, WEIGHT):
        for chunk in range(placement.virtual_stages):
            need = before((direction, 0, chunk), stage, placement)
            found[direction, chunk] = None if need is None else (need[0], need[1][0], need[1][2])
    return found


class _Uniform:
    """A stage all of whose passes of one kind take the same time."""

    def __init__(self, passes: Sequence[Pass], times: Mapping[str, float]) -> None:
        self.spans: list[Span] = []
        self._passes, self._times = passes, times

    @property
    def next(self) -> Pass | None:
        return self._passes[len(self.spans)] if len(self.spans) < len(self._passes) else None

    def run(self, arrival: float) -> float:
        work = self._passes[len(self.spans)]
        start = max(self.spans[-1].end if self.spans else 0.0, arrival)
        self.spans.append(Span(work, start, start + self._times[work[0]]))
        return self.spans[-1].end


def _of_each(time: float | Sequence[float], count: int) -> list[float]:
    return [float(time)] * count if isinstance(time, (int, float)) else [float(t) for t in time]


def _check_done(passes: Sequence[Sequence[Pass]], timeline: Timeline, placement: Placement) -> None:
    stuck = []
    for stage, (all_of_it, done) in enumerate(zip(passes, timeline.stages, strict=True)):
        if len(done) < len(all_of_it):
            work = all_of_it[len(done)]
            needed_on, needed = before(work, stage, placement) or (stage, work)
            stuck.append(f"stage {stage} cannot run {name(work)}: it waits for {name(needed)} of stage {needed_on}")
    if stuck:
        raise DeadlockError("; ".join(stuck))


def name(work: Pass, with_chunk: bool = True) -> str:
    """A short name: F3.1 is the forward of micro-batch 3 on chunk 1, B3.1 its backward, W3.1 its weights' gradients."""
    letter = {FORWARD: "F", BACKWARD: "B", WEIGHT: "W"}[work[0]]
    return f"{letter}{work[1]}.{work[2]}" if with_chunk else f"{letter}{work[1]}"


def names(passes: Iterable[Pass], virtual_stages: int) -> str:
    """The short names of these passes in a line, with chunks where there is more than one."""
    return " ".join(name(work, virtual_stages > 1) for work in passes)

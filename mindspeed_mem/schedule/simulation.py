"""An order of passes played over time: when each pass runs on its stage, how long stages idle, and whether it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mindspeed_mem.passes import BACKWARD, FORWARD, Pass


class DeadlockError(RuntimeError):
    """The order cannot be completed: each stage that is not done waits for a pass that never runs."""


@dataclass(frozen=True)
class Span:
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


def before(work: Pass, stage: int, stages: int, virtual_stages: int) -> tuple[int, Pass] | None:
    """The (stage, pass) whose result this pass works on, or None for the first chunk's forward.

    Chunk c of stage p is part c * stages + p of the model. A forward works on what the part before it sends, a
    backward on what the part after it sends, and the last part's backward on its own forward.
    """
    direction, micro_batch, chunk = work
    part, last = chunk * stages + stage, stages * virtual_stages - 1
    if direction == FORWARD:
        return ((part - 1) % stages, (FORWARD, micro_batch, (part - 1) // stages)) if part else None
    if part == last:
        return stage, (FORWARD, micro_batch, chunk)
    return (part + 1) % stages, (BACKWARD, micro_batch, (part + 1) // stages)


def after(work: Pass, stage: int, stages: int, virtual_stages: int) -> tuple[int, Pass] | None:
    """The (stage, pass) that works on what this pass sends, or None where the model ends in this direction."""
    direction, micro_batch, chunk = work
    part = chunk * stages + stage + (1 if direction == FORWARD else -1)
    return (part % stages, (direction, micro_batch, part // stages)) if 0 <= part < stages * virtual_stages else None


def simulate(
    passes: Sequence[Sequence[Pass]],
    virtual_stages: int = 1,
    *,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    send: float = 0.0,
) -> Timeline:
    """Play the order of each stage: a pass starts when its stage is free and what it works on has arrived.

    `forward` and `backward` are the time of one pass, of every stage or of each; `send` passes between the end of a
    pass and the arrival of its result on another stage. Sends and receives occupy no stage. Raises DeadlockError.
    """
    count = len(passes)
    times = {FORWARD: _of_each(forward, count), BACKWARD: _of_each(backward, count)}
    ended: dict[tuple[int, Pass], float] = {}
    waiting: dict[tuple[int, Pass], list[int]] = {}
    spans: list[list[Span]] = [[] for _ in passes]
    runnable = deque(range(count))
    while runnable:
        stage = runnable.popleft()
        while len(spans[stage]) < len(passes[stage]):
            work = passes[stage][len(spans[stage])]
            needs = _needs(work, stage, count, virtual_stages)
            missing = next((need for need in needs if need not in ended), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(stage)
                break
            arrivals = [ended[need] + (send if need[0] != stage else 0.0) for need in needs]
            start = max([spans[stage][-1].end if spans[stage] else 0.0, *arrivals])
            end = start + times[work[0]][stage]
            spans[stage].append(Span(work, start, end))
            ended[stage, work] = end
            runnable.extend(waiting.pop((stage, work), ()))
    _check_done(passes, spans, virtual_stages)
    return Timeline(tuple(tuple(of_stage) for of_stage in spans))


def _of_each(time: float | Sequence[float], count: int) -> list[float]:
    return [float(time)] * count if isinstance(time, (int, float)) else [float(t) for t in time]


def _needs(work: Pass, stage: int, stages: int, virtual_stages: int) -> list[tuple[int, Pass]]:
    need = before(work, stage, stages, virtual_stages)
    own = [(stage, (FORWARD, *work[1:]))] if work[0] == BACKWARD else []
    return own if need is None or need in own else [need, *own]


def _check_done(passes: Sequence[Sequence[Pass]], spans: list[list[Span]], virtual_stages: int) -> None:
    stuck = []
    for stage, (all_of_it, done) in enumerate(zip(passes, spans, strict=True)):
        if len(done) < len(all_of_it):
            work = all_of_it[len(done)]
            ran = {(stage, span.work) for stage, of_stage in enumerate(spans) for span in of_stage}
            need = next(n for n in _needs(work, stage, len(passes), virtual_stages) if n not in ran)
            stuck.append(f"stage {stage} cannot run {name(work)}: it waits for {name(need[1])} of stage {need[0]}")
    if stuck:
        raise DeadlockError("; ".join(stuck))


def name(work: Pass, with_chunk: bool = True) -> str:
    """A short name: F3.1 is the forward of micro-batch 3 on chunk 1."""
    letter = "F" if work[0] == FORWARD else "B"
    return f"{letter}{work[1]}.{work[2]}" if with_chunk else f"{letter}{work[1]}"


def names(passes: Iterable[Pass], virtual_stages: int) -> str:
    """The short names of these passes in a line, with chunks where there is more than one."""
    return " ".join(name(work, virtual_stages > 1) for work in passes)

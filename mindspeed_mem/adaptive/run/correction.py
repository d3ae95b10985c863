"""What a run showed, put into the planning problem: memory that was overlooked, and how fast things really are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mindspeed_mem.activation.observe.rank_profile import Outside
from mindspeed_mem.adaptive.problem.definition import LayerClass, Problem, Stage
from mindspeed_mem.adaptive.search.decisions import Plan
from mindspeed_mem.adaptive.search.simulation import Simulated, simulate

CLOSE = 0.05
"""Times that differ by less than this share are taken as equal: single steps differ as much."""
_SLOWEST, _SLOWER = 0.1, 0.25
"""Of a link's speed: what it is taken for at least after one correction; where copies block, and where they do not."""
_WAITED = CLOSE / 2
"""Waits for copies that differ from the prediction by no more than this share of a call say nothing about the link."""
_MOST_WAITED = 0.8
"""Of a call: waits beyond that are taken for counted twice, on several streams."""
_ROUNDS = 6
"""In which both speeds are brought together, at most."""
_HALVINGS = 6
"""Of a range of four times the speed: to 2 %."""
_LEAST = 0.02
"""Of the limit: what a stage had too little at least, where activations had to leave in an emergency, or where the
allocator could go on only after it had given back what it kept."""


_PASSES = ("forward_seconds", "backward_seconds", "weight_seconds")


class Measured(NamedTuple):
    """What one rank saw of a training call that executed a plan."""

    stage: int
    seconds: float
    """The call, without the optimizer's step."""
    peak: int
    """Bytes."""
    stall: float = 0.0
    """Seconds in which computation stood still for copies."""
    evicted: int = 0
    """Bytes that left because memory had run out, whatever the plan said."""
    retries: int = 0
    """How often the allocator had to give back what it kept: that was in pieces too small for a request."""
    micro_batches: int = 0
    """Of the call; 0: as many as were planned for."""


def as_planned(
    problem: Problem, plan: Plan, simulated: Simulated, measured: Sequence[Measured]
) -> tuple[Measured, ...]:
    """What a call with as many micro-batches as ``problem`` has would have shown, by what is predicted of both."""
    planned = problem.pipeline.micro_batches
    number = max(one.micro_batches for one in measured) or planned
    if number == planned:
        return tuple(measured)
    other = problem.with_micro_batches(number)
    ran = simulate(other, plan)
    ratio = passes_seconds(problem, simulated) / passes_seconds(other, ran)
    return tuple(
        one._replace(
            seconds=ratio * one.seconds,
            stall=ratio * one.stall,
            peak=one.peak + simulated.peaks[one.stage] - ran.peaks[one.stage],
            evicted=-(-one.evicted * planned // number),
            micro_batches=planned,
        )
        for one in measured
    )


def passes_seconds(problem: Problem, simulated: Simulated) -> float:
    """The predicted counterpart of `Measured.seconds`."""
    return simulated.seconds - max(stage.step_seconds for stage in problem.stages)


def corrected(
    problem: Problem,
    plan: Plan,
    simulated: Simulated,
    measured: Sequence[Measured],
    least: Mapping[int, int] | None = None,
) -> Problem:
    """The problem for which ``plan``, simulated as ``simulated``, would have been predicted as it was ``measured``.

    Temporaries take up whatever the peaks are off beyond the window of late copies, and what an allocator lacked that
    had to retry. Where activations had to leave in an emergency, times say nothing: those copies, and what waited for
    them, were none of the plan's. Otherwise computation is as much slower or faster as the call was without its waits
    for copies, and the link so much that the call would wait as long. Where copies block, the link is slower if the
    call took longer at all: a copy also costs the host its time.

    ``least``: bytes of temporaries by stage that are not gone below: with fewer there may have been too little memory.
    """
    stages = tuple(
        _stage(problem, simulated, number, measured, (least or {}).get(number, 0))
        for number in range(len(problem.stages))
    )
    problem = dataclasses.replace(problem, stages=stages)
    predicted, seconds = passes_seconds(problem, simulated), max(one.seconds for one in measured)
    if any(one.evicted for one in measured) or abs(seconds - predicted) <= CLOSE * predicted:
        return problem
    link, foreseen = problem.link, max(simulated.stalls)
    if link.blocking:
        if foreseen and seconds > predicted:
            return _with_link(problem, max(_SLOWEST, foreseen / (foreseen + seconds - predicted)))
        ratio = seconds / predicted
        return _with_link(_with_passes(problem, ratio), 1 / ratio)
    waited = min(max(one.stall for one in measured), _MOST_WAITED * seconds)
    ratio = (seconds - waited) / max(predicted - foreseen, (1 - _MOST_WAITED) * predicted)
    about = _WAITED * seconds
    for _ in range(_ROUNDS):  # in a pipeline stages wait for each other's waits, too
        slower = _with_passes(problem, ratio)
        found = _with_link(slower, _speed(slower, plan, waited, about))
        again = simulate(found, plan)
        off = seconds - passes_seconds(found, again)
        if abs(off) <= about or abs(max(again.stalls) - waited) > about:  # no link explains it
            break
        ratio *= 1 + off / (seconds - waited)
    return found


def _speed(problem: Problem, plan: Plan, waited: float, about: float) -> float:
    """How many times as fast the link has to be, for the plan to wait so many seconds, or ``about`` so many."""

    def waits(speed: float) -> float:
        return max(simulate(_with_link(problem, speed), plan).stalls)

    now = waits(1.0)
    if abs(now - waited) <= about:
        return 1.0
    low, high = (_SLOWER, 1.0) if now < waited else (1.0, 1 / _SLOWER)
    for _ in range(_HALVINGS):  # waits fall with speed
        middle = (low * high) ** 0.5
        low, high = (middle, high) if waits(middle) > waited else (low, middle)
    return high


def _with_link(problem: Problem, speed: float) -> Problem:
    """With a link of ``speed`` times what it was taken for."""
    return dataclasses.replace(problem, link=problem.link.scaled(speed))


def _with_passes(problem: Problem, ratio: float) -> Problem:
    """Where all that is computed takes ``ratio`` times as long."""
    stages = tuple(
        dataclasses.replace(
            stage,
            parts=tuple(
                dataclasses.replace(part, before=_outside(part.before, ratio), after=_outside(part.after, ratio))
                for part in stage.parts
            ),
        )
        for stage in problem.stages
    )
    classes = tuple(_class(kind, ratio) for kind in problem.classes)
    host = _scaled(problem.host, ratio, "moved_seconds", "rerun_seconds")
    return dataclasses.replace(problem, classes=classes, stages=stages, host=host)


def lacked(measured: Sequence[Measured]) -> set[int]:
    """The stages that had too little memory."""
    return {one.stage for one in measured if one.evicted or one.retries}


def _stage(problem: Problem, simulated: Simulated, number: int, measured: Sequence[Measured], least: int) -> Stage:
    stage, mine = problem.stages[number], [one for one in measured if one.stage == number]
    if not mine:
        return stage
    over = max(one.peak for one in mine) - simulated.peaks[number]
    over = max(over, min(0, over + simulated.late[number]))  # copies that were in time now need not be so next time
    evicted = max(one.evicted for one in mine)
    if evicted:  # nobody knows how far the peak would have gone
        each = evicted // problem.pipeline.micro_batches
        over = max(over, problem.device_limit - simulated.peaks[number] + each, round(_LEAST * problem.device_limit))
    if any(one.retries for one in mine):  # a peak does not count the pieces that were of no use
        over = max(over, round((1 + _LEAST) * problem.device_limit) - simulated.peaks[number])
    return dataclasses.replace(stage, temporary_bytes=max(least, stage.temporary_bytes + over))


def _class(kind: LayerClass, ratio: float) -> LayerClass:
    operators = tuple(_scaled(one, ratio, *_PASSES) for one in kind.operators)
    groups = tuple(_scaled(one, ratio, "recompute_seconds") for one in kind.groups)
    return dataclasses.replace(kind, operators=operators, groups=groups)


def _outside(outside: Outside, ratio: float) -> Outside:
    return _scaled(outside, ratio, *_PASSES)


def _scaled(one, ratio: float, *names: str):
    values = {name: getattr(one, name) for name in names}
    return dataclasses.replace(one, **{name: value * ratio for name, value in values.items() if value is not None})

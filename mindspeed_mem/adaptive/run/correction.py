"""What a run showed, put into the planning problem: memory that was overlooked, and how fast things really are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from mindspeed_mem.activation.observe.rank_profile import Outside
from mindspeed_mem.adaptive.problem.definition import LayerClass, Problem, Stage
from mindspeed_mem.adaptive.search.simulation import Simulated

CLOSE = 0.05
"""Times that differ by less than this share are taken as equal: single steps differ as much."""
_SLOWEST = 0.1
"""Of a link's speed: what it is taken for at least after one correction."""
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


def passes_seconds(problem: Problem, simulated: Simulated) -> float:
    """The predicted counterpart of `Measured.seconds`."""
    return simulated.seconds - max(stage.step_seconds for stage in problem.stages)


def corrected(problem: Problem, simulated: Simulated, measured: Sequence[Measured]) -> Problem:
    """The problem for which the plan simulated as ``simulated`` would have been predicted as it was ``measured``.

    Temporaries take up whatever the peaks are off beyond the window of late copies, and what an allocator lacked that
    had to retry. Where computation waited for copies longer than predicted, the link is slower; so it is, where copies
    block, if the call took longer at all: a copy also costs the host its time. Otherwise everything is as much slower
    or faster as the call was.
    """
    stages = tuple(_stage(problem, simulated, number, measured) for number in range(len(problem.stages)))
    problem = dataclasses.replace(problem, stages=stages)
    predicted, seconds = passes_seconds(problem, simulated), max(one.seconds for one in measured)
    if abs(seconds - predicted) <= CLOSE * predicted:
        return problem
    link = problem.link
    waited = max(one.stall - simulated.stalls[one.stage] for one in measured)
    copies = max(simulated.stalls)
    slower = 1.0
    if link.blocking and copies and seconds > predicted:
        slower = max(_SLOWEST, copies / (copies + seconds - predicted))
    elif waited > (seconds - predicted) / 2 > 0:
        slower = max(0.5, predicted / seconds)
    if slower < 1:
        return dataclasses.replace(problem, link=_scaled(link, slower, "out", "back", "out_alone", "back_alone"))
    ratio = seconds / predicted
    if link.blocking:
        link = _scaled(link, 1 / ratio, "out", "back", "out_alone", "back_alone")
    classes = tuple(_class(kind, ratio) for kind in problem.classes)
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
    return dataclasses.replace(problem, classes=classes, stages=stages, link=link)


def _stage(problem: Problem, simulated: Simulated, number: int, measured: Sequence[Measured]) -> Stage:
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
    return dataclasses.replace(stage, temporary_bytes=max(0, stage.temporary_bytes + over))


def _class(kind: LayerClass, ratio: float) -> LayerClass:
    operators = tuple(_scaled(one, ratio, *_PASSES) for one in kind.operators)
    groups = tuple(_scaled(one, ratio, "recompute_seconds") for one in kind.groups)
    return dataclasses.replace(kind, operators=operators, groups=groups)


def _outside(outside: Outside, ratio: float) -> Outside:
    return _scaled(outside, ratio, *_PASSES)


def _scaled(one, ratio: float, *names: str):
    values = {name: getattr(one, name) for name in names}
    return dataclasses.replace(one, **{name: value * ratio for name, value in values.items() if value is not None})

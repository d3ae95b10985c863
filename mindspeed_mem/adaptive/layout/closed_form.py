"""Seconds of a step without playing it: what no order of passes is below."""

from __future__ import annotations

from collections.abc import Callable

from mindspeed_mem.adaptive.problem.definition import LayerClass, Part, Problem


def seconds(problem: Problem, more: Callable[[LayerClass], float] | None = None) -> float:
    """A step with everything kept: on each stage the way of the first micro-batch to it, all passes, and the way back
    of the last one. With stages that are alike, 1F1B and Megatron's virtual stages take just that. Where gradients of
    weights are passes of their own there is no way back: they may come last.

    more: seconds that a plan adds to the backward of a layer of each class.
    """
    line = problem.pipeline
    longest = way = 0.0
    for stage in problem.stages:
        works = [part_seconds(problem, part, more) for part in stage.parts]
        longest = max(longest, way + line.micro_batches * sum(works))
        way += way_seconds(problem, stage.parts[0], works[0])
    return longest + max(stage.step_seconds for stage in problem.stages)


def way_seconds(problem: Problem, part: Part, work: float) -> float:
    """What the stages after this one wait for, and those before it afterwards; ``work``: of the first part."""
    send = problem.pipeline.send_seconds
    return forward_seconds(problem, part) + send if problem.pipeline.apart else work + 2 * send


def forward_seconds(problem: Problem, part: Part) -> float:
    """A forward of one part."""
    layers = sum(problem.class_of[name].forward_seconds for name in part.layers)
    return layers + part.before.forward_seconds + part.after.forward_seconds


def part_seconds(problem: Problem, part: Part, more: Callable[[LayerClass], float] | None = None) -> float:
    """A forward and a backward of one part."""
    outside = (part.before, part.after)
    total = sum(one.forward_seconds + one.backward_seconds for one in outside)
    for name in dict.fromkeys(part.layers):
        kind = problem.class_of[name]
        each = kind.forward_seconds + kind.backward_seconds + (0.0 if more is None else more(kind))
        total += part.layers.count(name) * each
    return total

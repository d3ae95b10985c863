"""What a plan is compared with: keeping everything, and Megatron's full recomputation of every layer."""

from __future__ import annotations

import dataclasses

from mindspeed_mem.adaptive.closed_form import all_kept
from mindspeed_mem.adaptive.layout import Plan, StagePlan, lay_out
from mindspeed_mem.adaptive.problem import Group, LayerClass, Problem, Stage
from mindspeed_mem.adaptive.simulation import Simulated, simulate


def keep_all(problem: Problem) -> Simulated:
    """Nothing is swapped or recomputed."""
    letters = lay_out(problem, all_kept(problem), "first", False)
    return simulate(problem, Plan(stages=tuple(StagePlan(chunks=tuple(map(tuple, one))) for one in letters)))


def full_recompute(problem: Problem) -> Simulated:
    """Megatron's full recomputation, layer by layer: only layers' inputs are kept, whole forwards run again, the last
    matrix product included."""
    classes = tuple(_checkpointed(kind) for kind in problem.classes)
    stages = tuple(_one_layer_more(problem, stage) for stage in problem.stages)
    return keep_all(dataclasses.replace(problem, classes=classes, stages=stages))


def _checkpointed(kind: LayerClass) -> LayerClass:
    last = kind.operators[-1]
    again = dataclasses.replace(last, backward_seconds=last.backward_seconds + kind.forward_seconds)
    first = kind.operators[0].name
    inputs = Group(
        name="input",
        bytes=kind.input_bytes,
        operators=(last.name,),
        used_by=(first,),
        swappable=False,
        from_previous=True,
    )
    return dataclasses.replace(kind, operators=(*kind.operators[:-1], again), groups=(inputs,))


def _one_layer_more(problem: Problem, stage: Stage) -> Stage:
    """With what the layer that runs again makes for its backward."""
    kinds = {problem.class_of[name] for chunk in stage.chunks for name in chunk.layers}
    made = max((sum(g.bytes for g in kind.groups if not g.from_previous) for kind in kinds), default=0)
    return dataclasses.replace(stage, temporary_bytes=stage.temporary_bytes + made)

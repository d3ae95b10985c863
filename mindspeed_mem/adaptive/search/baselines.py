"""What a plan is compared with: keeping everything, and Megatron's full recomputation of some or all layers."""

from __future__ import annotations

import dataclasses

from mindspeed_mem.adaptive.problem.definition import Group, LayerClass, Part, Problem
from mindspeed_mem.adaptive.search.decisions import RECOMPUTE, Plan, StagePlan, all_kept, lay_out
from mindspeed_mem.adaptive.search.simulation import Simulated, simulate

_AGAIN = ", as a whole"


def keep_all(problem: Problem) -> Simulated:
    """Nothing is swapped or recomputed."""
    return simulate(problem, _kept(problem))


def full_recompute(problem: Problem, layers: int | None = None) -> Simulated:
    """Megatron's full recomputation, layer by layer: only layers' inputs are kept, whole forwards run again, the last
    matrix product included.

    layers: of only so many layers, the first of each part (``--recompute-method block --recompute-num-layers``).
    """
    again = tuple(_checkpointed(kind) for kind in problem.classes)
    stages = tuple(
        dataclasses.replace(stage, parts=tuple(_of_part(part, layers) for part in stage.parts))
        for stage in problem.stages
    )
    changed = dataclasses.replace(problem, classes=(*problem.classes, *again), stages=stages)
    plan = _kept(changed)
    of_stages = []
    for stage, of_stage in zip(stages, plan.stages, strict=True):
        rows = [zip(part.layers, text, strict=True) for part, text in zip(stage.parts, of_stage.parts, strict=True)]
        texts = [tuple(text[:1] + RECOMPUTE if name.endswith(_AGAIN) else text for name, text in row) for row in rows]
        of_stages.append(StagePlan(parts=tuple(texts)))
    return simulate(changed, Plan(stages=tuple(of_stages)))


def _kept(problem: Problem) -> Plan:
    letters = lay_out(problem, all_kept(problem), "first", False)
    return Plan(stages=tuple(StagePlan(parts=tuple(map(tuple, one))) for one in letters))


def _of_part(part: Part, layers: int | None) -> Part:
    names = (name + _AGAIN for name in part.layers[:layers])
    return dataclasses.replace(part, layers=(*names, *(() if layers is None else part.layers[layers:])))


def _checkpointed(kind: LayerClass) -> LayerClass:
    """The layer with two groups: its input, which stays, and all it makes, which is made again when its backward begins
    and is there until that ends."""
    first, last = kind.operators[0].name, kind.operators[-1].name
    inputs = Group(
        name="input", bytes=kind.input_bytes, operators=(last,), used_by=(first,), swappable=False, from_previous=True
    )
    made = Group(
        name="made",
        bytes=sum(group.bytes for group in kind.groups if not group.from_previous),
        operators=(last,),
        used_by=(first, last),
        recompute_seconds=kind.forward_seconds,
    )
    return dataclasses.replace(kind, name=kind.name + _AGAIN, groups=(inputs, made))

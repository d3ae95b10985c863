"""What can be wrong with a planning problem that its types do not show: names that do not fit together, and sizes."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_mem.activation.observe.rank_profile import Outside
from mindspeed_mem.adaptive.problem.definition import SCHEDULES, LayerClass, PlannedOperator, Problem
from mindspeed_mem.schedule import problems as schedule_problems


def problems_of(problem: Problem) -> list[str]:
    """Every reason, in words and with its path, why this cannot be planned."""
    found = ["output_gradients: plans say that; leave it out"] * problem.output_gradients
    for number, kind in enumerate(problem.classes):
        found += [f"classes[{number}] ({kind.name}){text}" for text in _of_class(problem, kind)]
    names = [kind.name for kind in problem.classes]
    found += [f"classes: the name {name!r} is given twice" for name in sorted({n for n in names if names.count(n) > 1})]
    if not problem.stages:
        return [*found, "stages: there are none; at least one is needed"]
    found += _of_stages(problem, set(names))
    for name in ("out", "back"):
        if getattr(problem.link, name) <= 0:
            found.append(f"link.{name}: got {getattr(problem.link, name)}; allowed: GB/s above 0")
    line = problem.pipeline
    sizes = (len(problem.stages), len(problem.stages[0].parts), line.micro_batches)
    if line.schedule not in SCHEDULES:
        return [*found, f"pipeline.schedule: got {line.schedule!r}; allowed: {', '.join(SCHEDULES)}"]
    wrong = schedule_problems(
        *sizes,
        group_size=line.group_size,
        cap=line.cap,
        megatron_loop=line.megatron_loop,
        split=line.apart,
        v=line.schedule == "v",
    )
    return found + [f"pipeline: {text}" for text in wrong]


def _of_class(problem: Problem, kind: LayerClass) -> Iterator[str]:
    names = [operator.name for operator in kind.operators]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f".operators: {name!r} is given twice"
    for operator in kind.operators:
        if operator.weight_seconds > operator.backward_seconds:
            most = f"at most its backward_seconds, {operator.backward_seconds}"
            yield f".operators ({operator.name}).weight_seconds: got {operator.weight_seconds}; allowed: {most}"
        yield from _of_gradients(f".operators ({operator.name})", operator)
    before: list[str] = []
    for number, group in enumerate(kind.groups):
        path = f".groups[{number}] ({group.name})"
        if group.name in before:
            yield f"{path}: there is a group of that name already"
        makers = [problem.class_of[other] for other in _previous(problem, kind)] if group.from_previous else [kind]
        for maker in makers:
            for name in group.operators:
                if name not in maker.index:
                    yield f"{path}.operators: {name!r} is no operator of {maker.name}"
        for name in group.used_by:
            if name not in kind.index:
                yield f"{path}.used_by: {name!r} is no operator of {kind.name}"
        for name, _ in group.leaves:
            if name not in group.used_by:
                yield f"{path}.leaves: {name!r} is not in its used_by"
        if not group.operators or not group.used_by:
            yield f"{path}: operators and used_by need at least one name each"
        for name in group.needs:
            if name not in before:
                yield f"{path}.needs: {name!r} is no group that stands before it"
        if group.recompute_keeps > group.bytes:
            yield f"{path}.recompute_keeps: got {group.recompute_keeps}; allowed: at most its bytes, {group.bytes}"
        if group.weight_bytes > group.bytes:
            yield f"{path}.weight_bytes: got {group.weight_bytes}; allowed: at most its bytes, {group.bytes}"
        elif (early := sum(size for _, size in group.leaves)) > group.bytes - group.weight_bytes:
            most = f"at most its bytes without its weight_bytes, {group.bytes - group.weight_bytes}"
            yield f"{path}.leaves: got {early} bytes; allowed: {most}"
        if group.from_previous and group.recompute_seconds is not None:
            yield f"{path}.recompute_seconds: what the layer before made is not recomputed here; allowed: null"
        before.append(group.name)


def _of_gradients(path: str, one: PlannedOperator | Outside) -> Iterator[str]:
    if one.gradient_bytes > one.weight_bytes:
        most = f"at most its weight_bytes, {one.weight_bytes}"
        yield f"{path}.gradient_bytes: got {one.gradient_bytes}; allowed: {most}"


def _previous(problem: Problem, kind: LayerClass) -> set[str]:
    """The classes of layers that stand before one of this class in a part."""
    parts = (part.layers for stage in problem.stages for part in stage.parts)
    pairs = {pair for layers in parts for pair in zip(layers, layers[1:], strict=False)}
    return {first for first, second in pairs if second == kind.name and first in problem.class_of}


def _of_stages(problem: Problem, known: set[str]) -> Iterator[str]:
    virtual, first = len(problem.stages[0].parts), 0
    for number, stage in enumerate(problem.stages):
        if len(stage.parts) != virtual or not virtual:
            yield f"stages[{number}].parts: there are {len(stage.parts)}; all stages need the same number, at least 1"
        for place, part in enumerate(stage.parts):
            for name in sorted(set(part.layers) - known):
                yield f"stages[{number}].parts[{place}].layers: there is no class {name!r}"
            for end in ("before", "after"):
                yield from _of_gradients(f"stages[{number}].parts[{place}].{end}", getattr(part, end))
    if all(len(stage.parts) == virtual for stage in problem.stages):
        placement = problem.placement
        for number, place in map(placement.place, range(placement.parts)):
            part = problem.stages[number].parts[place]
            if part.first_layer != first:
                yield (
                    f"stages[{number}].parts[{place}].first_layer: got {part.first_layer}; allowed: {first}, the "
                    "number of layers before it in the model"
                )
            first += len(part.layers)

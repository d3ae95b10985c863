"""What a plan is compared with: keeping everything, Megatron's full recomputation of some or all layers, and plans that
are set with one line: the same operators recomputed in all layers, or whole layers."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Collection
from functools import lru_cache

from mindspeed_mem.activation.observe.rank_profile import HostCost
from mindspeed_mem.adaptive.problem.definition import Group, LayerClass, Part, Problem
from mindspeed_mem.adaptive.search.decisions import NOTHING, RECOMPUTE, Plan, StagePlan, all_kept, lay_out
from mindspeed_mem.adaptive.search.layer_script import leaving
from mindspeed_mem.adaptive.search.simulation import Simulated, fits, simulate

_AGAIN = ", as a whole"
_SETS = 4096
"""Sets of groups that are looked at, those of few groups first."""


def keep_all(problem: Problem) -> Simulated:
    """Nothing is swapped or recomputed."""
    return simulate(problem, _kept(problem))


def full_recompute(problem: Problem, layers: int | None = None) -> Simulated:
    """Megatron's full recomputation, layer by layer: only layers' inputs are kept, whole forwards run again, the last
    matrix product included.

    layers: of only so many layers, the first of each part (``--recompute-method block --recompute-num-layers``).
    """
    return simulate(*_fully(problem, layers))


def _fully(problem: Problem, layers: int | None) -> tuple[Problem, Plan]:
    """The problem in which layers are checkpointed, and the plan that runs them again."""
    ends = tuple(dict.fromkeys(kind.operators[-1].name for kind in problem.classes))
    again = tuple(_checkpointed(kind, ends, problem.pipeline.splits) for kind in problem.classes)
    stages = tuple(
        dataclasses.replace(stage, parts=tuple(_of_part(part, layers) for part in stage.parts))
        for stage in problem.stages
    )
    changed = dataclasses.replace(problem, classes=(*problem.classes, *again), stages=stages, host=HostCost())
    plan = _kept(changed)
    of_stages = []
    for stage, of_stage in zip(stages, plan.stages, strict=True):
        rows = [zip(part.layers, text, strict=True) for part, text in zip(stage.parts, of_stage.parts, strict=True)]
        texts = [tuple(text[:1] + RECOMPUTE if name.endswith(_AGAIN) else text for name, text in row) for row in rows]
        of_stages.append(StagePlan(parts=tuple(texts)))
    return changed, Plan(stages=tuple(of_stages))


def block_recompute(problem: Problem) -> tuple[int, Simulated] | None:
    """Megatron's recomputation of the fewest layers of each part with which everything fits; None: not even of all."""
    counts = range(1, _most_layers(problem) + 1)
    place = bisect.bisect_left(counts, True, key=lambda count: fits(*_fully(problem, count)))
    return (counts[place], full_recompute(problem, counts[place])) if place < len(counts) else None


def same_operators(problem: Problem) -> tuple[tuple[str, ...], Plan] | None:
    """The groups that recompute least of those that, recomputed in all layers, make everything fit; and the plan."""
    seconds: dict[str, float] = {}
    for kind in problem.classes:
        for group in kind.groups:
            if group.recompute_seconds is not None:
                seconds[group.name] = seconds.get(group.name, 0.0) + group.again_seconds(problem.host)
    names = sorted(seconds)
    sets = itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(1, len(names) + 1))
    cheap = sorted(itertools.islice(sets, _SETS), key=lambda chosen: (sum(map(seconds.__getitem__, chosen)), chosen))
    rows = _saved(problem)
    for chosen in cheap:
        if all(sum(saved.get(name, 0) for name in chosen) >= over for over, saved in rows):
            plan = recomputed(problem, chosen)
            if fits(problem, plan):
                return chosen, plan
    return None


def whole_layers(problem: Problem) -> tuple[int, Plan] | None:
    """The fewest layers of each part that have to be recomputed, operator by operator, until everything fits."""
    names = {group.name for kind in problem.classes for group in kind.groups}
    counts = range(1, _most_layers(problem) + 1)

    place = bisect.bisect_left(counts, True, key=lambda count: fits(problem, recomputed(problem, names, count)))
    return (counts[place], recomputed(problem, names, counts[place])) if place < len(counts) else None


def recomputed(problem: Problem, names: Collection[str], layers: int | None = None) -> Plan:
    """These groups recomputed in the first layers of each part, None: in all; where that can be done."""
    stages = []
    for stage, kept in zip(problem.stages, _kept(problem).stages, strict=True):
        parts = []
        for part, texts in zip(stage.parts, kept.parts, strict=True):
            kinds = [problem.class_of[name] for name in part.layers]
            again = [_recomputed(kind, text, names) for kind, text in zip(kinds[:layers], texts, strict=False)]
            parts.append((*again, *texts[len(again) :]))
        stages.append(StagePlan(parts=tuple(parts)))
    return Plan(stages=tuple(stages))


def _recomputed(kind: LayerClass, text: str, names: Collection[str]) -> str:
    pairs = zip(kind.groups, text, strict=True)
    may = (group.name in names and group.recompute_seconds is not None and old != NOTHING for group, old in pairs)
    return "".join(RECOMPUTE if one else old for one, old in zip(may, text, strict=True))


def _saved(problem: Problem) -> list[tuple[int, dict[str, int]]]:
    """For each stage, and each way it can hold the most passes: bytes beyond the limit with everything kept, without
    all that is there for a short time; and what recomputing each group in all layers frees of these."""
    found = []
    for number, stage in enumerate(problem.stages):
        for counts, waits in problem.held[number]:
            held, saved = stage.fixed_bytes, dict[str, int]()
            held += sum(n * problem.waiting(number, part) for part, n in enumerate(waits))
            for n, part in zip(counts, stage.parts, strict=True):
                held += n * (part.before.bytes + part.after.bytes)
                for layer, kind in enumerate(problem.class_of[name] for name in part.layers):
                    for group in kind.groups:
                        if layer or not group.from_previous:
                            held += n * group.bytes
                            less = n * (group.bytes - group.recompute_keeps)
                            saved[group.name] = saved.get(group.name, 0) + less * (group.recompute_seconds is not None)
            found.append((held - problem.device_limit, saved))
    return found


def _most_layers(problem: Problem) -> int:
    return max(len(part.layers) for stage in problem.stages for part in stage.parts)


def _kept(problem: Problem) -> Plan:
    letters = lay_out(problem, all_kept(problem), "first", False)
    return Plan(stages=tuple(StagePlan(parts=tuple(map(tuple, one))) for one in letters))


def _of_part(part: Part, layers: int | None) -> Part:
    names = (name + _AGAIN for name in part.layers[:layers])
    return dataclasses.replace(part, layers=(*names, *(() if layers is None else part.layers[layers:])))


@lru_cache(maxsize=256)
def _checkpointed(kind: LayerClass, ends: tuple[str, ...], splits: bool) -> LayerClass:
    """The layer with two groups: its input, which stays, and all it makes, which is made again when its backward begins
    and leaves as its backward goes on. `ends`: the last operators of all layers that there are, one of which made the
    input. `splits`: what gradients of weights are made from stays beyond that.
    """
    first, last = kind.operators[0].name, kind.operators[-1].name
    inputs = Group(
        name="input", bytes=kind.input_bytes, operators=ends, used_by=(first,), swappable=False, from_previous=True
    )
    own = [group for group in kind.groups if not group.from_previous]
    whole = sum(group.bytes for group in own) + kind.input_bytes  # the second run's output, too
    left, most = whole, 0
    for one in kind.operators:  # while it runs again, what those after it make is not there yet
        left -= sum(group.bytes for group in own if group.operators[-1:] == (one.name,))
        most = max(most, one.forward_temporary_bytes - left)
    leaves: dict[str, int] = {}
    for group in own:
        for name, size in leaving(group, kind, splits):
            leaves[name] = leaves.get(name, 0) + size
    made = Group(
        name="made",
        bytes=whole,
        weight_bytes=sum(group.weight_bytes for group in own) * splits,
        operators=(last,),
        used_by=(first, last),
        recompute_seconds=kind.forward_seconds,
        recompute_temporary_bytes=most,
        leaves=tuple((name, size) for name, size in leaves.items() if name != first),
    )
    return dataclasses.replace(kind, name=kind.name + _AGAIN, groups=(inputs, made))

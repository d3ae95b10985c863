"""The ways to live within a memory limit that are compared with each other, and what the planner predicts of each."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mindspeed_mem.activation.observe.rank_profile import HostCost
from mindspeed_mem.adaptive import InfeasibleError, Plan, Problem, Search, Simulated, StagePlan, simulate
from mindspeed_mem.adaptive.problem.definition import LayerClass
from mindspeed_mem.adaptive.search.baselines import full_recompute, keep_all
from mindspeed_mem.adaptive.search.decisions import KEEP, NOTHING, RECOMPUTE
from mindspeed_mem.adaptive.search.plan_file import memory_config, sections

KEEP_ALL, FULL = "keep all, no cap", "Megatron full recompute"
RECOMPUTE_ONLY, ADAPTIVE = "recompute only, planned", "adaptive plan"
MODULES = (("core_attn",), ("layernorm",), ("mlp",), ("core_attn", "layernorm"), ("core_attn", "layernorm", "mlp"))
_PATHS = {
    "core_attn": ("self_attention.core_attention",),
    "layernorm": ("input_layernorm", "pre_mlp_layernorm"),
    "mlp": ("mlp",),
}
_BEGINS = {"input_layernorm": "self_attention.linear_proj", "pre_mlp_layernorm": "mlp.linear_fc2"}
"""Where the backward begins before which Megatron runs a norm again."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """One way; with none of the first three it keeps everything."""

    plan: dict[str, Any] | None = None
    """A memory configuration of the pack."""
    full: int = 0
    """Megatron's full recompute of so many layers (method block)."""
    modules: tuple[str, ...] = ()
    """Megatron's selective recompute of these modules."""
    corrected: bool = False
    """Whether what is predicted was corrected by what an earlier plan took."""
    predicted: Simulated

    @property
    def peer(self) -> bool:
        return self.plan is None


def by_hand(problem: Problem) -> dict[str, Policy]:
    """Keeping everything, and what Megatron has: all counts of layers, and modules in all layers."""
    layers = problem.num_layers
    found = {KEEP_ALL: Policy(predicted=keep_all(problem))}
    found[FULL] = Policy(full=layers, predicted=full_recompute(problem))
    for count in range(layers - 1, 0, -1):
        name = f"Megatron block recompute, {count} of {layers}"
        found[name] = Policy(full=count, predicted=full_recompute(problem, count))
    for modules in MODULES:
        name = "Megatron selective: " + " ".join(modules)
        found[name] = Policy(modules=modules, predicted=selective(problem, modules))
    return found


def planned(problem: Problem, limit: int, swap: bool = True) -> Policy | InfeasibleError:
    """The planner's best within ``limit`` bytes, or why there is none."""
    try:
        found = Search(problem, swap=swap).best(limit)
    except InfeasibleError as error:
        return error
    return Policy(plan=sections(memory_config(problem, found.plan)), predicted=found.simulated)


def selective(problem: Problem, modules: tuple[str, ...]) -> Simulated:
    """Megatron's recompute of these modules in all layers."""
    paths = [path for module in modules for path in _PATHS[module]]
    classes = tuple(_as_megatron(kind, modules) for kind in problem.classes)
    problem = dataclasses.replace(problem, classes=classes, host=HostCost())  # its own is not known
    stages = []
    for stage in problem.stages:
        parts = []
        for part in stage.parts:
            kinds = [problem.class_of[name] for name in part.layers]
            parts.append(tuple(_letters(kind, paths, first=not place) for place, kind in enumerate(kinds)))
        stages.append(StagePlan(parts=tuple(parts)))
    return simulate(problem, Plan(stages=tuple(stages)))


def _as_megatron(kind: LayerClass, modules: tuple[str, ...]) -> LayerClass:
    """What Megatron's own recompute of modules does otherwise than ours.

    Core attention's output stays, which the linear after it saves. Norms run again when the backward of the whole
    attention or MLP begins. An MLP runs again to its end, its last matrix product included.
    """
    inside = [one for one in kind.operators if f"{one.name}.".startswith("mlp.")]
    groups = []
    for group in kind.groups:
        path = group.operators[-1]
        more: dict[str, Any] = {}
        if path == "self_attention.core_attention" and "core_attn" in modules:
            more["recompute_keeps"] = max(group.recompute_keeps, min(group.bytes, kind.input_bytes))
        elif path in _BEGINS and "layernorm" in modules and _BEGINS[path] in kind.index:
            more["used_by"] = (*group.used_by, _BEGINS[path])
            more["leaves"] = (*group.leaves, (_BEGINS[path], 0))
        elif path == "mlp.activation_func" and "mlp" in modules:
            again = {name for one in kind.groups for name in one.operators if name.startswith("mlp.")}
            rest = sum(one.forward_seconds for one in inside if one.name not in again)
            more["recompute_seconds"] = (group.recompute_seconds or 0.0) + rest
        groups.append(dataclasses.replace(group, **more))
    operators = []
    for one in kind.operators:
        more = {}
        if one.name == "mlp.linear_fc2" and "mlp" in modules:  # what it made is there again
            more["backward_temporary_bytes"] = one.backward_temporary_bytes + kind.input_bytes
        operators.append(dataclasses.replace(one, **more))
    return dataclasses.replace(kind, groups=tuple(groups), operators=tuple(operators))


def _letters(kind: LayerClass, paths: list[str], first: bool) -> str:
    text = ""
    for group in kind.groups:
        inside = all(any(f"{name}.".startswith(f"{path}.") for path in paths) for name in group.operators)
        if group.from_previous:
            text += NOTHING if first else KEEP
        else:
            text += RECOMPUTE if inside and group.recompute_seconds is not None else KEEP
    return text

"""A plan as a `--memory-config` file: what a user would have written by hand, to be read, kept, edited and replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import yaml

from mindspeed_mem.adaptive.problem.definition import Problem
from mindspeed_mem.adaptive.search.decisions import RECOMPUTE, SWAP, Plan
from mindspeed_mem.plan import MemoryConfig, OpSwap, RecomputeConfig, RecomputeRule, SwapConfig
from mindspeed_mem.plan.config import LayerSwap, SwapEntry
from mindspeed_mem.plan.layers import named, numbers_in

_Entry = TypeVar("_Entry", OpSwap, LayerSwap, RecomputeRule)


def memory_config(problem: Problem, plan: Plan) -> MemoryConfig:
    """What `--memory-config` would have to say for this plan, in Megatron's operator names and global layer indices.

    Args:
        problem: what the plan was found for; its groups say which operators a letter is about.
        plan: a letter for each group of each layer, for all stages.
    """
    swapped: dict[tuple[str, int], list[int]] = {}
    whole: dict[int, list[int]] = {}
    recomputed: dict[str, list[int]] = {}
    for stage, of_stage in zip(problem.stages, plan.stages, strict=True):
        for part, letters in zip(stage.parts, of_stage.parts, strict=True):
            for place, (text, name) in enumerate(zip(letters, part.layers, strict=True)):
                layer = part.first_layer + place
                for group, letter in zip(problem.class_of[name].groups, text, strict=True):
                    if letter == SWAP:
                        maker = layer - 1 if group.from_previous else layer
                        if not group.swappable:
                            whole.setdefault(of_stage.distance, []).append(maker)
                        for operator in group.operators if group.swappable else ():
                            swapped.setdefault((operator, of_stage.distance), []).append(maker)
                    elif letter == RECOMPUTE:
                        for operator in group.recompute_operators or group.operators:
                            recomputed.setdefault(operator, []).append(layer)
    everything = {layer for layers in whole.values() for layer in layers}
    swapped = {key: left for key, layers in swapped.items() if (left := sorted(set(layers) - everything))}
    inputs_move = plan.inputs_move and bool(recomputed)
    swaps = tuple(
        OpSwap(
            op_name=tuple(names),
            layers=layers,
            backward_prefetch=distance,
            activations="produced",
            entry=f"swap_config.op_swap[{number}]",
        )
        for number, ((layers, distance), names) in enumerate(_by_layers(swapped).items())
    )
    layer_swaps = tuple(
        LayerSwap(
            layers=tuple(sorted(set(layers))),
            backward_prefetch=distance,
            activations="produced",
            entry=f"swap_config.layer_swap[{number}]",
        )
        for number, (distance, layers) in enumerate(whole.items())
    )
    return MemoryConfig(
        swap=SwapConfig(
            swap=True,
            pp_aware=False,
            swap_recompute_inputs=inputs_move,
            default_prefetch=max(stage.distance for stage in plan.stages) if inputs_move else 1,
            layer_swap=layer_swaps or None,
            op_swap=swaps,
            window_bytes=plan.window_bytes,
            idle_prefetch=plan.idle_prefetch,
            output_gradients=plan.output_gradients,
            smallest_bytes=0,  # all of a group leaves: its bytes are counted on
        ),
        recompute=RecomputeConfig(
            rules=tuple(
                RecomputeRule(
                    kind="operator",
                    pattern=_pattern(name),
                    layers=tuple(sorted(set(layers))),
                    entry=f"recompute_config.select_recompute.{_pattern(name)}",
                )
                for name, layers in sorted(recomputed.items())
            )
        ),
    )


def by_name(config: MemoryConfig, stacks: Mapping[str, range | None]) -> MemoryConfig:
    """The same in a model of several stacks, with their names and the numbers in them."""
    if len(stacks) < 2:
        return config
    swaps = tuple(_by_name(one, stacks) for one in config.swap.op_swap or ())
    layers = tuple(_by_name(one, stacks) for one in config.swap.layer_swap or ()) or None
    rules = tuple(_by_name(one, stacks) for one in config.recompute.rules)
    swap = replace(config.swap, layer_swap=layers, op_swap=swaps)
    return replace(config, swap=swap, recompute=replace(config.recompute, rules=rules))


def _by_name(entry: _Entry, stacks: Mapping[str, range | None]) -> _Entry:
    return replace(entry, layers=tuple(named(numbers_in(_listed(entry)), stacks)))


def _moved(entry: SwapEntry) -> dict[str, object]:
    return {"backward_prefetch": entry.backward_prefetch, "layers": _listed(entry)}


def _listed(entry: SwapEntry | RecomputeRule) -> list[int | str]:
    """The layers of an entry; a plan names them one by one."""
    return list(entry.layers) if isinstance(entry.layers, tuple) else []


def sections(config: MemoryConfig) -> dict[str, dict[str, object]]:
    """What a `--memory-config` file contains that says the same; `config` is from `memory_config` or `by_name`."""
    swap: dict[str, object] = {"swap": config.swap.swap, "pp_aware": config.swap.pp_aware}
    if config.swap.swap_recompute_inputs:
        swap |= {"swap_recompute_inputs": True, "default_prefetch": config.swap.default_prefetch}
    for name in ("window_bytes", "smallest_bytes"):
        if (value := getattr(config.swap, name)) is not None:
            swap[name] = value
    swap |= {name: True for name in ("idle_prefetch", "output_gradients") if getattr(config.swap, name)}
    swap["op_swap"] = [
        {"op_name": list(one.op_name) if len(one.op_name) > 1 else one.op_name[0], **_moved(one)}
        for one in config.swap.op_swap or ()
    ]
    if config.swap.layer_swap:
        swap["layer_swap"] = [_moved(one) for one in config.swap.layer_swap]
    if not config.recompute.rules:
        return {"swap_config": swap}
    chosen = {rule.pattern: _listed(rule) for rule in config.recompute.rules}
    return {"swap_config": swap, "recompute_config": {"select_recompute": chosen}}


def as_yaml(config: MemoryConfig, remarks: Sequence[str] = ()) -> str:
    """The text of that file, with these lines on top; lists of layers on one line."""
    head = "".join(f"# {line}\n" for line in remarks)
    return head + yaml.dump(sections(config), Dumper=_Dumper, sort_keys=False, width=120)


def _by_layers(swapped: dict[tuple[str, int], list[int]]) -> dict[tuple[tuple[int, ...], int], list[str]]:
    """Operators swapped in the same layers share an entry."""
    found: dict[tuple[tuple[int, ...], int], list[str]] = {}
    for (operator, distance), layers in swapped.items():
        found.setdefault((tuple(sorted(set(layers))), distance), []).append(_pattern(operator))
    return found


def _pattern(operator: str) -> str:
    return operator.replace(".", r"\.")


class _Dumper(yaml.SafeDumper):
    pass


def _list(dumper: yaml.SafeDumper, value: list) -> yaml.Node:
    plain = all(isinstance(item, int | str) for item in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=plain)


_Dumper.add_representer(list, _list)

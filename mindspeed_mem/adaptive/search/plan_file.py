"""A plan as a `--memory-config` file: what a user would have written by hand, to be read, kept, edited and replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from mindspeed_mem.adaptive.problem.definition import Problem
from mindspeed_mem.adaptive.search.decisions import RECOMPUTE, SWAP, Plan
from mindspeed_mem.plan.layers import named


def memory_config(problem: Problem, plan: Plan) -> dict[str, Any]:
    """The sections `swap_config` and `recompute_config`, in Megatron's operator names and global layer indices."""
    swapped: dict[tuple[str, int], list[int]] = {}
    recomputed: dict[str, list[int]] = {}
    for stage, of_stage in zip(problem.stages, plan.stages, strict=True):
        for part, letters in zip(stage.parts, of_stage.parts, strict=True):
            for place, (text, name) in enumerate(zip(letters, part.layers, strict=True)):
                layer = part.first_layer + place
                for group, letter in zip(problem.class_of[name].groups, text, strict=True):
                    if letter == SWAP:
                        for operator in group.operators:
                            at = swapped.setdefault((operator, of_stage.distance), [])
                            at.append(layer - 1 if group.from_previous else layer)
                    elif letter == RECOMPUTE:
                        for operator in group.recompute_operators or group.operators:
                            recomputed.setdefault(operator, []).append(layer)
    swap: dict[str, Any] = {"swap": True, "pp_aware": False}
    if plan.inputs_move and recomputed:
        swap |= {"swap_recompute_inputs": True, "default_prefetch": max(stage.distance for stage in plan.stages)}
    swap["op_swap"] = [
        {
            "op_name": names if len(names) > 1 else names[0],
            "backward_prefetch": distance,
            "layers": list(layers),
        }
        for (layers, distance), names in _by_layers(swapped).items()
    ]
    config: dict[str, Any] = {"swap_config": swap}
    if recomputed:
        chosen = {_pattern(name): sorted(set(layers)) for name, layers in sorted(recomputed.items())}
        config["recompute_config"] = {"select_recompute": chosen}
    return config


def by_name(config: dict[str, Any], stacks: Mapping[str, range | None]) -> dict[str, Any]:
    """The same in a model of several stacks, with their names and the numbers in them."""
    if len(stacks) < 2:
        return config
    swap = config["swap_config"]
    entries = [{**entry, "layers": named(entry["layers"], stacks)} for entry in swap["op_swap"]]
    found = {**config, "swap_config": {**swap, "op_swap": entries}}
    if "recompute_config" in config:
        chosen = config["recompute_config"]["select_recompute"]
        chosen = {pattern: named(layers, stacks) for pattern, layers in chosen.items()}
        found["recompute_config"] = {"select_recompute": chosen}
    return found


def as_yaml(config: dict[str, Any], remarks: Sequence[str] = ()) -> str:
    """The text of the file, with remarks on top; lists of layers on one line."""
    head = "".join(f"# {line}\n" for line in remarks)
    return head + yaml.dump(config, Dumper=_Dumper, sort_keys=False, width=120)


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

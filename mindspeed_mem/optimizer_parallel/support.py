"""Which optimizers can be parallelized, and how far: see `optimizer_kinds`.

One that looks at all parameters (LBFGS) cannot be parallelized here. An unknown one needs the caller's word for it.
"""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mindspeed_mem.optimizer_kinds import is_elementwise, is_per_parameter
from mindspeed_mem.optimizer_parallel.assignment import MODES


class OptimizerParallelError(ValueError):
    """An optimizer cannot be parallelized as asked; `problems` holds one entry for each reason."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problems))


def problems(optimizer: torch.optim.Optimizer, mode: str, assume_independent: bool = False) -> list[str]:
    """Why `optimizer` cannot be parallelized by `mode`; empty if it can.

    ``assume_independent``: the caller's word that a class unknown here updates each parameter (with ``sharding``
    each element) without looking at others.
    """
    if mode not in MODES:
        return [f"mode: got {mode!r}; allowed: {', '.join(MODES)}"]
    found = []
    name, step = type(optimizer).__name__, inspect.unwrap(type(optimizer).step)
    per_parameter = is_per_parameter(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        found.append(f"{name} looks at all parameters together: no rank can update a part of them. Take another one")
    elif per_parameter and mode == "sharding":
        found.append(f"{name} needs whole parameters: sharding would change what it computes. Use grouping")
    elif not (is_elementwise(optimizer) or per_parameter or assume_independent):
        unit = "element" if mode == "sharding" else "parameter"
        found.append(
            f"{name} ({step.__module__}) is not known here: if it updates each {unit} without looking at others, say "
            "assume_independent=True"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        found.append("differentiable=True: a step that hands out parameters has no gradient. Leave it out")
    return found


def problems_of_split(optimizer: torch.optim.Optimizer, process_group: dist.ProcessGroup | None) -> list[str]:
    """Why parameters that are DTensors cannot be shared by `process_group`; empty if they can.

    Its ranks have to hold the same parts, and an optimizer that looks at whole parameters sees none of them.
    """
    sharing = set(dist.get_process_group_ranks(process_group or dist.group.WORLD))
    parameters = [one for group in optimizer.param_groups for one in group["params"] if isinstance(one, DTensor)]
    split = [one for one in parameters if not all(placement.is_replicate() for placement in one.placements)]
    found = []
    for one in split:
        for number, placement in enumerate(one.placements):
            across = sharing.intersection(dist.get_process_group_ranks(one.device_mesh.get_group(number)))
            if not placement.is_replicate() and len(across) > 1:
                axis = (one.device_mesh.mesh_dim_names or {number: str(number)})[number]
                found.append(
                    f"a parameter of shape {tuple(one.shape)} is split over the mesh axis {axis!r}, whose ranks are in "
                    "the process group: give the group of an axis along which all are whole, mesh.get_group('dp')"
                )
    if split and not is_elementwise(optimizer):
        found.append(f"{type(optimizer).__name__} needs whole parameters, and {len(split)} are split (DTensors)")
    return list(dict.fromkeys(found))

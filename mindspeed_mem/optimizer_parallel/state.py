"""Optimizer states: cut from a whole state dict, and put together to one.

A state dict here is exactly that of the optimizer without parallelism. A state tensor of a slice's shape is a slice of
one with the parameter's shape; all else in a slice's state (a count of steps, a running product) is the same on all
ranks. The state of a parameter that one rank has whole goes as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from mindspeed_mem.optimizer_parallel.exchange import Exchange
from mindspeed_mem.optimizer_parallel.part import OptimizerPart, local
from mindspeed_mem.ranks import gather


class _Tensor(NamedTuple):
    """Stands for a tensor that is collected."""

    shape: torch.Size
    dtype: torch.dtype


def cut(state: Mapping[Any, Any], part: OptimizerPart) -> dict[Any, Any]:
    """This rank's part of a parameter's state; shares no memory with `state`."""
    found = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            value = local(value.detach())
            if value.shape != part.shape:
                found[key] = value.clone()
            elif part.whole and part.piece is not None:
                # With the strides of the parameter: fused optimizers go by memory order alone.
                found[key] = torch.empty_like(part.piece, dtype=value.dtype, device=value.device).copy_(value)
            else:
                found[key] = part.cut(value).clone()
        else:
            found[key] = copy.deepcopy(value)
    return found


def whole(
    states: Mapping[torch.Tensor, Any], parts: Sequence[OptimizerPart], exchange: Exchange, keep: bool
) -> dict[int, dict]:
    """The states of all parameters by their index, with tensors on the host, one at a time. Collective.

    ``keep``: whether this rank gets them; if not, its result is empty.
    """
    described = {}
    for index, part in enumerate(parts):
        state = states.get(part.piece) if part.piece is not None else None
        if state:
            described[index] = {key: _describe(value, part) for key, value in state.items()}
    told = gather(described, exchange.group)
    found: dict[int, dict] = {}
    for index, part in enumerate(parts):
        owner = next((rank for rank, own in enumerate(part.ranges) if own), None)
        description = None if owner is None else told[owner].get(index)
        if description is None:
            continue
        entries = {}
        for key, value in description.items():
            if isinstance(value, _Tensor):
                mine = None if part.piece is None else states[part.piece][key]
                value = exchange.collect(part, mine, value.shape, value.dtype)
                value = _as_parameter(value.to("cpu", copy=True), part) if keep else None
            entries[key] = value
        if keep:
            found[index] = entries
    return found


def _as_parameter(value: torch.Tensor, part: OptimizerPart) -> torch.Tensor:
    """A DTensor where the parameter is one, which checkpoints for other meshes go by."""
    parameter = part.parameter
    if not isinstance(parameter, DTensor) or value.shape != part.shape:
        return value
    return DTensor.from_local(
        value, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def _describe(value: Any, part: OptimizerPart) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    of_piece = part.piece is not None and value.shape == part.piece.shape
    collected = value.dim() > 0 if part.whole else of_piece
    return _Tensor(value.shape, value.dtype) if collected else value.detach().to("cpu", copy=True)

"""Storages the engine must leave alone: parameters and buffers, and what somebody else empties and refills."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from mindspeed_mem.activation.arguments import attributes_of
from mindspeed_mem.activation.records import KEEP


def mark_static(models: Iterable[nn.Module]) -> None:
    """What these models hold before they run is never moved, whatever view of it is saved: parameters, buffers, and
    tables that modules, and objects that these hold, have as attributes."""
    for model in models:
        # Megatron's data parallel wrapper has a list called buffers
        for tensor in chain(nn.Module.parameters(model), nn.Module.buffers(model), _tables(model)):
            if tensor.layout is torch.strided:
                tensor.untyped_storage()._mem_static = True


def _tables(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        for value in list(vars(module).values()):
            held = None if isinstance(value, (nn.Module, type)) else attributes_of(value)
            for one in (value, *(held or {}).values()):
                if type(one) is torch.Tensor and one.grad_fn is None:
                    yield one


def mark_managed(outputs: Any) -> None:
    """These tensors' storages are emptied, refilled or written over by their owner: they are never moved."""
    for tensor in outputs if isinstance(outputs, (list, tuple)) else (outputs,):
        if isinstance(tensor, torch.Tensor):
            tensor.untyped_storage()._mem = KEEP
            tensor.untyped_storage()._mem_managed = True

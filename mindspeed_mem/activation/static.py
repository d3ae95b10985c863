"""Storages the engine must leave alone: parameters and buffers, and what somebody else empties and refills."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from mindspeed_mem.activation.records import KEEP


def mark_static(models: Iterable[nn.Module]) -> None:
    """Parameters and buffers of these models are never moved, whatever view of them is saved."""
    for model in models:
        # Megatron's data parallel wrapper has a list called buffers
        for tensor in (*nn.Module.parameters(model), *nn.Module.buffers(model)):
            if tensor.layout is torch.strided:
                tensor.untyped_storage()._mem_static = True


def mark_managed(outputs: Any) -> None:
    """These tensors' storages are emptied, refilled or written over by their owner: they are never moved."""
    for tensor in outputs if isinstance(outputs, (list, tuple)) else (outputs,):
        if isinstance(tensor, torch.Tensor):
            tensor.untyped_storage()._mem = KEEP
            tensor.untyped_storage()._mem_managed = True

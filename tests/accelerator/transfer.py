"""Lets "cuda" and torch.cuda mean the accelerator that stands in as an NPU, as torch_npu.contrib.transfer_to_npu does
for the NPU: Megatron asks for CUDA by name, and MindSpeed runs it on NPUs so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

FACTORIES = """arange as_tensor empty empty_like empty_strided eye full full_like linspace ones ones_like rand rand_like
randint randn randn_like randperm scalar_tensor tensor zeros zeros_like""".split()
OF_TENSORS = "to new_empty new_full new_ones new_tensor new_zeros".split()


def install() -> None:
    """From now on, in this process."""
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
        for name, member in vars(torch.npu).items():
            if not name.startswith("__") and (module is torch.cuda or hasattr(module, name)):
                setattr(module, name, member)
    for owner, names in ((torch, FACTORIES), (torch.Tensor, OF_TENSORS), (torch.nn.Module, ["to"])):
        for name in names:
            setattr(owner, name, _renaming(getattr(owner, name)))
    torch.Tensor.cuda, torch.nn.Module.cuda = torch.Tensor.npu, torch.nn.Module.npu


def _renaming(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_renamed, args), **{name: _renamed(value) for name, value in kwargs.items()})

    return call


def _renamed(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("npu", value.index)
    return value.replace("cuda", "npu", 1) if isinstance(value, str) and value.startswith("cuda") else value

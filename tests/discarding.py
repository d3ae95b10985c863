"""Checkpoints that discard their output, as MindSpeed has two of: a stand-in for each, and a model that uses one.

MINDSPEED names a checkout: then the real ones are taken, with a stand-in for what they need of torch_npu.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

MODULES = ("mindspeed.core.memory.recompute.recompute_common", "mindspeed.core.tensor_parallel.random")


class CheckpointFunctionWithoutOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run_function, checkpoint, *args):
        with torch.no_grad():
            outputs = run_function(*args)
        ctx.save_for_backward(*(one if one is None else one.detach().requires_grad_(one.requires_grad) for one in args))
        checkpoint.ctx = ctx
        return outputs

    @staticmethod
    def backward(ctx, *gradients):
        torch.autograd.backward(ctx.outputs, gradients)
        ctx.outputs = None
        return None, None, *(one if one is None else one.grad for one in ctx.saved_tensors)


class CheckpointWithoutOutput:
    def __init__(self, get_cuda_rng_tracker=None):
        self.outputs = None

    def checkpoint(self, run_function, distribute_saved_activations, *args):
        self.run_function = run_function
        output = type(self).function.apply(run_function, self, *args)
        self.outputs = (output,)
        return output

    def discard_output(self):
        for output in self.outputs:
            output.untyped_storage().resize_(0)

    def recompute(self, _):
        with torch.enable_grad():
            again = self.run_function(*self.ctx.saved_tensors)
        storage = self.outputs[0].untyped_storage()
        storage.resize_(again.untyped_storage().nbytes())
        storage.copy_(again.untyped_storage())
        self.ctx.outputs = (again,)
        self.outputs = self.ctx = self.run_function = None


@contextlib.contextmanager
def mindspeed(name: str) -> Iterator[ModuleType]:
    """The module of this name; afterwards nothing of MindSpeed is left in this process."""
    before = set(sys.modules)
    path = os.environ.get("MINDSPEED")
    if path is None:
        module = sys.modules[name] = ModuleType(name)
        module.CheckpointFunctionWithoutOutput = type("CheckpointFunctionWithoutOutput", _BASES[0], {})
        members = {"function": module.CheckpointFunctionWithoutOutput}
        module.CheckpointWithoutOutput = type("CheckpointWithoutOutput", _BASES[1], members)
    else:
        npu = sys.modules["torch_npu"] = ModuleType("torch_npu")
        npu.npu = sys.modules["torch_npu.npu"] = ModuleType("torch_npu.npu")
        npu.npu._lazy_call, npu.npu.device = lambda function: None, None
        sys.path.insert(0, path)
        module = importlib.import_module(name)
        module._set_cuda_rng_state = lambda *args, **kwargs: None
    try:
        yield module
    finally:
        if path is not None:
            sys.path.remove(path)
        for key in set(sys.modules) - before:
            if key.partition(".")[0] in ("mindspeed", "torch_npu"):
                del sys.modules[key]


_BASES = ((CheckpointFunctionWithoutOutput,), (CheckpointWithoutOutput,))


@contextlib.contextmanager
def recomputed_activation(module: ModuleType | None) -> Iterator[None]:
    """Megatron's gated MLPs run their activation through a checkpoint of ``module``; None: just run it."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.mlp import MLP

    def activation(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        gate, rest = (x if bias is None else x + bias).chunk(2, -1)
        return torch.nn.functional.silu(gate) * rest

    def forward(self: Any, hidden: torch.Tensor, **kwargs: Any) -> Any:
        x, bias = self.linear_fc1(hidden)
        if module is None:
            return self.linear_fc2(activation(x, bias))
        takes_tracker = module.__name__ == MODULES[0]
        manager = module.CheckpointWithoutOutput(*((get_cuda_rng_tracker,) if takes_tracker else ()))
        output, bias = self.linear_fc2(manager.checkpoint(activation, False, x, bias))
        manager.discard_output()
        output.register_hook(manager.recompute)
        return output, bias

    native, MLP.forward = MLP.forward, forward
    try:
        yield
    finally:
        MLP.forward = native

"""Layers that compute with their parts of split parameters, as `tensor_spec` says.

Shoeybi et al., Megatron-LM (2019). A weight split along its outputs gives each rank some columns of the layer's output;
ranks bring them together, unless the next layer takes them as they are. A weight split along its inputs takes some
columns of the input, and ranks sum the outputs. All else is the same on all ranks of a group, which take the same
batch, and draw the same random numbers: dropout needs the same seed on all of them.
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional

from mindspeed_mem.device import is_host_device
from mindspeed_mem.gemini.groups import ProcessGroup
from mindspeed_mem.gemini.launch import get_current_device
from mindspeed_mem.gemini.lazy import take_parts
from mindspeed_mem.gemini.options import OptionError, refuse
from mindspeed_mem.gemini.tensor_spec import ColoParameter, ShardSpec
from mindspeed_mem.ranks import combined

logger = logging.getLogger(__name__)


def of_others(module: torch.nn.Module) -> list[str]:
    """Why the parameters of `module` cannot go into chunks; empty if they can."""
    found = [name for name, one in module.named_parameters() if isinstance(one, DTensor)]
    if not found:
        return []
    which = f"{found[0]} and {len(found) - 1} other parameters are DTensors (semi_auto, FSDP2)"
    return [f"{which}: chunks take plain ones. Split the model one way or the other"]


def process_group_of(module: torch.nn.Module) -> ProcessGroup | None:
    """That which the parameters of `module` name. Raises OptionError where they name groups of different sizes."""
    found = {
        param.process_group.tp_world_size(): param.process_group
        for param in module.parameters()
        if isinstance(param, ColoParameter) and param.process_group is not None
    }
    if len(found) > 1:
        raise OptionError(f"parameters have process groups of different tp_degree: {', '.join(map(str, found))}")
    return next(iter(found.values()), None)


def split_layers(module: torch.nn.Module, group: Any = None) -> None:
    """Leave of each parameter what its spec says, and let the layers that have them compute with it.

    group: the ProcessGroup of parameters that name none.
    Parts carry the attribute `tensor_model_parallel`, for the norm of gradients. What is split already stays. Raises
    OptionError with all that is wrong, before anything is changed.
    """
    for param in module.parameters():
        if isinstance(param, ColoParameter) and param.process_group is None and isinstance(group, ProcessGroup):
            param.process_group = group
    wrong, cuts, layers = [], {}, []
    for name, owner in module.named_modules():
        split = {own: param for own, param in owner.named_parameters(recurse=False) if _is_to_be_split(param)}
        for own, param in split.items():
            [parts], ranks = param.dist_spec.num_partitions, param.get_tp_world_size()
            if parts != ranks:
                wrong.append(f"{name}.{own}: {param.dist_spec}, but its process group has tp_degree {ranks}")
            cuts[param] = functools.partial(_own, param.process_group, param.dist_spec.dims[0])
        if split and not wrong:
            found = _layer(owner, split)
            if isinstance(found, str):
                wrong.append(f"{name} ({type(owner).__name__}) cannot be split: {found}")
            else:
                layers.append((owner, found))
    refuse(wrong)
    take_parts(module, cuts)
    for owner, forward in layers:
        owner.forward = forward
    if layers:
        _check_randomness(module, next(iter(cuts)).process_group.tp_process_group())


def _check_randomness(module: torch.nn.Module, group: Any) -> None:
    """Warn if dropout would draw masks of its own on each rank of `group`. Collective."""
    device = get_current_device()
    states = [torch.get_rng_state()]
    if not is_host_device(device):
        states.append(torch.get_device_module(device.type).get_rng_state())
    number = float(zlib.crc32(b"".join(state.numpy().tobytes() for state in states)) % 2**24)
    most, least = combined([number, -number], dist.ReduceOp.MAX, group, device)
    if most != -least and any(isinstance(one, torch.nn.Dropout) and one.p for one in module.modules()):
        logger.warning(
            "the tensor-parallel ranks have different random states: their copies will differ by their dropout; call "
            "torch.manual_seed with the same number on all of them"
        )


def _is_to_be_split(param: torch.nn.Parameter) -> bool:
    """(A ShardSpec alone is about memory, which chunks are there for.)"""
    fits = isinstance(param, ColoParameter) and param.is_sharded() and param.has_compute_spec()
    return fits and not getattr(param, "tensor_model_parallel", False)


def _own(group: ProcessGroup, dim: int, whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(group.tp_world_size(), dim)[group.tp_local_rank()].clone(memory_format=torch.contiguous_format)


def _split(param: ColoParameter) -> tuple[ProcessGroup, int]:
    """Over which ranks `param`, which is split, is, and along which dimension."""
    assert isinstance(param.dist_spec, ShardSpec) and param.process_group is not None
    return param.process_group, param.dist_spec.dims[0]


def _layer(owner: Any, split: dict[str, ColoParameter]) -> Callable | str:
    """The forward of `owner` with parts, or why there is none."""
    transposed = type(owner).__name__ == "Conv1D" and owner.weight.dim() == 2  # Hugging Face's: weight [in, out]
    if type(owner) is torch.nn.Embedding:
        group, dim = _split(split["weight"])
        if dim not in (-1, 1) or owner.max_norm is not None:
            return "an embedding is split along its last dimension, and has no max_norm"
        return functools.partial(_embedding, owner, group)
    if type(owner) is not torch.nn.Linear and not transposed:
        return "this is known of torch.nn.Linear and Embedding, and of transformers' Conv1D"
    if "weight" not in split:
        return "its bias is split, and its weight is not"
    weight = split["weight"]
    group, dim = _split(weight)
    settings = {"group": group.tp_process_group(), "transposed": transposed, "bias_is_split": "bias" in split}
    if (dim % 2 == 0) == transposed:
        return functools.partial(_split_along_inputs, owner, weight.shape[0 if transposed else 1], **settings)
    return functools.partial(_split_along_outputs, owner, weight.compute_spec, **settings)


# ---- forwards


def _embedding(owner: torch.nn.Embedding, group: ProcessGroup, tokens: torch.Tensor) -> torch.Tensor:
    own = functional.embedding(
        tokens, owner.weight, owner.padding_idx, None, owner.norm_type, owner.scale_grad_by_freq, owner.sparse
    )
    return Gathered.apply(own, group.tp_process_group())


def _split_along_outputs(
    owner: Any, spec: Any, x: torch.Tensor, group: Any, transposed: bool, bias_is_split: bool
) -> torch.Tensor:
    weight = owner.weight.t() if transposed else owner.weight
    bias = owner.bias if owner.bias is None or bias_is_split else Scattered.apply(owner.bias, group)
    own = functional.linear(GradientSummed.apply(x, group), weight, bias)
    return Gathered.apply(own, group) if spec.output_replicate else own


def _split_along_inputs(
    owner: Any, inputs: int, x: torch.Tensor, group: Any, transposed: bool, bias_is_split: bool
) -> torch.Tensor:
    x = Scattered.apply(x, group) if x.shape[-1] == inputs else x
    y = Summed.apply(functional.linear(x, owner.weight.t() if transposed else owner.weight), group)
    if owner.bias is None:
        return y
    return y + (Gathered.apply(owner.bias, group) if bias_is_split else owner.bias)


# ---- where ranks meet


class GradientSummed(torch.autograd.Function):
    """Forward: `x` as it is. Backward: its gradient is the sum of those of all ranks of `group`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)  # autograd may use `grad` elsewhere
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Summed(torch.autograd.Function):
    """Forward: the sum of `x` over all ranks of `group`, in the memory of `x`. Backward: the gradient as it is."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Any) -> torch.Tensor:
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Gathered(torch.autograd.Function):
    """Forward: the parts of all ranks, side by side in the last dimension. Backward: this rank's part."""

    @staticmethod
    def forward(ctx, own: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _gathered(own, group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _part(grad, ctx.group), None


class Scattered(torch.autograd.Function):
    """Forward: this rank's part of the last dimension. Backward: the parts of all ranks, side by side."""

    @staticmethod
    def forward(ctx, whole: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _part(whole, group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gathered(grad, ctx.group), None


def _gathered(own: torch.Tensor, group: Any) -> torch.Tensor:
    own = own.contiguous()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return torch.cat(parts, dim=-1)


def _part(whole: torch.Tensor, group: Any) -> torch.Tensor:
    return whole.chunk(group.size(), -1)[group.rank()].contiguous()

"""The norm of all gradients of a model, from their shards."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_mem.gemini.built_chunk import BuiltChunk
from mindspeed_mem.gemini.groups import combine


def global_norm(
    chunks: Iterable[BuiltChunk], group: Any, device: torch.device, tensor_parallel_group: Any = None
) -> float:
    """The 2-norm over all parameters of all ranks, of gradients as they are: scaled, if the loss was. Collective.

    Not finite if a gradient somewhere is not. Squares are summed over the data-parallel `group`, and then over the
    tensor-parallel ranks. A parameter that each of the latter has a part of carries the attribute
    `tensor_model_parallel` = True (Megatron's layers set it); any other is the same on all of them and counts once.
    """
    ranks = 1 if tensor_parallel_group is None else tensor_parallel_group.size()
    first = ranks == 1 or tensor_parallel_group.rank() == 0
    norms = []
    for one in chunks:
        shard = one.chunk.grad_shard
        if shard is None:
            continue
        if first:
            norms.append(torch.linalg.vector_norm(shard))
        else:
            parts = (one.gradient(p) for p in one.chunk.params if getattr(p, "tensor_model_parallel", False))
            norms += [torch.linalg.vector_norm(part) for part in parts]
    # One wait for the device, not one for each chunk.
    on_device = [norm.to(device) for norm in norms]
    squares = [norm**2 for norm in torch.stack(on_device).tolist()] if on_device else []
    (total,) = combine([math.fsum(squares) if _finite(squares) else math.inf], dist.ReduceOp.SUM, group, device)
    (total,) = combine([total], dist.ReduceOp.SUM, tensor_parallel_group, device)
    return math.sqrt(total) if total >= 0 else math.inf  # nan is neither


def _finite(numbers: Iterable[float]) -> bool:
    return all(math.isfinite(number) for number in numbers)

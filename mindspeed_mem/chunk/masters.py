"""The masters of a Megatron DistributedOptimizer, with the parameters of whose pieces they are.

It is known by its attributes: model_float16_groups and shard_fp32_from_float16_groups, model_fp32_groups and
shard_fp32_groups, buffers, model_param_gbuf_map.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

Pair = tuple[torch.nn.Parameter, torch.Tensor]


def of_16_bit(optimizer: Any) -> Iterator[Pair]:
    """(Parameter, fp32 master of this rank's piece of it) for bf16 and fp16 parameters."""
    return _pairs(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups)


def of_fp32(optimizer: Any) -> Iterator[Pair]:
    """The same for fp32 parameters, whose masters are views of the model's own memory as Megatron makes them."""
    return _pairs(optimizer.model_fp32_groups, optimizer.shard_fp32_groups)


def every(optimizer: Any) -> Iterator[Pair]:
    yield from of_16_bit(optimizer)
    yield from of_fp32(optimizer)


def buffer_of(optimizer: Any, param: torch.nn.Parameter) -> Any:
    """The parameter-and-gradient buffer that `param` lies in."""
    return optimizer.buffers[optimizer.model_param_gbuf_map[param][0]]


def bucket_of(optimizer: Any, param: torch.nn.Parameter) -> Any:
    return buffer_of(optimizer, param).buckets[optimizer.model_param_gbuf_map[param][2]]


def _pairs(groups: list[list[torch.nn.Parameter]], masters: list[list[torch.Tensor]]) -> Iterator[Pair]:
    for params, own in zip(groups, masters, strict=True):
        yield from zip(params, own, strict=True)

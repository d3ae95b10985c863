"""The masters of a Megatron DistributedOptimizer, with the parameters of whose pieces they are.

No patch: what several patch files know of that class. It is known by its attributes: model_float16_groups and
shard_fp32_from_float16_groups, model_fp32_groups and shard_fp32_groups, buffers, model_param_gbuf_map; our own one is
`chunks_of_model`, which chunk_ddp.py gives to buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mindspeed_mem.zero.buffers.buckets import BucketChunks

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


def bucket_of(optimizer: Any, param: torch.nn.Parameter) -> Any:
    """The bucket of a parameter-and-gradient buffer that `param` lies in."""
    return _buffer_of(optimizer, param).buckets[optimizer.model_param_gbuf_map[param][2]]


def chunks_of(optimizer: Any, param: torch.nn.Parameter) -> BucketChunks | None:
    """The chunks of the model of `param`; None where that works with whole gradients."""
    return getattr(_buffer_of(optimizer, param), "chunks_of_model", None)


def all_chunks(optimizer: Any) -> list[BucketChunks]:
    """Those of all its models; empty if it has none, or works with whole gradients."""
    if optimizer.is_stub_optimizer:
        return []
    found = (getattr(buffer, "chunks_of_model", None) for buffer in optimizer.buffers)
    return list(dict.fromkeys(chunks for chunks in found if chunks is not None))


def _buffer_of(optimizer: Any, param: torch.nn.Parameter) -> Any:
    return optimizer.buffers[optimizer.model_param_gbuf_map[param][0]]


def _pairs(groups: list[list[torch.nn.Parameter]], masters: list[list[torch.Tensor]]) -> Iterator[Pair]:
    for params, own in zip(groups, masters, strict=True):
        yield from zip(params, own, strict=True)

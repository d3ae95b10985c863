"""Norms of split tensors: by sums of few numbers over the ranks, or where they are whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from mindspeed_mem.parallel.copies import copy_of, refuse_copies
from mindspeed_mem.parallel.moves import moved
from mindspeed_mem.parallel.parts import first, on_parts, split_in
from mindspeed_mem.parallel.strategy import StrategyError


def batch_norm(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """By sums of C numbers over the ranks: torch gathers the whole input of a split batch."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = {"training": False, "momentum": 0.1, "eps": 1e-5, **dict(zip(names, args, strict=False)), **kwargs}
    x, mean, var = given["input"], given["running_mean"], given["running_var"]
    shape, dims = [1, -1] + [1] * (x.dim() - 2), [dim for dim in range(x.dim()) if dim != 1]
    x = moved(x, split_in(x, range(x.dim())), where)
    if given["training"] or mean is None:
        count = x.numel() // x.shape[1]
        if count == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
        by_channel = [Shard(0) if isinstance(one, Shard) and one.dim == 1 else Replicate() for one in x.placements]
        batch_mean = moved(x.sum(dims), by_channel, where) / count
        batch_var = moved((x - batch_mean.view(shape)).square().sum(dims), by_channel, where) / count
        if mean is not None:
            if copy_of(mean) or copy_of(var):
                raise StrategyError(
                    f"{where}: its running statistics are {copy_of(mean) or copy_of(var)}: leave them out"
                )
            with torch.no_grad():
                for kept, new in ((mean, batch_mean), (var, batch_var * (count / (count - 1)))):
                    kept.lerp_(moved(new, kept.placements, where).to(kept.dtype), given["momentum"])
        mean, var = batch_mean, batch_var
    y = (x - mean.view(shape)) * torch.rsqrt(var + given["eps"]).view(shape)
    if given.get("weight") is not None:
        y = y * given["weight"].view(shape)
    return y if given.get("bias") is None else y + given["bias"].view(shape)


def instance_norm(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """Row by row, but for running statistics: torch takes a rank's own rows for the batch."""
    kept = kwargs.get("running_mean", args[1] if len(args) > 1 else None)
    refuse_copies((kept, kwargs.get("running_var", args[2] if len(args) > 2 else None)), where)
    return on_parts(function, args, kwargs, where, {0} if kept is None else ())


def rms_norm(function: Callable, args: tuple, kwargs: dict, where: str) -> Any:
    """Over whole dimensions: torch changes a mean over split ones in place, and refuses that."""
    x, (rest, kwargs) = first(args, kwargs)
    shape = rest[0] if rest else kwargs["normalized_shape"]
    return function(moved(x, split_in(x, range(x.dim() - len(shape))), where), *rest, **kwargs)

"""What may not be changed in place: tensors that are copies here and not on one device, and sums."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.tensor import DTensor

from mindspeed_mem.parallel.strategy import StrategyError

_COPY = "_mindspeed_mem_copy"
"""Attribute of a tensor: why it is a copy, though on one device it is the tensor itself or a view of it."""
OTHERWISE = "a view of a tensor that is split otherwise, so a copy"


def copied(x: DTensor, of: str) -> DTensor:
    """`x`, which is another tensor than on one device: its changes in place are to be refused, `of` says why."""
    setattr(x, _COPY, of)
    return x


def copy_of(x: DTensor) -> str:
    """Why what changes `x` in place would not reach the tensor that is changed on one device; "" where it does."""
    base = x._base if x._is_view() else None
    said = getattr(x, _COPY, "") or getattr(base, _COPY, "")
    if not said and isinstance(base, DTensor) and _memory(base) != _memory(x):
        said = OTHERWISE
    return said


def _memory(x: DTensor) -> int:
    return x._local_tensor.untyped_storage()._cdata


def refuse_sum(x: DTensor) -> None:
    if any(one.is_partial() for one in x.placements):
        raise RuntimeError("in-place operations that require placement changes are not supported: it is a sum")


def refuse_copies(statistics: Iterable[Any], where: str) -> None:
    """Running statistics that change in place have to be the module's own."""
    for of in filter(None, (copy_of(one) for one in statistics if isinstance(one, DTensor))):
        raise StrategyError(f"{where}: its running statistics are {of}: give it no strategy for them")

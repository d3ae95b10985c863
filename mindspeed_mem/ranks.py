"""Objects collected from all ranks; without other ranks nothing is sent."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def number() -> int:
    """Of this rank; 0 without others."""
    return 0 if _alone() else dist.get_rank()


def gather(mine: Any) -> list[Any]:
    """`mine` of all ranks in their order, on all of them. Collective."""
    if _alone():
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def to_first(mine: Any) -> list[Any]:
    """The same on rank 0; empty elsewhere. For what would be large if every rank had it. Collective."""
    if _alone():
        return [mine]
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone, dst=0)
    return everyone or []


def _alone() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1

"""The data-parallel ranks: torch's process group, or one process that is alone."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_mem.gemini.options import OptionError

logger = logging.getLogger(__name__)


class Alone:
    """Stands for the process group where there is none: one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def data_parallel(group: Any = None) -> Any:
    """`group`, or all ranks, or `Alone` where torch.distributed is not initialised.

    An object with a method `dp_process_group`, as ColossalAI's ProcessGroup has it, is asked for its group. Raises
    OptionError for a group that this rank is not in.
    """
    if group is not None:
        found = group.dp_process_group() if hasattr(group, "dp_process_group") else group
        if not (hasattr(found, "size") and hasattr(found, "rank")):
            raise OptionError(f"process_group is one that this rank is in, or None for all ranks, not {found!r}")
        return found
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    if os.environ.get("WORLD_SIZE", "1") != "1":
        logger.warning(
            "%s processes were launched, but torch.distributed is not initialised: each trains a model of its own. "
            "Call torch.distributed.init_process_group first",
            os.environ["WORLD_SIZE"],
        )
    return Alone()


def combine(numbers: list[float], op: dist.ReduceOp, group: Any, device: torch.device) -> list[float]:
    """`numbers` of all ranks of `group`, combined by `op` element by element, in fp64 where `device` has it."""
    if group is None or group.size() == 1 or not numbers:
        return numbers
    gloo = dist.get_backend(group) == "gloo"
    dtype = torch.float64 if gloo or device.type == "cuda" else torch.float32
    held = torch.tensor(numbers, dtype=dtype, device="cpu" if gloo else device)
    dist.all_reduce(held, op=op, group=group)
    return held.tolist()


def reduce_scatter(own: torch.Tensor, whole: torch.Tensor, group: Any) -> dist.Work:
    """Start to sum `whole` [n] over the ranks into `own` [n / ranks], which may be this rank's part of it."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    return getattr(dist, name)(own, whole, group=group, async_op=True)


def all_gather(whole: torch.Tensor, own: torch.Tensor, group: Any) -> None:
    """Fill `whole` [n] with the parts `own` [n / ranks] of all ranks."""
    if group.size() == 1:
        if own.data_ptr() != whole.data_ptr():
            whole.copy_(own)
        return
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(whole, own, group=group)

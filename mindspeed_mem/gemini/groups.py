"""Which ranks share the chunks, and which ones the layers: torch's process groups, or one process that is alone."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch.distributed as dist

from mindspeed_mem.gemini.options import OptionError, refuse, refuse_unknown
from mindspeed_mem.ranks import Alone, is_initialized

logger = logging.getLogger(__name__)


class ProcessGroup:
    """All ranks as tensor-parallel groups, which share layers and batches, by data-parallel ones, which share chunks.

    For the argument `process_group`. Name and order of ranks are ColossalAI's: those of a tensor-parallel group follow
    each other. All ranks make it, at the same place of their code. Without torch.distributed there is one rank.

    Args:
        tp_degree: tensor-parallel ranks; divides the number of ranks.
        dp_degree: the number of ranks divided by that; None: whatever it is.

    Raises OptionError with all that is wrong.
    """

    def __init__(self, *, tp_degree: int = 1, dp_degree: int | None = None, **unknown: Any) -> None:
        wrong = refuse_unknown("ProcessGroup", unknown, ProcessGroup.__init__)
        everybody = data_parallel()
        ranks = everybody.size()
        if not isinstance(tp_degree, int) or isinstance(tp_degree, bool) or tp_degree < 1 or ranks % tp_degree:
            allowed = ", ".join(str(number) for number in range(1, ranks + 1) if ranks % number == 0)
            wrong.append(f"tp_degree divides the number of ranks, {ranks}: it is one of {allowed}, not {tp_degree!r}")
        elif dp_degree is not None and dp_degree * tp_degree != ranks:
            wrong.append(f"dp_degree is {ranks // tp_degree}, {ranks} ranks / tp_degree, or None, not {dp_degree!r}")
        refuse(wrong)
        if tp_degree == 1:
            self._tensor, self._data = Alone(), everybody
        elif tp_degree == ranks:
            self._tensor, self._data = everybody, Alone()
        else:
            everyone = range(ranks)
            neighbours = [list(everyone[first : first + tp_degree]) for first in everyone[::tp_degree]]
            self._tensor, _ = dist.new_subgroups_by_enumeration(neighbours)
            self._data, _ = dist.new_subgroups_by_enumeration(list(map(list, zip(*neighbours, strict=True))))

    def tp_process_group(self) -> Any:
        """torch's group of the ranks that share this one's layers; `Alone` if there is no other."""
        return self._tensor

    def dp_process_group(self) -> Any:
        """torch's group of the ranks that share this one's chunks; `Alone` if there is no other."""
        return self._data

    def tp_world_size(self) -> int:
        return self._tensor.size()

    def dp_world_size(self) -> int:
        return self._data.size()

    def tp_local_rank(self) -> int:
        return self._tensor.rank()

    def dp_local_rank(self) -> int:
        return self._data.rank()

    def rank(self) -> int:
        return self._data.rank() * self._tensor.size() + self._tensor.rank()

    def world_size(self) -> int:
        return self._data.size() * self._tensor.size()


def tensor_parallel(group: Any = None) -> Any:
    """The tensor-parallel ranks of a `ProcessGroup`; None for what knows of none, such as torch's groups."""
    return group.tp_process_group() if hasattr(group, "tp_process_group") else None


def data_parallel(group: Any = None) -> Any:
    """`group`, or all ranks, or `Alone` where torch.distributed is not initialised.

    A `ProcessGroup`, or another object with its method `dp_process_group`, is asked for its group. Raises OptionError
    for a group that this rank is not in.
    """
    if group is not None:
        found = group.dp_process_group() if hasattr(group, "dp_process_group") else group
        if not (hasattr(found, "size") and hasattr(found, "rank")):
            raise OptionError(f"process_group is one that this rank is in, or None for all ranks, not {found!r}")
        return found
    if is_initialized():
        return dist.group.WORLD
    if os.environ.get("WORLD_SIZE", "1") != "1":
        logger.warning(
            "%s processes were launched, but torch.distributed is not initialised: each trains a model of its own. "
            "Call torch.distributed.init_process_group first",
            os.environ["WORLD_SIZE"],
        )
    return Alone()

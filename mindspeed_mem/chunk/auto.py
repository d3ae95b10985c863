"""--placement-policy auto: a run starts with everything on the host, measures a step, and takes the room there is.

The first training step is left out: it makes what stays (optimizer states, communication buffers). The second is
measured, its pass and its optimizer step apart. Before the third, chunks move to the device, those first that are used
first, and what is left lets more chunks stay gathered, unless the user said how many. The first is each rank's own
affair; the second is not: all ranks take the least of their budgets, since they have to gather alike.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist

from mindspeed_mem.chunk.residency import Residency
from mindspeed_mem.device import Backend

logger = logging.getLogger(__name__)

KEPT_FREE = 0.05
"""Of the device's memory: steps differ, and allocators lose some."""
FOR_CHUNKS = 0.75
"""Of the room, at most, for chunks that rest on the device; the rest is for gathered ones."""


class Movable(Protocol):
    """A chunk that rests on the host with its optimizer states."""

    nbytes: int
    """Device memory that it takes, with its states, once it rests there."""

    def to_device(self) -> None: ...


class AutoPlacement:
    """Watches the first training steps of a run and then settles where its chunks rest.

    Args:
        may_gather_more: whether gathered chunks may take what is left, too; if not, their budget stays what it is.
    """

    def __init__(self, backend: Backend, residency: Residency, may_gather_more: bool = True) -> None:
        self._backend, self._residency, self._may_gather_more = backend, residency, may_gather_more
        self.extra = 0
        """Bytes of gathered chunks above what a step needs; known once it is settled."""
        self._passes = 0  # completed
        self._under_way = False
        self._pass_peak = 0
        self.settled = False

    def begin_pass(self, movable: Iterable[Movable]) -> None:
        """A training pass starts; `movable` are the chunks on the host, in the order of use. Collective, once."""
        if self.settled:
            return
        self._under_way = True
        if self._passes == 1:
            self._backend.give_back()  # what building and the first step needed is no measure
            self._backend.reset_peak()
        elif self._passes == 2:
            self.settled = True
            self._settle(list(movable))

    def end_pass(self, completed: bool = True) -> None:
        """A pass is over, and if it was one of training the optimizer's step comes; or it was broken off."""
        counts, self._under_way = self._under_way and completed, False
        if counts and not self.settled:
            self._passes += 1
            self._pass_peak = self._backend.peak_held()

    def _settle(self, movable: list[Movable]) -> None:
        # Others take some of a device, too: contexts and communication buffers of this process and of its neighbours.
        have = min(self._backend.limit(), self._backend.room() + self._backend.allocated())
        most = have * (1 - KEPT_FREE)
        room_in_pass = max(0, int(most - self._pass_peak))
        room = min(room_in_pass, max(0, int(most - self._backend.peak_held())))
        for_chunks = int(room * FOR_CHUNKS)
        moved = taken = 0
        for one in movable:
            if taken + one.nbytes <= for_chunks:
                one.to_device()
                taken, moved = taken + one.nbytes, moved + 1
        if self._may_gather_more:
            self.extra = self._least(room_in_pass - taken)
        if self._residency.budget is not None:
            self._residency.budget += self.extra
        logger.info(
            "placement auto: the passes peak at %d bytes, of %d that there are; %d of %d chunks move to the device "
            "(%d bytes), and gathered chunks may take %s bytes",
            self._pass_peak,
            have,
            moved,
            len(movable),
            taken,
            self._residency.budget,
        )

    @staticmethod
    def _least(number: int) -> int:
        if not dist.is_initialized():
            return number
        device = "cpu" if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator()
        least = torch.tensor(number, dtype=torch.int64, device=device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least)

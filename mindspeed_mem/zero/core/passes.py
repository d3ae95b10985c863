"""The passes over some chunks: how much may be gathered in them, and what ``auto`` learns from the first.

With ``auto`` a run starts with everything on the host, measures a step, and takes the room there is. The first training
step is left out: it makes what stays (optimizer states, communication buffers). The second is measured, its pass and
its optimizer step apart. Before the third, chunks move to the device, those first that are used first, and what is left
lets more chunks stay gathered, unless the user said how many. The first is each rank's own affair; the second is not:
all ranks take the least of their budgets, since they have to gather alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from mindspeed_mem.device import Backend
from mindspeed_mem.ranks import combined, is_initialized
from mindspeed_mem.zero.core.chunk import Chunk
from mindspeed_mem.zero.core.gathering import Gathering

logger = logging.getLogger(__name__)

KEPT_FREE = 0.05
"""Of the device's memory: steps differ, and allocators lose some."""
FOR_CHUNKS = 0.75
"""Of the room, at most, for chunks that rest on the device; the rest is for gathered ones."""
_MOMENTS = 2  # of Adam, fp32 as the masters


class Movable(Protocol):
    """A chunk that rests on the host with its optimizer states."""

    @property
    def nbytes(self) -> int:
        """Device memory that it takes, with its states, once it rests there."""

    def to_device(self) -> None:
        """Rest there from now on; between two steps."""


def resting_bytes(chunk: Chunk | None, masters: Iterable[torch.Tensor], of_shard: bool) -> int:
    """What this rank's part of `chunk` takes: of parameters and gradients, if it keeps them, masters, Adam's moments.

    of_shard: whether `masters` are pieces of the shard itself.
    """
    total = sum(master.nbytes for master in masters) * (_MOMENTS + (not of_shard))
    if chunk is not None:
        total += (chunk.grad.nbytes + (0 if chunk.shard is None else chunk.nbytes)) // chunk.group.size()
    return total


class PassesOverChunks:
    """Begins and ends passes over the chunks of `gathering`.

    Args:
        given: the user's budget for gathered parameters, in bytes; None: what one use and the next chunk need.
    """

    def __init__(self, gathering: Gathering, given: int | None) -> None:
        self._gathering, self._given = gathering, given
        self._auto: AutoPlacement | None = None

    def measure(self, backend: Backend, asked_by: str, advice: str = "") -> bool:
        """Let the first passes be measured, and then use the room there is (``auto``).

        False, with a warning, where the device does not say what it has: then nothing is to rest on the host.
        asked_by, advice: for that warning.
        """
        if backend.limit() is None or backend.peak() is None:
            logger.warning("%s: this device does not say how much memory it has; all stays there%s", asked_by, advice)
            return False
        self._auto = AutoPlacement(backend, self._gathering, self._given is None)
        return True

    def allow(self, least: int, chunks: Iterable[Chunk], too_small: Callable[[int, int, int], Exception]) -> None:
        """Settle the budget for `chunks`, of which one use reads `least` bytes at once.

        too_small: makes what is raised if the budget given is less than that, of that budget, `least`, and what it is
            with the next chunk fetched meanwhile; bytes.
        """
        enough = least + max(chunk.nbytes for chunk in chunks)
        if self._given is None:
            self._gathering.budget = enough + (0 if self._auto is None else self._auto.extra)
        elif self._given < least:
            raise too_small(self._given, least, enough)
        else:
            self._gathering.budget = self._given

    def begin(
        self,
        key: Hashable,
        movable: Sequence[Movable] | None,
        before_use: Callable[[Collection[Chunk]], None] | None = None,
    ) -> None:
        """A pass of the kind `key` starts. Collective, once, with ``auto``.

        movable: in training the chunks on the host, in the order of use; None: it is none. before_use: see
        `Gathering.begin`.
        """
        if self._auto is not None and movable is not None:
            self._auto.begin_pass(movable)
        self._gathering.begin(key, before_use)

    def end(self, completed: bool = True) -> None:
        """It is over, or was broken off; nothing stays gathered."""
        self._gathering.end(completed)
        if self._auto is not None:
            self._auto.end_pass(completed)


class AutoPlacement:
    """Watches the first training steps of a run and then settles where its chunks rest.

    Args:
        backend: one that says how much memory it has.
        may_gather_more: whether gathered chunks may take what is left, too; if not, their budget stays what it is.
    """

    def __init__(self, backend: Backend, gathering: Gathering, may_gather_more: bool = True) -> None:
        self._backend, self._gathering, self._may_gather_more = backend, gathering, may_gather_more
        self.extra = 0
        """Bytes of gathered chunks above what a step needs; known once it is settled."""
        self._passes = 0  # completed
        self._under_way = False
        self._pass_peak = 0
        self.settled = False

    def begin_pass(self, movable: Sequence[Movable]) -> None:
        """A training pass starts; `movable` are the chunks on the host, in the order of use. Collective, once."""
        if self.settled:
            return
        self._under_way = True
        if self._passes == 1:
            self._backend.give_back()  # what building and the first step needed is no measure
            self._backend.reset_peak()
        elif self._passes == 2:
            self.settled = True
            self._settle(movable)

    def end_pass(self, completed: bool = True) -> None:
        """A pass is over, and if it was one of training the optimizer's step comes; or it was broken off."""
        counts, self._under_way = self._under_way and completed, False
        if counts and not self.settled:
            self._passes += 1
            self._pass_peak = self._backend.peak_held() or 0

    def _settle(self, movable: Sequence[Movable]) -> None:
        # Others take some of a device, too: contexts and communication buffers of this process and of its neighbours.
        backend = self._backend
        limit, room, allocated, held = backend.limit(), backend.room(), backend.allocated(), backend.peak_held()
        assert limit is not None and room is not None and allocated is not None and held is not None
        have = min(limit, room + allocated)
        most = have * (1 - KEPT_FREE)
        room_in_pass = max(0, int(most - self._pass_peak))
        room = min(room_in_pass, max(0, int(most - held)))
        for_chunks = int(room * FOR_CHUNKS)
        moved = taken = 0
        for one in movable:
            nbytes = one.nbytes
            if taken + nbytes <= for_chunks:
                one.to_device()
                taken, moved = taken + nbytes, moved + 1
        if self._may_gather_more:
            self.extra = room_in_pass - taken
            if is_initialized():  # of all ranks the least
                [self.extra] = combined([self.extra], dist.ReduceOp.MIN, dist.group.WORLD, backend.tensor_type)
        if self._gathering.budget is not None:
            self._gathering.budget += self.extra
        logger.info(
            "placement auto: the passes peak at %d bytes, of %d that there are; %d of %d chunks move to the device "
            "(%d bytes), and gathered chunks may take %s bytes",
            self._pass_peak,
            have,
            moved,
            len(movable),
            taken,
            self._gathering.budget,
        )

"""Which chunks are whole at any moment: gathered before use, evicted when the budget asks for it, fetched ahead.

All ranks of a data-parallel group have to gather the same chunks in the same order. So every decision here follows
from the order of uses and from numbers that all ranks share, never from what one rank's memory looks like, nor from
when it gets round to forget a model that is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass

import torch

from mindspeed_mem.zero.core.chunk import Chunk, storage_of
from mindspeed_mem.zero.core.use_order import Act, Intent, UseOrder

logger = logging.getLogger(__name__)


@dataclass
class Counts:
    """What has been moved so far on this rank."""

    gathers: int = 0
    gathered_bytes: int = 0
    ahead: int = 0
    """Gathers that were started before their chunk was used."""
    peak_bytes: int = 0
    """The most bytes of gathered chunks at any moment."""
    over_budget: int = 0
    """Uses that needed more than the budget at once."""


class Reading:
    """Parameters that somebody reads at once, from `Gathering.acquire` to `Gathering.done`."""

    __slots__ = ("params", "others", "open", "over", "biases", "first")

    def __init__(self, params: Iterable[torch.nn.Parameter], others: Iterable[torch.Tensor] = ()) -> None:
        self.params = tuple(dict.fromkeys(params))
        self.open: set[torch.nn.Parameter] = set()
        """Those of them that are still read."""
        self.others = tuple(others)
        """Tensors that may share a parameter's memory."""
        self.over = False
        """Whether it has been done with."""
        self.biases: list[torch.nn.Parameter] = []
        """What modules that were called meanwhile have returned of their own, to be added to something."""
        self.first = 0
        """The number of the first node that autograd can have made meanwhile."""


def no_notes(chunk: Chunk, arrived: bool) -> None:
    """Nobody wants to know."""


class Gathering:
    """The chunks of one process that are kept as shards, under one budget.

    Args:
        budget: bytes of gathered chunks at once; None: nothing is evicted before a pass ends.
        ahead: how many of the next chunks are gathered before they are used, as far as the budget allows.
    """

    def __init__(self, budget: int | None = None, ahead: int = 1) -> None:
        self.budget, self.ahead = budget, ahead
        self.chunks: list[Chunk] = []
        self.counts = Counts()
        self.live_bytes = 0
        """Bytes of gathered chunks now."""
        self.order = UseOrder()
        self.notes: Callable[[Chunk, bool], None] = no_notes
        """Told of a chunk when its gather begins (False), and when those who use it may go on (True)."""
        self._chunk_of: dict[torch.nn.Parameter, Chunk] = {}
        self._by_number: dict[int, Chunk] = {}
        self._by_storage: dict[int, Chunk] = {}
        self._gathered: dict[Chunk, None] = {}  # the one used last comes last
        self._readers: dict[Chunk, set[Reading]] = {}
        self._inside: list[list[Reading]] = []  # begun within each `during`, the innermost last
        self._before_use: Callable[[Collection[Chunk]], None] | None = None

    def add(self, chunk: Chunk) -> None:
        """Manage `chunk`, whose shard is kept."""
        self.chunks.append(chunk)
        self._readers[chunk] = set()
        self._by_number[chunk.index] = chunk
        self._by_storage[storage_of(chunk.whole)] = chunk
        for param in chunk.params:
            self._chunk_of[param] = chunk

    def remove(self, chunk: Chunk) -> None:
        """Leave `chunk` alone from now on, gathered or not."""
        if chunk in self._gathered:
            self._forget(chunk)
        self.chunks.remove(chunk)
        del self._readers[chunk], self._by_number[chunk.index], self._by_storage[storage_of(chunk.whole)]
        for param in chunk.params:
            del self._chunk_of[param]

    def manages(self, param: torch.nn.Parameter) -> bool:
        return param in self._chunk_of

    def largest_use(self, uses: Iterable[Iterable[torch.nn.Parameter]]) -> int:
        """The most bytes of chunks that one of `uses` (parameters read at once) needs."""
        sets = ({self._chunk_of[p] for p in params if p in self._chunk_of} for params in uses)
        return max((sum(chunk.nbytes for chunk in chunks) for chunks in sets), default=0)

    # ---- a pass

    def prepare(self, before_use: Callable[[Collection[Chunk]], None] | None) -> None:
        """`before_use` is called with the chunks of the next use, unless a pass begins first; None: nothing is."""
        self._before_use = before_use

    def begin(self, key: Hashable, before_use: Callable[[Collection[Chunk]], None] | None = None) -> None:
        """A pass of the kind `key` starts; see `UseOrder`. `before_use` is called with the chunks of its first
        use, when that comes."""
        self.release_all()
        self._before_use = before_use
        self.order.begin(key)

    def end(self, completed: bool = True) -> None:
        """The pass is over, or was broken off: nothing is read any more, and nothing stays gathered."""
        self.release_all()
        self.order.end(completed)

    def release_all(self) -> None:
        """Nothing is read any more, nothing stays gathered, and what rests on the host may be written to."""
        for readers in self._readers.values():
            readers.clear()
        for chunk in list(self._gathered):
            self._release(chunk)
        for store in {chunk.shard_store for chunk in self.chunks}:
            store.settle()

    def acquire(self, reading: Reading) -> None:
        """The parameters of `reading` are read from now on: gather their chunks, and start with what comes next.

        Collective over the groups of the chunks.
        """
        needed = self._chunks_of(reading)
        reading.over = False
        if self._inside:
            self._inside[-1].append(reading)
        if not needed:
            return
        if self._before_use is not None:
            prepare, self._before_use = self._before_use, None
            prepare(needed)
        reading.open.update(reading.params)
        for chunk in needed:
            self._readers[chunk].add(reading)
        if self._inside and all(chunk.gathered for chunk in needed):
            # A second run. Whether there is one may be this rank's own affair, so the order of uses does without it.
            for chunk in needed:
                chunk.wait()
            return
        if self._inside and torch._C._current_graph_task_id() == -1:  # a second run in forward, to see what it makes
            self.order.once()
        self.order.use(tuple(chunk.index for chunk in needed))
        for chunk in needed:
            if not chunk.gathered:
                if not self._make_room(chunk.nbytes, needed):
                    self._over_budget(chunk)
                self._gather(chunk)
            self._gathered[chunk] = self._gathered.pop(chunk)
        for chunk in needed:
            chunk.wait()
            self.notes(chunk, True)
        self._look_ahead(needed)

    def done(self, reading: Reading) -> None:
        """What `reading` names is not read by it any more; the chunks stay until their room is needed."""
        reading.open.clear()
        reading.over = True
        for chunk in self._chunks_of(reading):
            self._readers[chunk].discard(reading)

    @contextlib.contextmanager
    def during(self, reading: Reading) -> Iterator[None]:
        """`reading` is read inside, and so is nothing afterwards that began to be read inside."""
        self._inside.append([])
        try:
            self.acquire(reading)
            yield
        finally:
            for one in self._inside.pop():
                self.done(one)

    def settled(self, param: torch.nn.Parameter) -> None:
        """The gradient of `param` is complete for this backward: nobody reads it any more."""
        chunk = self._chunk_of.get(param)
        if chunk is None:
            return
        for reading in list(self._readers[chunk]):
            reading.open.discard(param)
            if reading.open.isdisjoint(chunk.pieces):
                self._readers[chunk].discard(reading)

    def drop(self, chunk: Chunk) -> bool:
        """Release `chunk` now, unless it is being read. Returns whether it is released."""
        if chunk in self._gathered and not self._readers[chunk]:
            self._release(chunk)
        return not chunk.gathered

    # ---- moves

    def _chunks_of(self, reading: Reading) -> dict[Chunk, None]:
        found = (self._by_storage.get(storage_of(tensor)) for tensor in reading.others)
        ours = (self._chunk_of.get(param) for param in reading.params)
        return dict.fromkeys(chunk for chunk in (*ours, *found) if chunk is not None)

    def _look_ahead(self, current: Collection[Chunk]) -> None:
        if not self.ahead or not self.order.following:
            return
        coming = [self._by_number[number] for number in self.order.coming(self.ahead + len(current))]
        later = [chunk for chunk in coming if chunk not in current][: self.ahead]
        for chunk in later:
            if chunk.gathered:
                continue
            if not self._make_room(chunk.nbytes, {*current, *later}, before=self.order.next_use(chunk.index)):
                return
            self._gather(chunk)
            self.counts.ahead += 1

    def _gather(self, chunk: Chunk) -> None:
        self.order.may_do(Intent(Act.GATHER, chunk.number_in_group), chunk.group, chunk.whole.device)
        self._gathered[chunk] = None
        self.live_bytes += chunk.nbytes
        self.notes(chunk, False)
        try:
            chunk.gather()
        except BaseException:  # memory has run out half-way
            self._release(chunk)
            raise
        self.counts.gathers += 1
        self.counts.gathered_bytes += chunk.nbytes
        self.counts.peak_bytes = max(self.counts.peak_bytes, self.live_bytes)

    def _release(self, chunk: Chunk) -> None:
        chunk.release()
        self._forget(chunk)

    def _forget(self, chunk: Chunk) -> None:
        del self._gathered[chunk]
        self.live_bytes -= chunk.nbytes

    def _make_room(self, nbytes: int, keep: Iterable[Chunk], before: float | None = None) -> bool:
        """Evict until `nbytes` more fit: what is used again last goes first (Belady), without an order what was used
        longest ago. `before`: make room for a use at that position, ahead of time; nothing is evicted for it if at that
        position another one would be, as that would cost a gather. Returns whether there is room.
        """
        if self.budget is None:
            return True
        missing = self.live_bytes + nbytes - self.budget
        if missing <= 0:
            return True
        free = [chunk for chunk in self._gathered if not self._readers[chunk] and chunk not in keep]
        next_use = {chunk: self.order.next_use(chunk.index) for chunk in free}
        if before is not None:
            free = [chunk for chunk in free if next_use[chunk] > before]
        free.sort(key=next_use.__getitem__, reverse=True)  # equal ones, as all are without an order, stay as they are
        if before is not None and not self._would_go(free, missing, before):
            return False
        for chunk in free:
            if missing <= 0:
                break
            self._release(chunk)
            missing -= chunk.nbytes
        return missing <= 0

    def _would_go(self, free: list[Chunk], missing: int, position: float) -> bool:
        """Whether the first of `free` that make `missing` bytes would leave at that position, too."""
        sizes = itertools.accumulate((chunk.nbytes for chunk in free), initial=0)
        number = next((count for count, size in enumerate(sizes) if size >= missing), None)
        if number is None:
            return False
        stay = (chunk for chunk in self._gathered if chunk not in free[:number])
        last = max((self.order.next_use(chunk.index, position) for chunk in stay), default=0)
        return last <= self.order.next_use(free[number - 1].index)

    def _over_budget(self, chunk: Chunk) -> None:
        self.counts.over_budget += 1
        if self.counts.over_budget == 1:
            logger.warning(
                "gathered chunks need more than their budget of %d bytes: %d are read at once, %d more are needed now. "
                "Training goes on above the budget; give --placement-policy a larger one, or use smaller chunks",
                self.budget,
                self.live_bytes,
                chunk.nbytes,
            )

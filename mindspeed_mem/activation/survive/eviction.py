"""Moves activations to the host that no plan has selected, when memory runs out: any that a handle holds.

What backward needs last leaves first. An activation leaves only if that frees its memory: not while the running
operator works on it, nor while anybody else holds it. It comes back like every other: ahead of its use where there is
room, otherwise when backward asks for it.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from mindspeed_mem.activation.storage.mover import COMPUTE_AFTER_IN, RELEASE_AFTER_OUT, Mover
from mindspeed_mem.activation.storage.records import (
    COPYING,
    DEVICE,
    DROPPED,
    HOST,
    KEPT,
    LOADED,
    REMADE,
    InFlight,
    Record,
    take_hold,
    whole,
)

if TYPE_CHECKING:
    from mindspeed_mem.device import Backend
    from mindspeed_mem.device.slabs import HostSlabs, Slab

_ON_DEVICE = (KEPT, DEVICE, COPYING, LOADED, REMADE)
_SMALLEST = 1024  # bytes; below it a copy costs more than it brings


class EvictingMover(Mover):
    """A mover that makes room.

    Args:
        turn: says of a frame how many passes come before its backward, as far as anybody knows.
    """

    known: weakref.WeakSet[Record]

    def __init__(self, backend: Backend, slabs: HostSlabs, turn: Callable[[InFlight], float]):
        super().__init__(backend, slabs)
        self.known = weakref.WeakSet()
        self._turn = turn
        self._prefetching = False
        self.spare: Callable[[], int] | None = None
        """While memory is tight: the bytes of room that nothing is to be copied back into early."""
        self.host_full = False
        """Whether the host had no room in the last `make_room`."""
        self.copying: Callable[[], AbstractContextManager] = contextlib.nullcontext
        """Entered around copies that memory's running out causes, and around waits for them."""

    # ---- out
    def make_room(self, nbytes: int, pinned: set[int]) -> int | None:
        """Free at least ``nbytes`` on the device, if that can be; returns the bytes freed.

        ``pinned``: ``_cdata`` of storages that must stay. None: this is no time to ask, since what runs out of memory
        is a copy that was started early.
        """
        if self._prefetching:
            return None
        freed, self.host_full = 0, False
        with self._lock, self.copying(), torch.no_grad():
            for record in self._in_order():
                if freed >= nbytes:
                    break
                if self._evict(record, pinned):
                    freed += record.nbytes
        return freed

    def on_device(self) -> Counter[tuple[int, str]]:
        """Bytes of activations on the device that a handle holds, by the operator that produced them."""
        found: Counter[tuple[int, str]] = Counter()
        for record in list(self.known):
            if record.state in _ON_DEVICE:
                found[record.layer, record.op] += record.nbytes
        return found

    def away(self, micro_batch: InFlight, number: int) -> tuple[int, int]:
        """Of what its operator ``number`` has saved, whoever produced it: bytes on the host, and bytes to be made
        again."""
        known = [one for one in list(self.known) if one.state in (HOST, DROPPED) and one.micro_batch is micro_batch]
        mine = [one for one in known if _is_saved_by(one, number)]
        on_host, to_make = (sum(one.nbytes for one in mine if one.state == where) for where in (HOST, DROPPED))
        return on_host, to_make

    def _in_order(self) -> list[Record]:
        """What could leave: what is copied already, then passes whose backward is furthest, and in each what was saved
        first."""
        found = [r for r in list(self.known) if r.state in _ON_DEVICE and r.nbytes >= _SMALLEST]
        turns = {id(one): self._turn(one) for one in {id(r.micro_batch): r.micro_batch for r in found}.values()}
        found.sort(key=lambda r: (r not in self.late, -turns[id(r.micro_batch)], r.last_use, -r.nbytes))
        return found

    def _evict(self, record: Record, pinned: set[int]) -> bool:
        """Move this record to the host; False where that cannot be, or would free nothing."""
        storage = take_hold(record.storage()) if record.buffer is None else record.buffer.untyped_storage()
        if storage is None or storage.nbytes() != record.nbytes or storage._cdata in pinned:
            return False
        holding = [handle for handle in record.live_handles() if handle.layout is None]
        ours = len(holding) + (record.buffer is not None) + (record.source is not None)
        if _held_elsewhere(storage, ours):
            return False
        if record.state == REMADE and record.buffer is not None and record.buffer._version != record.version:
            return False  # it will be reported when it is asked for
        if record.state == COPYING:
            return self._release_early(record)
        slab = self._slab(record.nbytes)
        if slab is None:
            self.host_full = True
            return False
        state = record.state
        source = whole(storage)
        del storage
        compute, out_stream, _ = self._begin()
        try:
            if state == LOADED:
                assert record.in_event is not None
                self.timing.wait(self.backend, record, record.stream, record.in_event, COMPUTE_AFTER_IN)
            self._wait_for_bytes(record, compute, out_stream, [])
            self._send(record, source, slab, out_stream)
            record.out_event = self.backend.record(out_stream)
        except BaseException:
            self.slabs.give(slab, slab.ready)
            raise
        del source
        if state not in (KEPT, DEVICE):
            self._drop_buffer(record, holding)
        elif not self._release_early(record, selected=state == DEVICE):
            return False
        self.evicted_bytes += record.nbytes
        self.evictions += 1
        return True

    def _release_early(self, record: Record, selected: bool = True) -> bool:
        listed = record in self.late
        if not self.release(record):
            return False
        if not selected:
            record.distance = 1  # back one operator ahead, if there is room by then
        if not listed:
            record.micro_batch.moved[id(record)] = weakref.ref(record)
        return True

    def _drop_buffer(self, record: Record, holding: list) -> None:
        """It had come back, or had been made again, and leaves once more."""
        assert record.out_event is not None
        self.timing.wait(self.backend, record, record.stream, record.out_event, RELEASE_AFTER_OUT)
        for handle in holding:
            handle.let_go()
        record.source = record.buffer = record.in_event = None
        record.state, record.way_back = HOST, self

    def _slab(self, nbytes: int) -> Slab | None:
        try:
            return self.slabs.take(nbytes)
        except (MemoryError, RuntimeError) as error:  # the host itself has no more
            if not isinstance(error, MemoryError) and "allocate" not in str(error):
                raise
            return None

    # ---- back
    def load(self, records: Iterable[Record]) -> None:
        """Start copying back, as far as there is room (all or none where memory had not been tight): what backward
        does not need yet pushes nothing else out."""
        with self._lock, self.copying():
            self._prefetching = True
            try:
                if self.spare is None:
                    super().load(records)
                    return
                for record in records:
                    if self._may_return(record):
                        super().load((record,))
            except (RuntimeError, MemoryError) as error:
                if not self.backend.is_out_of_memory(error):
                    raise
            finally:
                self._prefetching = False

    def _may_return(self, record: Record) -> bool:
        if self.spare is None or record.state != HOST:
            return True
        room = self.backend.room()
        return room is None or room >= record.nbytes + self.spare()

    def bring_back(self, record: Record) -> None:
        with self.copying():
            if record.state == HOST:
                super().load((record,))
            super().bring_back(record)


def _is_saved_by(record: Record, number: int) -> bool:
    """Whether operator ``number`` of its micro-batch has saved it; outside the layers nobody knows but that it may."""
    numbers = [handle.number if handle.micro_batch is not None else record.last_use for handle in record.live_handles()]
    return number in numbers


def _held_elsewhere(storage: torch.UntypedStorage, ours: int) -> bool:
    """Whether anything holds the memory besides ``ours`` tensors and the caller's reference to its storage."""
    tensors, names = _holders(storage)
    return tensors > ours + _ALONE[0] or names > _ALONE[1]


def _holders(storage: torch.UntypedStorage) -> tuple[int, int]:
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def _alone() -> tuple[int, int]:
    """What `_holders` counts where there is no tensor but one, and only the two callers know the storage."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()

    def counted(storage: torch.UntypedStorage) -> tuple[int, int]:
        return _holders(storage)

    tensors, names = counted(storage)
    return tensors - 1, names


_ALONE = _alone()

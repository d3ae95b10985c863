"""Host buffers of the sizes that are asked for, recycled, under a budget."""

from __future__ import annotations

import collections
import threading

import torch

from mindspeed_mem.device.base import Backend, Event


class Slab:
    """A host buffer that has been lent out.

    `buffer` is uint8[n] of the size that was asked for, the beginning of `whole`, uint8[nbytes]. `ready` is an event
    that whoever writes to the buffer must wait for first, None when there is nothing to wait for: an earlier copy may
    still read it.
    """

    __slots__ = ("buffer", "whole", "nbytes", "ready")

    def __init__(self, whole: torch.Tensor, nbytes: int) -> None:
        self.buffer = self.whole = whole
        self.nbytes = nbytes
        self.ready: Event | None = None


class HostSlabs:
    """A pool of host buffers that together never hold more than `limit_bytes` (None: no limit).

    Buffers are made in exact sizes, because activations come in few sizes and rounding up would waste pinned memory; or
    as large as what the device's pinned memory takes for them anyway, and are counted so.
    Where sizes keep changing (experts), an idle buffer that is up to a quarter larger serves too, and idle buffers are
    freed before all of them together exceed twice what was ever in use.
    Buffers come back in the order they were given back, so that the copies that use them have had the longest time to
    finish.
    """

    def __init__(self, backend: Backend, limit_bytes: int | None = None) -> None:
        if limit_bytes is not None and limit_bytes < 0:
            raise ValueError(f"host budget: got {limit_bytes} bytes; give 0 or more, or None for no limit")
        self._backend, self.limit_bytes = backend, limit_bytes
        self._idle: dict[int, collections.deque[Slab]] = {}
        self._lent: dict[int, Slab] = {}  # by id; strong, so that a slab lost by its user is not freed under a copy
        self._lock = threading.RLock()  # backward runs on other threads; garbage collection may give back within take
        self.bytes_held = 0
        """Of all buffers, lent and idle."""
        self.bytes_in_use = 0
        """Of the buffers lent out."""
        self.peak_in_use = 0
        """The most `bytes_in_use` has been."""
        self.allocations = 0
        """How many buffers were freshly allocated; constant in a steady state."""

    def take(self, nbytes: int) -> Slab | None:
        """A slab of exactly `nbytes`, or None when the budget has no room for it.

        An idle slab of this size, or a little larger, is reused, and its `ready` event must be waited for before
        writing. Otherwise a fresh one is allocated; where the budget requires it, idle slabs of other sizes are freed
        first, largest first.
        """
        if nbytes < 0:
            raise ValueError(f"host slab: got {nbytes} bytes; give 0 or more")
        size = self._backend.host_bytes(nbytes)
        with self._lock:
            idle = self._idle.get(size) or self._idle.get(self._close_to(size))
            if idle:
                slab = idle.popleft()
            elif self._make_room(size):
                slab = self._allocate(size)
            else:
                return None
            slab.buffer = slab.whole if slab.nbytes == nbytes else slab.whole[:nbytes]
            self._lent[id(slab)] = slab
            self.bytes_in_use += slab.nbytes
            self.peak_in_use = max(self.peak_in_use, self.bytes_in_use)
        if slab.ready is not None and self._backend.done(slab.ready):
            slab.ready = None
        return slab

    def give(self, slab: Slab, event: Event | None = None) -> None:
        """Take `slab` back; `event` is after the last copy that uses it, None when all of them are known to be done.

        Raises ValueError when the slab is not lent out by this pool (given back twice, say).
        """
        with self._lock:
            if self._lent.pop(id(slab), None) is None:
                raise ValueError(
                    f"host slab of {slab.nbytes} bytes is not lent out by this pool; give each slab back once, "
                    "to the pool it came from"
                )
            slab.ready = event
            self.bytes_in_use -= slab.nbytes
            self._idle.setdefault(slab.nbytes, collections.deque()).append(slab)

    def clear(self) -> int:
        """Free all idle slabs, waiting for copies that still use them; returns the bytes freed."""
        freed = 0
        with self._lock:
            while size := self._largest_idle():
                freed += self._free_one(size)
            self._idle.clear()
        if freed:
            self._backend.free_host()
        return freed

    def _allocate(self, nbytes: int) -> Slab:
        self.bytes_held += nbytes  # before allocating: a re-entrant take must see the budget as spent
        try:
            buffer = self._backend.host_empty(nbytes)
        except BaseException:
            self.bytes_held -= nbytes
            raise
        self.allocations += 1
        return Slab(buffer, nbytes)

    def _make_room(self, nbytes: int) -> bool:
        needed = self.bytes_in_use + nbytes
        if self.limit_bytes is not None and needed > self.limit_bytes:
            return False  # freeing every idle slab would not do: keep them
        allowed = 2 * max(self.peak_in_use, needed)
        if self.limit_bytes is not None:
            allowed = min(allowed, self.limit_bytes)
        freed = 0
        while self.bytes_held + nbytes > allowed and (size := self._largest_idle()):
            freed += self._free_one(size)
        if freed:
            self._backend.free_host()
        return self.limit_bytes is None or self.bytes_held + nbytes <= allowed

    def _close_to(self, nbytes: int) -> int:
        """The smallest idle size that holds `nbytes` without wasting more than a fifth; 0 if there is none."""
        fitting = (size for size, idle in self._idle.items() if idle and nbytes < size <= nbytes + nbytes // 4)
        return min(fitting, default=0)

    def _largest_idle(self) -> int:
        return max((size for size, idle in self._idle.items() if idle), default=0)

    def _free_one(self, size: int) -> int:
        slab = self._idle[size].popleft()
        if slab.ready is not None and not self._backend.done(slab.ready):
            self._backend.synchronize(slab.ready)  # unmapping pinned memory under a running copy is fatal
        del slab.buffer, slab.whole
        self.bytes_held -= size
        if not self._idle[size]:
            del self._idle[size]
        return size

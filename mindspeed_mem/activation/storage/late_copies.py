"""What is to leave the device but is still being copied: computation does not stand still for it, as far as it may hold
memory for longer.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed_mem.activation.storage.records import Record


_PART = 8
"""So large a part of what a pass moves may be late: of eight layers one, whose copies then have the time of a layer."""


class LateCopies:
    """Records past their release points, the oldest first."""

    __slots__ = ("window", "_bound", "_moved", "nbytes", "_records")

    def __init__(self) -> None:
        self.window = 0
        """Bytes that they may hold together before computation waits for the oldest."""
        self._bound: int | None = None
        self._moved: dict[int, int] = {}
        self.nbytes = 0
        self._records: dict[int, weakref.ref[Record]] = {}

    def allow(self, most: int, all_of_it: bool) -> None:
        """Set the window, to `most` bytes. Not `all_of_it`: once a forward pass has run, to a part of what it moved,
        where that is less.

        A host that runs ahead of the device finds every copy late. A plan that moves no more than the window would free
        nothing.
        """
        self.window, self._bound = most, None if all_of_it else most
        self._moved.clear()

    def pass_moved(self, chunk: int, nbytes: int) -> None:
        """By a forward pass of a model chunk; of several that counts whose last pass moved most."""
        if self._bound is not None and nbytes and self._moved.get(chunk) != nbytes:
            self._moved[chunk] = nbytes
            self.window = min(self._bound, max(self._moved.values()) // _PART)

    def __bool__(self) -> bool:
        return bool(self._records)

    def __contains__(self, record: Record) -> bool:
        return id(record) in self._records

    @property
    def too_much(self) -> bool:
        return self.nbytes > self.window

    def add(self, record: Record) -> None:
        if id(record) not in self._records:
            self._records[id(record)] = weakref.ref(record)
            self.nbytes += record.nbytes

    def drop(self, record: Record) -> None:
        """It has left, or it stays, or nobody needs it any more."""
        if self._records.pop(id(record), None) is not None:
            self.nbytes -= record.nbytes

    def oldest(self) -> Record | None:
        """None where there is none, or it is about to be dropped by whoever found it dead."""
        return next(iter(self._records.values()))() if self._records else None

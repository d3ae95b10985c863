"""One micro-batch of one model chunk: its operators in the order they ran, and what is due when.

Operators are numbered from 1 in order of their forward. An activation produced by operator n and used by backward of
operator u (the last that saved it), moved with distance k, is released in forward once operator n+k has run, and its
copy back starts when backward of operator u+k is about to start. Backward of an operator is seen by its first unpack;
an operator that saved nothing gives no sign, so what waits for it starts with the sign before (earlier, never later).
"""

from __future__ import annotations

import heapq
import weakref
from bisect import bisect_left, bisect_right
from itertools import count

import torch

from mindspeed_mem.activation.mover import Mover
from mindspeed_mem.activation.records import COPYING, DEVICE, HOST, Record

OUTSIDE = (-1, "", 0)  # layer, operator, number of what was allocated before this micro-batch's first operator

_sequence_nr = torch._C._autograd._get_sequence_nr


class Frame:
    """Bookkeeping of one forward and its backward. Holds records weakly: an abandoned forward leaves nothing."""

    def __init__(self, mover: Mover, key: tuple[int | None, int]):
        self.mover, self.key = mover, key
        self.count = 0  # operators started so far
        self.last_layer = -1
        self.forward_done = False
        self._bounds: list[int] = []  # autograd sequence numbers at which the running operator changed
        self._running: list[tuple[int, str, int]] = []
        self._fresh: list[weakref.ref[Record]] = []  # selected, produced by an operator that is still running
        self._due: list[tuple[int, int, weakref.ref[Record]]] = []
        self._tie = count()
        self.moved: list[weakref.ref[Record]] = []
        self._saving: list[int] = []  # numbers of the operators that saved something, ascending
        self._queue: list[tuple[int, weakref.ref[Record]]] | None = None  # (copy-in time, record), descending
        self._cursor = 0
        self._reached = 1 << 62  # the lowest operator whose backward has been seen to start

    # ---- forward
    def switch(self, layer: int, op: str, number: int) -> None:
        """From now on this operator runs."""
        self._bounds.append(_sequence_nr())
        self._running.append((layer, op, number))

    def owner_of(self, tensor: torch.Tensor) -> tuple[int, str, int]:
        """The operator that was running when the storage of ``tensor``, seen for the first time, was allocated.

        Autograd numbers its nodes in order of creation, so the node of the base tensor tells. A tensor without a node
        was made by whoever saves it: inputs from outside are marked when a layer starts.
        """
        base = tensor._base if tensor._base is not None else tensor
        node = base.grad_fn
        if node is None:
            return OUTSIDE if base.requires_grad else self._running[-1]
        position = bisect_right(self._bounds, node._sequence_nr()) - 1
        return self._running[position] if position >= 0 else OUTSIDE

    def saved_by(self, number: int) -> None:
        if not self._saving or self._saving[-1] != number:
            self._saving.append(number)

    def select(self, record: Record, distance: int) -> None:
        """Move this record: copy out as soon as it is complete, release ``distance`` operators after its producer."""
        record.distance = distance
        record.state = DEVICE
        self._fresh.append(weakref.ref(record))
        if record.number < self.count:
            self.copy_fresh()

    def copy_fresh(self) -> None:
        """Start the copies of what is complete: nothing of it is written any more."""
        if not self._fresh:
            return
        fresh, self._fresh = self._fresh, []
        records = [record for ref in fresh if (record := ref()) is not None and record.state == DEVICE]
        self.mover.copy_out(records)
        for record in records:
            if record.state == COPYING:
                due = max(record.number + record.distance, self.count)
                heapq.heappush(self._due, (due, next(self._tie), weakref.ref(record)))

    def release_due(self, until: int | None = None) -> None:
        """Release what is due once operator ``until`` has run (None: everything)."""
        while self._due and (until is None or self._due[0][0] <= until):
            record = heapq.heappop(self._due)[2]()
            if record is not None and self.mover.release(record):
                self.moved.append(weakref.ref(record))

    def finish_forward(self) -> None:
        self.copy_fresh()
        self.release_due()
        self.forward_done = True

    # ---- backward
    def backward_reaches(self, number: int) -> bool:
        """Backward of operator ``number`` is about to start; numbers above `count` are operators that run before it.

        Returns whether that is news.
        """
        if number >= self._reached:
            return False
        self._reached = number
        if self._queue is None:
            live = [record for ref in self.moved if (record := ref()) is not None and record.state == HOST]
            live.sort(key=lambda r: (r.last_use + r.distance, r.last_use, r.number), reverse=True)
            self._queue = [(record.last_use + record.distance, weakref.ref(record)) for record in live]
        if self._cursor >= len(self._queue):
            return True
        if number > self.count + 1:
            below = number - 1
        else:
            position = bisect_left(self._saving, number)
            below = self._saving[position - 1] if position else 0
        start = self._cursor
        while self._cursor < len(self._queue) and self._queue[self._cursor][0] > below:
            self._cursor += 1
        if self._cursor > start:
            self.mover.load([r for _, ref in self._queue[start : self._cursor] if (r := ref()) is not None])
        return True

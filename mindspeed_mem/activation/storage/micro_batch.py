"""One micro-batch of one model chunk: its operators in the order they ran, and what is due when.

Operators are numbered from 1 in order of their forward. An activation produced by operator n and used by backward of
operator u (the last that saved it), moved with distance k, is released in forward once operator n+k has run and its
copy is done, or `LateCopies` has no room. Its copy back starts when backward of operator u+k is about to start. The
first unpack of what an operator saved says that its backward starts, the death of the last of it that it has ended: the
next below starts, whether or not it saved any.
"""

from __future__ import annotations

import heapq
import weakref
from bisect import bisect_left, bisect_right
from itertools import count

import torch

from mindspeed_mem.activation.storage.ledger import LEDGER, Unseen
from mindspeed_mem.activation.storage.mover import Mover
from mindspeed_mem.activation.storage.records import COPYING, DEVICE, HOST, Owner, Record, key_of

NO_OWNER = (-1, "", 0)  # layer, operator, number of what was allocated before this micro-batch's first operator

PASSED_ON: list[str] = []
"""Names of the nodes of aliases that somebody makes, outside of all operators, of what these take and return: such an
alias is its operator's as what it stands for is. Who knows of any adds them."""

_sequence_nr = torch._C._autograd._get_sequence_nr


class MicroBatch:
    """Bookkeeping of one forward and its backward. Holds records weakly: an abandoned forward leaves nothing."""

    __slots__ = (
        "mover",
        "late",
        "key",
        "home",
        "home_key",
        "count",
        "last_layer",
        "forward_done",
        "stays",
        "bounds",
        "running",
        "fresh",
        "due",
        "moved",
        "recomputed",
        "native",
        "ahead",
        "in_backward",
        "_tie",
        "_saving",
        "_alive",
        "_queue",
        "_cursor",
        "_reached",
        "__weakref__",
    )

    def __init__(self, mover: Mover, key: tuple[int | None, int]):
        self.mover, self.late, self.key = mover, mover.late, key
        self.home, self.home_key = mover.backend.current_stream(), mover.backend.stream_key()
        self.count = 0  # operators started so far
        self.last_layer = -1
        self.forward_done = False
        self.stays = False  # nothing of it is moved
        self.bounds: list[int] = []  # autograd sequence numbers at which the running operator changed
        self.running: list[Owner] = []  # to which
        self.fresh: list[weakref.ref[Record]] = []  # selected, produced by an operator that is still running
        self.due: list[tuple[int, int, weakref.ref[Record]]] = []
        self._tie = count()
        self.moved: dict[int, weakref.ref[Record]] = {}  # by id: one may be selected once more
        self.recomputed: list[tuple[int, str, weakref.ref]] = []  # layer, operator, run
        self._saving: list[int] = []  # numbers of the operators that saved something, ascending
        self._alive: dict[int, int] = {}  # how much of what each saved is still there
        self.native = Unseen(LEDGER)  # what operators that have no hook keep
        self.ahead: MicroBatch | None = None  # whose backward follows the pass that runs now
        self._queue: list[tuple[int, weakref.ref[Record]]] | None = None  # (copy-in time, record), descending
        self._cursor = 0
        self._reached = self.in_backward = 1 << 62  # the lowest operator whose backward is next, or runs

    # ---- forward
    def switch(self, layer: int, op: str, number: int) -> None:
        """From now on this operator runs."""
        self.bounds.append(_sequence_nr())
        self.running.append((layer, op, number))

    def owner_of(self, tensor: torch.Tensor) -> Owner:
        """The operator that was running when the storage of ``tensor``, seen for the first time, was allocated.

        Autograd numbers its nodes in order of creation, so the node of the base tensor tells. A tensor without a node
        was made by whoever saves it: inputs from outside are marked when a layer starts.
        """
        base = tensor._base if tensor._base is not None else tensor
        node = base.grad_fn
        if node is None:
            return NO_OWNER if base.requires_grad else self.running[-1]
        while PASSED_ON and type(node).__name__ in PASSED_ON:
            below = node.next_functions[0][0]
            if below is None or type(below).__name__ == "AccumulateGrad":  # a leaf
                return NO_OWNER
            node = below
        position = bisect_right(self.bounds, node._sequence_nr()) - 1
        return self.running[position] if position >= 0 else NO_OWNER

    def saved_by(self, number: int) -> None:
        """Operator ``number`` saves one more tensor."""
        if number in self._alive:
            self._alive[number] += 1
        else:
            self._alive[number] = 1
            self._saving.append(number)

    def signs(self, number: int) -> None:
        """Operator ``number`` will say when its backward starts, though it holds no handle."""
        self._saving.append(number)

    def select(self, record: Record, distance: int, at_once: bool = True) -> None:
        """Move this record: copy out as soon as it is complete, release ``distance`` operators after its producer.

        Without ``at_once`` the copy waits for the end of the running operator even if it is complete. If it is small,
        it stays.
        """
        staying = self.mover.staying
        if record.nbytes < staying.smallest:
            staying.is_small(record)
            return
        record.distance = distance
        record.state = DEVICE
        self.fresh.append(weakref.ref(record))
        if at_once and record.number < self.count:
            self.copy_fresh()

    def copy_fresh(self) -> None:
        """Start the copies of what is complete: nothing of it is written any more."""
        if not self.fresh:
            return
        fresh, self.fresh = self.fresh, []
        records = [record for ref in fresh if (record := ref()) is not None and record.state == DEVICE]
        if records:
            self.mover.copy_out(records)
        for record in records:
            if record.state == COPYING:
                due = max(record.number + record.distance, self.count)
                heapq.heappush(self.due, (due, next(self._tie), weakref.ref(record)))

    def those_moved(self) -> list[Record]:
        """What has left in this pass and is needed yet."""
        return [record for ref in list(self.moved.values()) if (record := ref()) is not None]

    def layers_of_those_moved(self) -> set[int]:
        """The layers that made, or save, what has left."""
        moved = self.those_moved()
        used = {record.last_use for record in moved}
        return {one.layer for one in moved} | {layer for layer, _, number in self.running if number in used}

    def release_due(self, until: int | None = None) -> None:
        """Release what is due once operator ``until`` has run (None: everything)."""
        while self.due and (until is None or self.due[0][0] <= until):
            record = heapq.heappop(self.due)[2]()
            if record is not None:
                self.mover.release_when_copied(record)
                self.moved[id(record)] = weakref.ref(record)
        if self.late.nbytes:
            self.mover.release_late()

    def operator_ended(self) -> None:
        """What the last operator produced is complete."""
        if self.fresh:
            self.copy_fresh()
        if self.due or self.late.nbytes:
            self.release_due(self.count)

    def finish_forward(self) -> None:
        self.copy_fresh()
        self.release_due()
        self.forward_done = True

    # ---- backward
    def begin_backward(self) -> None:
        """The first operator to come is the last that saved something, or one after it that saved nothing."""
        self.backward_reaches(self._saving[-1] + 1 if self._saving else 1)

    def unpacks(self, number: int) -> None:
        """Backward of operator ``number`` reads what it saved."""
        if not self.forward_done:
            self.finish_forward()  # no schedule told us
        if number < self.in_backward:
            self.in_backward = number
            self.backward_reaches(number)

    def dropped(self, number: int) -> None:
        """One of the tensors that operator ``number`` saved is gone."""
        alive = self._alive[number] = self._alive[number] - 1
        if not alive and number == self.in_backward and torch._C._current_graph_task_id() != -1:
            self.backward_below(number)

    def backward_below(self, number: int) -> None:
        """Backward of operator ``number`` has ended."""
        position = bisect_left(self._saving, number)
        self.backward_reaches(self._saving[position - 1] + 1 if position else 1)

    def backward_reaches(self, number: int) -> None:
        """Backward of operator ``number`` is about to start; start the copies back that are due by then.

        Numbers above `count` are operators of another pass that run before this frame's backward.
        """
        if number >= self._reached:
            return
        self._reached = number
        kept = self.native.kept
        if kept and kept[-1][0] > number:
            self.native.drop(above=number)
        if self._queue is None:
            self.queue_up()
        assert self._queue is not None
        start = self._cursor
        while self._cursor < len(self._queue) and self._queue[self._cursor][0] >= number:
            self._cursor += 1
        if self._cursor > start:
            self.mover.load([r for _, ref in self._queue[start : self._cursor] if (r := ref()) is not None])
        if self.ahead is not None and self.ahead is not self:
            self.ahead.backward_reaches(self.ahead.count + number)
        if self.late.nbytes:
            self.mover.release_late()

    def queue_up(self) -> None:
        """In which order to copy back what has left."""
        later = self.mover.staying.for_weights
        live = [
            (r.last_use + r.distance, r.last_use, r.number, -index, weakref.ref(r))
            for index, r in enumerate(self.those_moved())
            if r.state in (HOST, COPYING) and not (later and key_of(r) in later)
        ]
        live.sort(reverse=True)
        self._queue = [(one[0], one[4]) for one in live]

    def forward_reaches(self, total: int) -> None:
        """Forward of operator `count` out of ``total`` starts."""
        if self.ahead is not None and total >= self.count:
            self.ahead.backward_reaches(self.ahead.count + total - self.count + 1)

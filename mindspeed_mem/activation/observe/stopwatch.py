"""Where the time of a training call goes: seconds of each operator's own, forward and backward.

Time is cut where another operator begins to run. Forward, the engine's regions tell; backward, the first unpack of what
an operator saved says that its backward begins. An operator that saved nothing has no time in backward: it goes to the
one that ran before it. So does what an operator saves nothing for. Gradients of weights that are put off are a pass of
their own, whose operators are told one by one. While activations are copied because memory ran out, the time is no
operator's. The pieces of a pass add up to all of it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from mindspeed_mem.activation.observe.observed_ops import OUTSIDE, Node
from mindspeed_mem.activation.storage.records import Handle
from mindspeed_mem.passes import BACKWARD, FORWARD, WEIGHT

if TYPE_CHECKING:
    from mindspeed_mem.device import Backend

COPIES: Node = (-2, "")

_UNREAD = 4  # passes whose timestamps are kept before they are read: reading waits for the device


class PassTimes(NamedTuple):
    """One pass of one micro-batch through one model chunk, in seconds."""

    direction: str
    micro_batch: int | None
    chunk: int
    operators: dict[Node, float]
    """Of their own, in the order in which they first ran in this pass."""
    before: float
    """Outside, on the embedding's side of the layers."""
    after: float
    """Outside, on the loss's side of the layers."""
    copies: float
    total: float
    """From its first moment to its last."""


class Moments:
    """One pass: the moments at which something else began to run, and what."""

    def __init__(self, direction: str, key: tuple[int | None, int]):
        self.direction, self.key = direction, key
        self.moments: list[tuple[object, Node]] = []
        self.reached = 1 << 62  # backward: the place in the forward that backward has come down to


class Stopwatch:
    """Times one training call.

    Args:
        backend: takes the timestamps.
        num_layers: of the whole model.
        at_boundary: called at each moment with what has run since the last, and what runs now.
        reads: sum up times as passes go by; otherwise all moments stay in `unread`.
    """

    def __init__(
        self,
        backend: Backend,
        num_layers: int,
        at_boundary: Callable[[Node, Node], None] | None = None,
        reads: bool = True,
    ):
        self.passes: list[PassTimes] = []
        """Those that have ended, in order; all of them after `finish`."""
        self.unread: deque[Moments] = deque()
        """Those that have ended, and whose timestamps nobody has read."""
        self._backend, self._num_layers, self._at_boundary, self._reads = backend, num_layers, at_boundary, reads
        self._pass: Moments | None = None
        self._last: Moments | None = None
        self._saved: weakref.WeakKeyDictionary[Handle, tuple[tuple, int, Node]] = weakref.WeakKeyDictionary()
        self._copying = 0

    # ---- passes
    def begin(self, direction: str, key: tuple[int | None, int]) -> None:
        """A pass of ``key`` (micro-batch, chunk) begins; one that never ended is forgotten."""
        while self._reads and len(self.unread) > _UNREAD:
            self._read(self.unread.popleft())
        self._pass = Moments(direction, key)
        self._copying = 0
        self._moment(OUTSIDE)

    def end(self) -> None:
        if self._pass is not None:
            self._moment(OUTSIDE)
            self.unread.append(self._pass)
            self._last = self._pass
            self._pass = None

    def finish(self) -> None:
        """The call has ended: wait until all is known."""
        self._pass = None
        while self.unread:
            self._read(self.unread.popleft())

    # ---- what runs
    def switch(self, layer: int, op: str) -> None:
        """In forward, this operator runs from now on."""
        if self._pass is not None and self._pass.direction == FORWARD:
            self._moment((layer, op))

    def saved(self, kept: Handle) -> None:
        """What runs has saved a tensor for backward."""
        now = self._pass
        if now is not None and now.direction == FORWARD:
            self._saved[kept] = now.key, len(now.moments), now.moments[-1][1]

    def unpacks(self, kept: Handle) -> None:
        """Backward reads what was saved."""
        now = self._pass
        if now is None or now.direction != BACKWARD or self._copying:
            return
        key, place, node = self._saved.get(kept, (None, 0, OUTSIDE))
        if key == now.key and place < now.reached:
            now.reached = place
            if node != now.moments[-1][1]:
                self._moment(node)

    def makes_weights(self, node: Node) -> None:
        """In a pass that computes gradients of weights, those of this operator come now."""
        now = self._pass
        if now is not None and now.direction == WEIGHT and node != now.moments[-1][1]:
            self._moment(node)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Around what copies activations, or lets computation wait for copies."""
        now = self._pass
        if now is None or self._copying:
            yield
            return
        running = now.moments[-1][1]
        self._moment(COPIES)
        self._copying += 1
        try:
            yield
        finally:
            self._copying -= 1
            if self._pass is now:
                self._moment(running)

    @property
    def forward(self) -> tuple[int | None, int] | None:
        """Micro-batch and chunk of the forward that runs; None if none does."""
        now = self._pass
        return now.key if now is not None and now.direction == FORWARD else None

    @property
    def latest(self) -> tuple[int | None, int] | None:
        """Micro-batch and chunk of the pass that runs or has just ended; None before the first."""
        now = self._pass or self._last
        return None if now is None else now.key

    def saver(self, kept: Handle | None) -> Node:
        """The operator that saved this."""
        return OUTSIDE if kept is None else self._saved.get(kept, (None, 0, OUTSIDE))[2]

    def handles(self) -> Iterator[Handle]:
        """What the pass that runs has saved and backward still keeps."""
        key = self.forward
        return (handle for handle, (of, *_) in list(self._saved.items()) if of == key)

    # ---- figures
    def name(self, ran: Node) -> tuple[str, object] | None:
        """What has run in the pass that runs or has just ended: its direction, and the node or, outside of layers,
        the side ("before" or "after") with the model chunk. None before the first pass."""
        now = self._pass or self._last
        if now is None:
            return None
        if self.in_layers(ran):
            return now.direction, ran
        met = any(self.in_layers(node) for _, node in now.moments)
        return now.direction, ("after" if met == (now.direction == FORWARD) else "before", now.key[1])

    def _moment(self, node: Node) -> None:
        assert self._pass is not None
        moments = self._pass.moments
        if self._at_boundary is not None:
            self._at_boundary(moments[-1][1] if moments else OUTSIDE, node)
        moments.append((self._backend.timestamp(), node))

    def in_layers(self, node: Node) -> bool:
        return 0 <= node[0] < self._num_layers

    def _read(self, one: Moments) -> None:
        between, moments = self._backend.seconds_between, one.moments
        operators: defaultdict[Node, float] = defaultdict(float)
        inside = [place for place, (_, node) in enumerate(moments) if self.in_layers(node)]
        first, last = (inside[0], inside[-1]) if inside else (len(moments), len(moments))
        early = late = copies = 0.0
        layer = 0
        for place, ((begin, node), (end, _)) in enumerate(pairwise(moments)):
            seconds = between(begin, end)
            if node == COPIES:
                copies += seconds
            elif self.in_layers(node):
                layer = node[0]
                operators[node] += seconds
            elif place < first:
                early += seconds
            elif place > last:
                late += seconds
            else:  # from one layer to the next
                operators[layer, ""] += seconds
        if one.direction != FORWARD and inside:
            early, late = late, early
        total = between(moments[0][0], moments[-1][0])
        self.passes.append(PassTimes(one.direction, *one.key, dict(operators), early, late, copies, total))

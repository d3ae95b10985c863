"""Bytes that wait for gradients of weights from a split backward on, by the operator whose weights these are.

Each storage of a pass is counted once, where it was put off first. What a layer was given is counted by the census,
with what backward keeps; here only that of what runs outside the layers, which no census counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from mindspeed_mem.activation.observe.observed_ops import OUTSIDE, Node
from mindspeed_mem.activation.storage.records import Handle


class PutOff:
    """Of several passes, the most of any."""

    def __init__(self) -> None:
        self._most: dict[int, Counter[Node]] = {}  # by model chunk
        self.gradients: Counter[int] = Counter()
        """By model chunk: of what waits outside the layers, the most that output gradients have."""
        self._chunk = 0
        self._now: Counter[Node] = Counter()
        self._outside = 0  # output gradients
        self._seen: set[int] = set()  # addresses of what is held: nobody else has them meanwhile

    def begin(self, chunk: int) -> None:
        """The backward of a pass through a model chunk begins. What TransformerEngine's layers have put off in the one
        before was told after its end."""
        self._end()
        self._chunk = chunk

    def add(self, node: Node, read: Handle | None, holds: Sequence[torch.Tensor]) -> None:
        """An operator (`OUTSIDE`: none of a layer) has put one off.

        Args:
            node: the operator.
            read: the handle of what it was given; None: that is in ``holds``.
            holds: what waits beside that.
        """
        for tensor in holds:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self._now[node] += storage.nbytes()
                self._outside += storage.nbytes() * (node == OUTSIDE and read is not None)
        if node == OUTSIDE and read is not None:
            record = read.record
            self._now[node] += read.alias.untyped_storage().nbytes() if record is None else record.nbytes

    def most(self, chunk: int) -> Mapping[Node, int]:
        """The most bytes of each operator in a pass through this model chunk."""
        self._end()
        return self._most.get(chunk, {})

    def _end(self) -> None:
        most = self._most.setdefault(self._chunk, Counter())
        most |= self._now  # the larger of each
        self.gradients |= Counter({self._chunk: self._outside})
        self._now, self._outside, self._seen = Counter(), 0, set()

"""Bytes that backward keeps of what no layer made: embeddings and a layer stack's inputs; what head and loss save."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from mindspeed_mem.activation.storage import marks

if TYPE_CHECKING:
    from mindspeed_mem.activation.observe.stopwatch import Stopwatch
    from mindspeed_mem.activation.storage.records import Handle


class OutsideBytes:
    """Counts by storage, over several micro-batches; what these share (tables) is no micro-batch's."""

    def __init__(self) -> None:
        self.before: dict[int, int] = {}
        """The most of one micro-batch by model chunk: what was there before the first layer ran."""
        self.after: dict[int, int] = {}
        """The same of what was made after the last layer had begun: by the final norm, the head, the loss."""
        self._first: weakref.WeakKeyDictionary[torch.UntypedStorage, object] = weakref.WeakKeyDictionary()

    def count(self, stopwatch: Stopwatch, num_layers: int, keep: bool) -> None:
        """A forward ends. ``keep``: not in a call that only shows what micro-batches share."""
        here, key = object(), stopwatch.forward
        assert key is not None
        found: dict[int, tuple[int, bool]] = {}
        for handle in stopwatch.handles():
            one = self._outside(handle, key, num_layers, here)
            if one is not None:
                found[one[0]] = one[1:]
        if not keep:
            return
        chunk = key[1]
        for after, counts in ((False, self.before), (True, self.after)):
            mine = sum(nbytes for nbytes, behind in found.values() if behind == after)
            counts[chunk] = max(counts.get(chunk, 0), mine)

    def _outside(self, handle: Handle, key: tuple, num_layers: int, here: object) -> tuple[int, int, bool] | None:
        """A name for its storage, bytes, and whether it was made after layers; None if it is not to be counted."""
        record = handle.record
        if record is not None:
            if 0 <= record.layer < num_layers or record.micro_batch.key != key:
                return None
            return id(record), record.nbytes, record.number > 0
        if handle.micro_batch is None:
            return None  # a parameter, or no plain memory of this device
        storage = handle.alias.untyped_storage()
        if marks.is_static(storage) or marks.is_managed(storage):
            return None
        if self._first.setdefault(storage, here) is not here:
            return None
        return id(storage), storage.nbytes(), False

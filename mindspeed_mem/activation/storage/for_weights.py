"""Where a split backward puts gradients of weights off: what nothing but these needs is on the host until then.

What a layer was given stays there, if it was moved. Such a record was saved once, by the linear layer that reads it in
its backward. It is noted, so that from the next pass on no copy back is started for that backward. The gradient of its
output leaves when that backward has used it (`swap_config.output_gradients`).
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

from mindspeed_mem.activation.storage import marks
from mindspeed_mem.activation.storage.ledger import LEDGER
from mindspeed_mem.activation.storage.records import COPYING, HOST, KEPT, LOADED, Handle, Record, key_of
from mindspeed_mem.device import fast_tensors

if TYPE_CHECKING:
    from mindspeed_mem.activation.storage.micro_batch import MicroBatch
    from mindspeed_mem.activation.storage.mover import Mover

_GRADIENTS = "output gradients"
"""Who owns records of them: no operator of a layer."""


class OnHost:
    """What the gradient of a weight is made from, where the plan has moved it."""

    def __init__(self, mover: Mover, record: Record, kept: Handle):
        """``record`` is that of ``kept``, which autograd lets go of."""
        self._mover, self._record = mover, record
        self._handle = Handle(kept.alias, record)
        self._handle.layout = kept.layout
        record.handles.append(weakref.ref(self._handle))

    def fetch(self) -> None:
        """Start to bring it back."""
        self._mover.load((self._record,))

    def get(self) -> torch.Tensor:
        """Raises OverwrittenError where it was changed in place since it was saved."""
        self.fetch()
        if self._record.op == _GRADIENTS and self._record.state == LOADED:
            # Where nobody else holds a gradient any more, autograd may add the next one to it in place.
            self._handle.version = None
        return self._handle.bring_back()


class ReadsForWeights:
    """One reading of what a linear layer has saved, in this thread."""

    def __init__(self, mover: Mover):
        self._mover, self._thread = mover, threading.get_ident()
        self.later: OnHost | None = None
        """What stays where it is."""
        self._stood_in_for: Handle | None = None
        self.first: Handle | None = None
        """What was read first, which is what the layer was given."""

    def over(self) -> None:
        """All has been read: who reads again gets no stand-in."""
        kept = self._stood_in_for
        if kept is not None and kept.own is not None:
            kept.own = kept.own[:2]

    def brought(self, kept: Handle) -> torch.Tensor:
        """What ``kept`` is a handle of, or a stand-in for it."""
        self.first = self.first or kept
        record = kept.record
        if record is None or record.way_back is not self._mover or threading.get_ident() != self._thread:
            return kept.bring_back()
        if record.state not in (HOST, COPYING, LOADED) or len(record.handles) > 1:
            return kept.bring_back()
        self._mover.staying.for_weights.add(key_of(record))
        if record.state == LOADED:
            return kept.bring_back()
        kept.check_version()
        alias = kept.alias
        size = alias.size() if kept.layout is None else kept.layout[1]
        self.later, self._stood_in_for = OnHost(self._mover, record, kept), kept
        return alias.new_empty(()).expand(size)


def to_host(mover: Mover, micro_batch: MicroBatch, gradient: torch.Tensor) -> OnHost | None:
    """Move the gradient of a layer's output, which its backward has used, to the host; None where it stays."""
    if not fast_tensors.is_plain(gradient, mover.backend.tensor_type):
        return None
    storage = gradient.untyped_storage()
    found = marks.of(storage)
    record: Record | None = None if found.record is None else found.record()
    if record is None:
        if found.stays or found.static or not storage.nbytes():
            return None
        record = Record(mover, micro_batch, (-1, _GRADIENTS, 0), storage, LEDGER.enter(storage, False, found), gradient)
        if mover.staying.is_small(record):
            return None
        found.record = weakref.ref(record)
    elif record.way_back is not mover or record.op != _GRADIENTS or not record.holds(gradient):
        return None
    kept = Handle(gradient, record)
    if record.state == HOST:
        kept.let_go()
    there = OnHost(mover, record, kept)
    mover.saves(record, gradient, first=record.state == KEPT)
    if record.state == KEPT:
        mover.copy_out((record,))
        mover.release_when_copied(record)
        mover.release_late()
    if record.state == KEPT:  # the host has no room
        return None
    mover.staying.largest_gradient = max(mover.staying.largest_gradient, record.nbytes)
    return there

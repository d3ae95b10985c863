"""Where a split backward puts gradients of weights off: what nothing but these needs stays on the host until then.

Such a record was saved once, by the linear layer that reads it in its backward. It is noted, so that from the next pass
on no copy back is started for that backward.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

from mindspeed_mem.activation.storage.records import COPYING, HOST, LOADED, Handle, key_of

if TYPE_CHECKING:
    from mindspeed_mem.activation.storage.mover import Mover
    from mindspeed_mem.activation.storage.records import Record


class OnHost:
    """What a linear layer was given, where the plan has moved it."""

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
        return self._handle.bring_back()


class ReadsForWeights:
    """One reading of what a linear layer has saved, in this thread."""

    def __init__(self, mover: Mover):
        self._mover, self._thread = mover, threading.get_ident()
        self.later: OnHost | None = None
        """What stays where it is."""
        self.first: Handle | None = None
        """What was read first, which is what the layer was given."""

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
        self.later = OnHost(self._mover, record, kept)
        return alias.new_empty(()).expand(size)

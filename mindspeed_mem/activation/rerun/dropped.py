"""What a recomputed operator makes for backward alone: known from its earlier runs, so that little is kept of it.

A storage that others hold, return or save besides needs a `Record`. Most are seen by nobody but the operator's own
backward: of each there is a `Made`, and of each tensor saved of it a `Slot`, which autograd keeps.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mindspeed_mem.activation.storage import marks
from mindspeed_mem.activation.storage.ledger import LEDGER
from mindspeed_mem.activation.storage.micro_batch import MicroBatch
from mindspeed_mem.activation.storage.records import DROPPED, REMADE, Layout, OverwrittenError, layout_of, view_of

if TYPE_CHECKING:
    from mindspeed_mem.activation.rerun.module_rerun import ModuleRerun
    from mindspeed_mem.device.base import Stream


class Program(NamedTuple):
    """What a run of an operator saves."""

    saves: tuple[int, ...]
    """By number of the saved tensor, that of the first one of the same storage; -1: others may need it, too."""
    entries: dict[int, list[tuple[int, int]]]
    """Operators inside, by their number, that take what is saved later: as which argument, and its first number."""


class Made:
    """One such storage."""

    __slots__ = (
        "rerun",
        "micro_batch",
        "layout",
        "nbytes",
        "state",
        "storage",
        "tensor",
        "version",
        "stream",
        "others",
        "attributes",
        "__weakref__",
    )

    def __init__(
        self,
        rerun: ModuleRerun,
        micro_batch: MicroBatch,
        storage: torch.UntypedStorage,
        layout: Layout,
        found: marks.Marks,
    ):
        """Of ``storage``, with marks ``found``, which is saved for the first time."""
        self.rerun, self.micro_batch, self.layout = rerun, micro_batch, layout
        token = LEDGER.enter(storage, owned=True)
        token.moved = True
        self.nbytes, self.state = token.nbytes, DROPPED
        self.storage = weakref.ref(storage)
        self.tensor: torch.Tensor | None = None
        self.version = 0
        self.stream: Stream = rerun.stream
        self.others: tuple[Stream, ...] = ()
        self.attributes = marks.set_by_others(storage)

    @property
    def buffer(self) -> torch.Tensor | None:
        """As `Record.buffer`."""
        return self.tensor

    def fill(self, tensor: torch.Tensor) -> None:
        """It has been made again, in the storage of ``tensor``."""
        storage = tensor.untyped_storage()
        self.version = tensor._version
        self.tensor = tensor.detach() if layout_of(tensor) == self.layout else view_of(storage, *self.layout)
        if self.tensor._version != self.version:
            self.version = self.tensor._version
        self.state = REMADE
        LEDGER.enter_copy(storage, owned=True)
        if self.attributes:
            storage.__dict__.update(self.attributes)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            LEDGER.forget_moved(self.nbytes)


class Saver:
    """What one operator saves in slots: it tells when the last of it is gone."""

    __slots__ = ("micro_batch", "number")

    def __init__(self, micro_batch: MicroBatch, number: int):
        self.micro_batch, self.number = micro_batch, number
        micro_batch.saved_by(number)

    def __del__(self) -> None:
        self.micro_batch.dropped(self.number)


class Slot:
    """One saved tensor: what autograd keeps instead of it."""

    __slots__ = ("made", "alias", "own", "layout", "saver")  # in this order they go: memory first

    def __init__(self, made: Made, layout: Layout | None, saver: Saver):
        self.made, self.saver = made, saver
        self.layout = layout  # None: as the first of its storage
        self.alias: torch.Tensor | None = None
        self.own: tuple[type | None, dict[str, Any]] | None = None  # what a custom function may look for on it

    def bring_back(self) -> torch.Tensor:
        """The saved tensor. Raises OverwrittenError if it has been modified in place since it was made again."""
        made = self.made
        if made.state == DROPPED:
            made.rerun.run_again()
        rerun, tensor = made.rerun, made.tensor
        assert tensor is not None
        if tensor._version != made.version:
            raise OverwrittenError(f"the output of {rerun} was overwritten after it had been recomputed")
        rerun.mover.await_second_run(made)
        if self.layout is not None:
            tensor = view_of(tensor.untyped_storage(), *self.layout)
        self.alias = tensor if self.own is not None else None
        return tensor

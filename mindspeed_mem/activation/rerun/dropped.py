"""What a recomputed operator makes for backward alone: known from its earlier runs, so that little is kept of it.

A storage that others hold, return or save besides needs a `Record`. Most are seen by nobody but the operator's own
backward: of each there is a `Made`, and of each tensor saved of it a `Slot`, which autograd keeps.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mindspeed_mem.activation.rerun.arguments import tensors_in
from mindspeed_mem.activation.rerun.second_run import Rerun
from mindspeed_mem.activation.storage import marks, own_tensors
from mindspeed_mem.activation.storage.ledger import LEDGER
from mindspeed_mem.activation.storage.micro_batch import MicroBatch
from mindspeed_mem.activation.storage.records import (
    DROPPED,
    REMADE,
    Layout,
    OverwrittenError,
    Own,
    Record,
    base_of,
    layout_of,
)
from mindspeed_mem.device import fast_tensors

if TYPE_CHECKING:
    from mindspeed_mem.device.base import Stream


NOTHING = torch.empty(0, device="cpu")
_finalizing = sys.is_finalizing


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
        "storage",
        "state",
        "tensor",
        "version",
        "base",
        "stream",
        "others",
        "attributes",
        "__weakref__",
    )

    def __init__(
        self,
        rerun: Rerun,
        micro_batch: MicroBatch,
        storage: torch.UntypedStorage,
        tensor: torch.Tensor,
        layout: Layout,
        found: marks.Marks,
    ):
        """Of ``storage``, with marks ``found``, of which ``tensor`` is saved first."""
        self.rerun, self.micro_batch, self.layout = rerun, micro_batch, layout
        self.nbytes = nbytes = storage.nbytes()
        # while it happens to be there
        found.token = token = LEDGER.token(LEDGER, nbytes, True, False, rerun.owner)
        token.moved = True
        self.storage = weakref.ref(storage)
        self.state = DROPPED
        self.tensor: torch.Tensor | None = None
        self.version = tensor._version
        self.base = weakref.ref(base_of(tensor)) if tensor._version else None
        self.stream: Stream = rerun.stream
        self.others: tuple[Stream, ...] = ()
        self.attributes = marks.set_by_others(storage) if len(storage.__dict__) > 1 else None

    def holds(self, tensor: torch.Tensor) -> bool:
        """As `Record.holds`, until it is made again."""
        version = tensor._version
        return version == self.version and (self.base is None or self.base() is base_of(tensor))

    @property
    def buffer(self) -> torch.Tensor | None:
        """As `Record.buffer`."""
        return self.tensor

    def fill(self, tensor: torch.Tensor, storage: torch.UntypedStorage, layout: Layout) -> None:
        """It has been made again, in the storage of ``tensor``, which lies there as ``layout`` says."""
        self.tensor = again = tensor.detach() if layout == self.layout else fast_tensors.view_of(storage, *self.layout)
        self.version, self.state = again._version, REMADE
        attributes = storage.__dict__
        found = attributes.get(marks.NAME)
        if found is None:
            found = attributes[marks.NAME] = marks.Marks()
        found.token = LEDGER.token(LEDGER, self.nbytes, True, True, self.rerun.owner)
        if self.attributes:
            attributes.update(self.attributes)

    def __del__(self) -> None:
        if not _finalizing():
            LEDGER.without.now -= self.nbytes


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

    own: Own | None

    def __init__(self, made: Made, layout: Layout | None, saver: Saver):
        self.made, self.saver = made, saver
        self.layout = layout  # None: as the first of its storage
        self.alias, self.own = NOTHING, None

    def bring_back(self) -> torch.Tensor:
        """The saved tensor. Raises OverwrittenError if it has been modified in place since it was made again."""
        made = self.made
        if made.state == DROPPED:
            made.rerun.run_again()
        rerun, tensor = made.rerun, made.tensor
        assert tensor is not None
        if tensor._version != made.version:
            raise OverwrittenError(f"the output of {rerun} was overwritten after it had been recomputed")
        if rerun.mover.several:
            rerun.mover.await_second_run(made)
        if self.layout is not None:
            tensor = fast_tensors.view_of(tensor.untyped_storage(), *self.layout)
        if self.own is not None:
            self.alias = tensor
        return tensor


class Saves:
    """What one run of an operator saves, in order."""

    __slots__ = (
        "program",
        "slots",
        "entered",
        "entries",
        "again",
        "_made",
        "_saver",
        "_nbytes",
        "_taken",
        "_seen",
        "_firsts",
    )

    def __init__(self) -> None:
        self.program: Program | None = None
        """What is expected, where that is known."""
        self.slots: list[tuple[weakref.ref[Record] | weakref.ref[Made], Layout] | None] = []
        """By number of the saved tensor; None for what the operator has not made, or saves once more."""
        self.again = 0
        """How many tensors the second run has saved."""
        self.entered: list[str] = []
        """Operators inside, in order."""
        self.entries: dict[int, list[tuple[int, int]]] = {}
        """As `Program.entries`."""
        self._made: dict[int, Made] = {}  # while it runs, by the number of the first saved tensor
        self._saver: Saver | None = None
        self._nbytes = 0
        self._taken: dict[int, _Entry] = {}  # by the number of what is expected to be saved later
        self._seen: list[int] = []  # as `Program.saves`
        self._firsts: dict[int, int] = {}  # records by their ids, to the number of what was saved first

    def enters(self, rerun: Rerun, path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """An operator inside is about to run on these arguments."""
        number, program = len(self.entered), self.program
        self.entered.append(path)
        if program is None:
            for position, tensor in enumerate(tensors_in((args, kwargs))):
                plain = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_inference())
                if plain and type(tensor) is torch.Tensor:
                    found = marks.of(tensor.untyped_storage())
                    known: _Entry | None = found.entry
                    if known is None or known.of() is not rerun or not known.took(tensor):
                        base = weakref.ref(base_of(tensor)) if tensor._version else None
                        found.entry = _Entry(weakref.ref(rerun), number, position, tensor._version, base)
        elif number in program.entries:
            tensors = tensors_in((args, kwargs))
            for position, first in program.entries[number]:
                if position >= len(tensors):
                    continue
                tensor = tensors[position]
                if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_inference():
                    continue
                ref, version = weakref.ref(tensor.untyped_storage()), tensor._version
                base = weakref.ref(base_of(tensor)) if version else None
                self._taken[first] = _Entry(ref, number, position, version, base)

    def adds(self, rerun: Rerun, record: Record | None, tensor: torch.Tensor) -> None:
        """One more is saved, of the storage of ``record``, which the operator has made; None: it has not."""
        number = len(self.slots)
        self._seen.append(-1 if record is None else self._firsts.setdefault(id(record), number))
        if record is None or record.handles:
            self.slots.append(None)
            return
        storage = tensor.untyped_storage()
        self.slots.append((weakref.ref(record), layout_of(tensor)))
        self._was_taken(number, storage, tensor)
        entry: _Entry | None = marks.of(storage).entry
        if self.program is None and entry is not None and entry.of() is rerun and entry.took(tensor):
            self.entries.setdefault(entry.number, []).append((entry.position, number))

    def drops(self, rerun: Rerun, tensor: torch.Tensor, micro_batch: MicroBatch, by_function: bool) -> Slot | None:
        """What autograd keeps of the next one, if it is as expected and nobody else needs it."""
        program, slots, mover = self.program, self.slots, rerun.mover
        number = len(slots)
        if program is None or number >= len(program.saves) or type(tensor) is not torch.Tensor:
            return None
        if tensor.layout is not torch.strided or tensor.is_nested or (by_function and own_tensors.stays_itself(tensor)):
            return None
        first, backend = program.saves[number], mover.backend
        if first < 0 or mover.several or not (backend.one_stream or backend.stream_key() == micro_batch.home_key):
            return None
        storage = tensor.untyped_storage()
        layout = tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
        made = self._made.get(first) if first != number else None
        if made is not None:
            same = layout == made.layout or fast_tensors.is_plain(tensor, storage.device.type)
            if made.storage() is not storage or not made.holds(tensor) or not same:
                return None
            slots.append(None)
        else:
            attributes = storage.__dict__
            found = attributes.get(marks.NAME)
            if found is None:
                found = attributes[marks.NAME] = marks.Marks()
            elif found.token is not None or found.stays or found.static or found.made_by is not None:
                return None
            if first != number:
                return None
            made = self._made[first] = Made(rerun, micro_batch, storage, tensor, layout, found)
            self._nbytes += made.nbytes
            slots.append((weakref.ref(made), layout))
            if number in self._taken:
                self._was_taken(number, storage, tensor)
        saver = self._saver
        if saver is None or saver.number != micro_batch.count:
            saver = self._saver = Saver(micro_batch, micro_batch.count)
            if rerun.moves_inputs:
                rerun.used_at(micro_batch.count)
        return Slot(made, None if layout == made.layout else layout, saver)

    def _was_taken(self, number: int, storage: torch.UntypedStorage, tensor: torch.Tensor) -> None:
        """A storage is saved for the first time: an operator inside may have taken it before, as was expected."""
        taken = self._taken.get(number)
        if taken is not None and taken.of() is storage and taken.took(tensor):
            self.entries.setdefault(taken.number, []).append((taken.position, number))

    def ends(self) -> int:
        """The operator has run; returns the bytes that slots are of."""
        self._made, self._saver, self._taken = {}, None, {}
        return self._nbytes

    def learn(self) -> Program:
        """What it has saved, once it has returned: others may hold what is still there."""
        alive = {
            number
            for number, slot in enumerate(self.slots)
            if slot is not None and (record := slot[0]()) is not None and record.storage() is not None
        }
        return Program(tuple([-1 if first in alive else first for first in self._seen]), self.entries)


class _Entry(NamedTuple):
    """Operator ``number`` inside took it as one of its arguments: among a storage's marks, by which run; or of which
    storage."""

    of: weakref.ref
    number: int
    position: int
    version: int
    base: weakref.ref | None

    def took(self, tensor: torch.Tensor) -> bool:
        """Whether it took what ``tensor``, of the same storage, holds now: see `Record.holds`."""
        return tensor._version == self.version and (self.base is None or self.base() is base_of(tensor))

"""What an operator that runs again in backward is, whatever way it runs: `ModuleRerun` or `Tape`."""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from mindspeed_mem.activation.storage.ledger import LEDGER
from mindspeed_mem.activation.storage.mover import Mover
from mindspeed_mem.activation.storage.records import (
    DROPPED,
    KEPT,
    Handle,
    OverwrittenError,
    Owner,
    Record,
    Remade,
    base_of,
)

GUARDS: list[Callable[[], AbstractContextManager]] = []
"""What a second run must not disturb: each is entered around it."""
READERS: list[Callable[[list[torch.nn.Module], list[torch.Tensor]], AbstractContextManager]] = []
"""Who frees weights between their uses. Each is entered around a second run with the modules whose `forward` runs
without their hooks, and with the tensors that are read besides, weights among them."""


@contextlib.contextmanager
def no_shared_casts() -> Iterator[None]:
    """Autocast casts anew what it casts again. It keeps casts of leaves, as weights are, and in a second run its inputs
    are leaves, too. Where autocast is off the cache stays on: code that dynamo has compiled is for one state of it.
    """
    keeps = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(keeps)


class Rerun(abc.ABC):
    """One run of an operator of a layer, which brings back what it made by running again."""

    __slots__ = ("layer", "op", "owner", "number", "mover", "stream", "why_not", "moves_inputs", "__weakref__")

    def __init__(self, layer: int, op: str, number: int, mover: Mover):
        self.layer, self.op, self.number = layer, op, number
        self.owner = layer, op
        self.mover = mover  # with the streams that operators run on
        self.stream = mover.backend.current_stream()  # that it runs on, and will again
        self.moves_inputs = True
        """An input may have to come back before it runs again."""
        self.why_not = ""
        """Why it cannot run again; empty if it can, or if nobody knows."""

    @abc.abstractmethod
    def made(self, storage: torch.UntypedStorage, owner: Owner) -> bool:
        """Whether a storage that ``owner`` produced was produced in here."""

    @abc.abstractmethod
    def makes(self, slot: int, record: Record) -> None:
        """``record`` is of the storage that it makes as ``slot``."""

    @abc.abstractmethod
    def stays(self, slot: int) -> None:
        """The storage that it makes as ``slot`` stays where it is."""

    @abc.abstractmethod
    def held(self) -> list[Handle]:
        """Its inputs, as long as it may have to run again."""

    @abc.abstractmethod
    def records(self) -> Sequence[Remade]:
        """What is to be made again and still wanted."""

    @abc.abstractmethod
    def can_run(self) -> bool:
        """Whether it still has what it runs from."""

    @abc.abstractmethod
    def remake(self) -> None:
        """Run again and fill every record that is still wanted."""

    # ---- records that it brings back
    def take(self, record: Record) -> None:
        """It makes ``record`` again: the device memory is left to whoever else holds it."""
        record.leave(DROPPED, self)
        self.mover.dropped[self.layer, self.op] += record.nbytes

    def take_if_kept(self, record: Record) -> None:
        """The same, of a record that may have left already."""
        if record.state != KEPT:
            self.mover.keep(record)  # a copy under way is given up
        if record.state == KEPT:
            self.take(record)
            if self.moves_inputs:
                self.used_at(record.last_use)

    def keep(self, record: Record) -> None:
        """It need not make ``record`` again: somebody holds its memory."""
        if record.state == DROPPED:
            self.mover.dropped[self.layer, self.op] -= record.nbytes
            record.stay(self.mover)

    def fill(self, record: Record, tensor: torch.Tensor) -> None:
        """It has made ``record`` again, in the storage of ``tensor``."""
        record.fill(tensor)
        self.mover.saves(record, tensor, first=True)

    fill_slowly = fill  # where the other is in C++

    def run_again(self) -> None:
        """Run again where it ran before."""
        with self.mover.on(self.stream), self.mover.timing.second_run(self.layer, self.op):
            self.remake()
        self.mover.second_runs[self.layer, self.op] += 1

    run_again_slowly = run_again  # where the other is in C++

    def bring_back(self, record: Record) -> None:
        """Run again, unless that has happened. Raises OverwrittenError if the result was written to since."""
        if record.state == DROPPED:
            self.run_again()
            if record.way_back is not self:  # memory ran out later in the second run, and it had to leave
                record.way_back.bring_back(record)
                return
        elif record.buffer is not None and record.buffer._version != record.version:
            raise OverwrittenError(f"the output of {self} was overwritten after it had been recomputed")
        self.mover.await_second_run(record)

    def used_at(self, number: int) -> None:
        """Backward of operator ``number`` will need something of this: the inputs must be there by then."""
        for handle in self.held():
            if handle.record is not None:
                handle.record.used_at(number)

    def forget(self, record: Record) -> None:
        """Backward has what it needed of ``record``."""
        LEDGER.forget_moved(record.nbytes)


class MadeBy:
    """Among the marks of a storage: what can make it again, should anybody save it."""

    __slots__ = ("rerun", "slot", "_version", "_base")

    def __init__(self, rerun: Rerun, slot: int, tensor: torch.Tensor | None = None):
        self.rerun, self.slot = rerun, slot
        self._version = 0 if tensor is None else tensor._version  # None: as new, never written to again
        self._base = None if tensor is None else weakref.ref(base_of(tensor))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it makes what ``tensor``, of this storage, holds now: see `Record.holds`."""
        version = tensor._version
        if version != self._version or not self.rerun.can_run():
            return False
        return version == 0 or (self._base is not None and self._base() is base_of(tensor))

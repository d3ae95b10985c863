"""The ledger: device bytes of activations that backward keeps, counted by storage, exactly as long as they live.

A token among the marks of a storage (marks.py) dies with the device memory: views, aliases and reused addresses need no
bookkeeping.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from mindspeed_mem.activation.storage import marks

Owner = tuple[int, str]
"""Layer and operator that made an activation."""
NOBODY: Owner = (-1, "")


class Log(Protocol):
    """Whoever writes down what enters and leaves a ledger."""

    def entered(self, nbytes: int, owner: Owner, back: bool) -> int:
        """It takes memory from now on; ``back``: once more. Returns the number that it leaves by."""

    def left(self, number: int) -> None:
        """Its memory is free. On any thread."""


class Counter:
    """Bytes now, and at most since the last `reset_peak`; `highest` looks back over all of them."""

    __slots__ = ("now", "peak", "_earlier")

    def __init__(self) -> None:
        self.now = self.peak = self._earlier = 0

    @property
    def highest(self) -> int:
        return max(self.peak, self._earlier)

    def add(self, nbytes: int) -> None:
        self.now += nbytes
        if self.now > self.peak:
            self.peak = self.now

    def reset_peak(self) -> None:
        self._earlier, self.peak = self.highest, self.now

    def forget(self) -> None:
        """Start again from now."""
        self._earlier, self.peak = 0, self.now


class Ledger:
    """Activation bytes of this process.

    `held`: on the device, all of them. `owned`: those that an operator of a layer produced on this rank (the rest are a
    layer's inputs from outside: embeddings, masks, what a pipeline stage received). `without`: what would be held if
    nothing had been moved to the host.
    """

    def __init__(self) -> None:
        self.held, self.owned, self.without = Counter(), Counter(), Counter()
        self.token: type[Token] = Token
        """What is put on storages; see `logged`."""

    def reset_peak(self) -> None:
        for counter in (self.held, self.owned, self.without):
            counter.reset_peak()

    def forget(self) -> None:
        for counter in (self.held, self.owned, self.without):
            counter.forget()

    def enter(
        self, storage: torch.UntypedStorage, owned: bool, found: marks.Marks | None = None, owner: Owner = NOBODY
    ) -> Token:
        """Count ``storage`` from now on until it dies; once per storage. ``found``: its marks."""
        if found is None:
            found = marks.of(storage)
        token: Token | None = found.token
        if token is None:
            token = found.token = self.token(self, storage.nbytes(), owned, False, owner)
        elif token.moved:  # it outlived the graph that had moved it, and is saved again
            token.moved = False
            self.without.add(token.nbytes)
        return token

    def enter_copy(self, storage: torch.UntypedStorage, owned: bool, owner: Owner = NOBODY) -> None:
        """Count a device buffer that an activation was copied back into; `without` has counted it already."""
        attributes = storage.__dict__
        found = attributes.get(marks.NAME)
        if found is None:
            found = attributes[marks.NAME] = marks.Marks()
        found.token = self.token(self, storage.nbytes(), owned, True, owner)

    def forget_moved(self, nbytes: int) -> None:
        """Backward no longer needs an activation that had been moved to the host."""
        self.without.now -= nbytes


class Token:
    """Lives on a storage; its death is the storage's death."""

    __slots__ = ("ledger", "nbytes", "owned", "moved", "entry")

    def __init__(self, ledger: Ledger, nbytes: int, owned: bool, moved: bool = False, owner: Owner = NOBODY):
        self.ledger, self.nbytes, self.owned, self.moved = ledger, nbytes, owned, moved
        self.entry: Any = None  # who saves the storage, while that is watched
        held = ledger.held  # as `Counter.add`, three times
        held.now = now = held.now + nbytes
        if now > held.peak:
            held.peak = now
        if owned:
            mine = ledger.owned
            mine.now = now = mine.now + nbytes
            if now > mine.peak:
                mine.peak = now
        if not moved:
            without = ledger.without
            without.now = now = without.now + nbytes
            if now > without.peak:
                without.peak = now

    def leave(self) -> None:
        """The memory is free."""
        ledger = self.ledger
        ledger.held.now -= self.nbytes
        if self.owned:
            ledger.owned.now -= self.nbytes
        if not self.moved:
            ledger.without.now -= self.nbytes

    __del__ = leave


def logged(log: Log) -> type[Token]:
    """Tokens that tell ``log`` of themselves, for `Ledger.token`: nobody else pays for that."""

    class Logged(Token):
        __slots__ = ("number",)

        def __init__(self, ledger: Ledger, nbytes: int, owned: bool, moved: bool = False, owner: Owner = NOBODY):
            super().__init__(ledger, nbytes, owned, moved)
            self.number = log.entered(nbytes, owner, moved)

        def __del__(self) -> None:
            super().__del__()
            log.left(self.number)

    return Logged


class Unseen:
    """Bytes that the operators of one forward keep and nobody has looked at, by the operators' numbers: counted until
    they are dropped, or nobody holds this."""

    __slots__ = ("_ledger", "kept")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.kept: list[tuple[int, tuple[int, int]]] = []

    def __bool__(self) -> bool:
        return bool(self.kept)

    def add(self, number: int, kept: tuple[int, int]) -> None:
        """Operator ``number`` keeps so many bytes that operators of a layer made, and so many others."""
        self.kept.append((number, kept))
        ledger, nbytes = self._ledger, kept[0] + kept[1]
        for counter, more in ((ledger.without, nbytes), (ledger.held, nbytes), (ledger.owned, kept[0])):
            counter.now = now = counter.now + more
            if now > counter.peak:
                counter.peak = now

    def drop(self, above: int = -1) -> None:
        """What operators with higher numbers kept is gone."""
        kept, ledger = self.kept, self._ledger
        while kept and kept[-1][0] > above:
            owned, others = kept.pop()[1]
            ledger.owned.now -= owned
            ledger.held.now -= owned + others
            ledger.without.now -= owned + others

    def __del__(self) -> None:
        self.drop()


LEDGER = Ledger()

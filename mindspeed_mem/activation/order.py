"""Which pass runs next on this rank: recorded in one schedule call, replayed in the next of the same shape."""

from __future__ import annotations

from mindspeed_mem.plan.passes import BACKWARD, FORWARD, Pass

__all__ = ["BACKWARD", "FORWARD", "Pass", "RecordedOrder"]


class RecordedOrder:
    """The order of passes of a schedule call, keyed by what determines it (number of micro-batches, training or not).

    The first call of a kind predicts nothing; a call that departs from the recorded order predicts nothing from there
    on and is recorded anew.
    """

    def __init__(self) -> None:
        self._known: dict[tuple, list[Pass]] = {}
        self._key: tuple | None = None
        self._passes: list[Pass] = []
        self._trusted = False

    def begin(self, key: tuple) -> None:
        self._key, self._passes = key, []
        self._trusted = key in self._known

    def advance(self, now: Pass) -> Pass | None:
        """Note that this pass begins; return the next one if it is known."""
        if self._key is None:
            return None
        index = len(self._passes)
        self._passes.append(now)
        known = self._known.get(self._key, [])
        self._trusted = self._trusted and index < len(known) and known[index] == now
        return known[index + 1] if self._trusted and index + 1 < len(known) else None

    def end(self, completed: bool) -> None:
        if completed and self._key is not None:
            self._known[self._key] = self._passes
        self._key, self._passes = None, []

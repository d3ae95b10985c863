"""Which pass runs next on this rank: what the schedule's order says, or what was recorded in an earlier call."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_mem.passes import Pass


class RecordedOrder:
    """The order of passes of a schedule call, keyed by what determines it (number of micro-batches, training or not).

    A call that departs from the order known for its key predicts nothing from there on and is recorded anew; without
    an order from elsewhere the first call of a kind predicts nothing.
    """

    def __init__(self) -> None:
        self._known: dict[tuple, Sequence[Pass]] = {}
        self._key: tuple | None = None
        self._expected: Sequence[Pass] | None = None
        self._passes: list[Pass] = []
        self._trusted = False

    def begin(self, key: tuple, expected: Sequence[Pass] | None = None) -> None:
        """A call begins; ``expected`` is the order it should have, if somebody knows it."""
        self._key, self._passes, self._expected = key, [], expected
        if expected is not None:
            self._known.setdefault(key, expected)
        self._trusted = key in self._known

    def advance(self, now: Pass) -> Pass | None:
        """Note that this pass begins; return the next one if it is known."""
        if self._key is None:
            return None
        index = len(self._passes)
        self._passes.append(now)
        known = self._known.get(self._key, ())
        self._trusted = self._trusted and index < len(known) and known[index] == now
        return known[index + 1] if self._trusted and index + 1 < len(known) else None

    def ahead(self) -> dict[Pass, int]:
        """The passes to come, with how many come before each; empty where the order is not known."""
        if self._key is None or not self._trusted:
            return {}
        return {coming: index for index, coming in enumerate(self._known[self._key][len(self._passes) :])}

    def end(self, completed: bool) -> str:
        """The call is over. Returns how it departed from the expected order, or "" if it did not."""
        departed = ""
        if completed and self._key is not None:
            self._known[self._key] = self._passes
            if self._expected is not None:
                departed = _departure(self._passes, self._expected)
        self._key, self._passes, self._expected = None, [], None
        return departed


def _departure(passes: Sequence[Pass], expected: Sequence[Pass]) -> str:
    for index, (one, other) in enumerate(zip(passes, expected, strict=False)):
        if one != other:
            return f"pass {index} was {_name(one)} instead of {_name(other)}"
    return "" if len(passes) == len(expected) else f"it had {len(passes)} passes instead of {len(expected)}"


def _name(work: Pass) -> str:
    direction, micro_batch, chunk = work
    return f"the {direction} of micro-batch {micro_batch} on chunk {chunk}"

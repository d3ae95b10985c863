"""How much of the copying of a step is hidden, and where: behind the passes that run, or while the stage idles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

Interval = tuple[float, float]
"""Begin and end."""


class Hidden(NamedTuple):
    """Time of copies, in the unit of the intervals; copies that run at once in both directions count twice."""

    compute: float = 0.0
    """While a pass computes."""
    idle: float = 0.0
    """Between the passes of the step: the stage waits for another one, or has nothing to run."""
    stall: float = 0.0
    """While compute stands still for copies."""

    @property
    def total(self) -> float:
        return sum(self)

    def words(self) -> str:
        """Its shares; "" where nothing was copied."""
        if not self.total:
            return ""
        compute, idle, stall = (100 * part / self.total for part in self)
        return f"{compute:.0f} % of copying behind compute, {idle:.0f} % in idle time, {stall:.0f} % in stalls"


def hidden(
    copies: Iterable[Interval], passes: Iterable[Interval], stalls: Iterable[Interval], blocking: bool = False
) -> Hidden:
    """Where copies ran, by what else ran then. ``blocking``: a copy in a pass is a stall by itself."""
    running, waiting, found = _joined(passes), _joined(stalls), Hidden()
    for copy in copies:
        stalled = _within(copy, waiting)
        inside = _within(copy, _joined([*running, *waiting])) - stalled
        found = Hidden(
            found.compute + (0.0 if blocking else inside),
            found.idle + copy[1] - copy[0] - inside - stalled,
            found.stall + stalled + (inside if blocking else 0.0),
        )
    return found


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """In order, those that overlap made one."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _within(one: Interval, joined: Sequence[Interval]) -> float:
    return sum(max(0.0, min(one[1], end) - max(one[0], begin)) for begin, end in joined)

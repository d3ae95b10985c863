"""The order in which a stage runs its passes, and what follows from it alone, whatever is planned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import le
from typing import NamedTuple

from mindspeed_mem.passes import BACKWARD, FORWARD, WEIGHT, Pass
from mindspeed_mem.schedule import Placement
from mindspeed_mem.schedule.simulation import before

Held = tuple[tuple[int, ...], tuple[int, ...]]
"""By part, how many passes are between forward and backward, and how many wait for gradients of weights."""


class Kind(NamedTuple):
    """Passes in which the same happens under any plan, as long as no copies start in idle time."""

    direction: str
    part: int
    ahead: int | None
    """The part whose backward follows and lets its first copies back start here."""
    begun: bool
    """For the next backward, its own first copies back have started in the pass before."""


class Order:
    """The passes of a stage in the order they run."""

    def __init__(self, passes: Sequence[Pass], parts: int):
        self.passes = list(passes)
        self.coming = _coming(self.passes)
        """For each pass the one after it, if that is the backward of another pass: its first copies back start here.
        Gradients of weights are no such pass: no copy starts in them."""
        self._parts = parts
        kinds: dict[Kind, int] = {}
        begun = False
        self.places: list[int] = []
        """Of the kind of each pass in `kinds`."""
        for (direction, _, part), following in zip(self.passes, self.coming, strict=True):
            if direction == WEIGHT:
                kind = Kind(WEIGHT, part, None, False)
            else:
                kind = Kind(direction, part, None if following is None else following[2], begun)
                begun = following is not None
            self.places.append(kinds.setdefault(kind, len(kinds)))
        self.kinds = list(kinds)

    @cached_property
    def held(self) -> list[Held]:
        """How many passes of each of its parts are held at once: every maximum there is."""
        parts = self._parts
        held, waiting, seen = [0] * parts, [0] * parts, set()
        apart = any(direction == WEIGHT for direction, *_ in self.passes)
        for direction, _, part in self.passes:
            held[part] += (direction == FORWARD) - (direction == BACKWARD)
            waiting[part] += apart * (direction == BACKWARD) - (direction == WEIGHT)
            if direction == FORWARD or (apart and direction == BACKWARD):
                seen.add((*held, *waiting))
        return sorted((one[:parts], one[parts:]) for one in largest(seen))

    @cached_property
    def turning(self) -> set[int]:
        """The parts of which a backward follows its forward with nothing but gradients of weights in between."""
        order = [one for one in self.passes if one[0] != WEIGHT]
        return {a[2] for a, b in zip(order, order[1:], strict=False) if a[1:] == b[1:]}


def shared(longer: Sequence[Order], shorter: Sequence[Order], placement: Placement) -> list[int]:
    """How many passes each stage begins with under both orders, all that these wait for among them: so they run at the
    same times."""
    counts = []
    for one, other in zip(longer, shorter, strict=True):
        pairs = zip(one.passes, one.coming, other.passes, other.coming, strict=False)
        differs = (place for place, (a, after_a, b, after_b) in enumerate(pairs) if (a, after_a) != (b, after_b))
        counts.append(next(differs, min(len(one.passes), len(other.passes))))
    while True:
        begun = [set(one.passes[:count]) for one, count in zip(longer, counts, strict=True)]
        fewer = [_fewer(one.passes[: counts[stage]], stage, placement, begun) for stage, one in enumerate(longer)]
        if fewer == counts:
            return counts
        counts = fewer


def _fewer(passes: Sequence[Pass], stage: int, placement: Placement, begun: Sequence[set[Pass]]) -> int:
    """How many of these come before the first that waits for one that is not in `begun`."""
    for count, work in enumerate(passes):
        need = before(work, stage, placement)
        if need is not None and need[1] not in begun[need[0]]:
            return count
    return len(passes)


def largest(seen: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Without those that another is at least as large as in all places."""
    found: list[tuple[int, ...]] = []
    for one in sorted(seen, reverse=True):  # those that cover it come before it
        if not any(all(map(le, one, other)) for other in found):
            found.append(one)
    return set(found)


def _coming(passes: Sequence[Pass]) -> list[Pass | None]:
    found: list[Pass | None] = [None] * len(passes)
    following: Pass | None = None
    for place in reversed(range(len(passes))):
        work = passes[place]
        if work[0] == WEIGHT:
            continue
        if following is not None and following[0] == BACKWARD and following[1:] != work[1:]:
            found[place] = following
        following = work
    return found

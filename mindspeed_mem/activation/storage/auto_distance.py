"""How far ahead operators with ``backward_prefetch: Auto`` are moved: as near as their copies back allow.

Each starts one operator ahead. After each of a few training calls, those for whose copies compute stood still are moved
from twice as far, at most a layer's operators: farther copies hold memory that a full link does not earn. A call after
which nobody is moved farther ends the search. The first call is not looked at: it still gets its memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from mindspeed_mem.plan.layers import as_ranges

if TYPE_CHECKING:
    from mindspeed_mem.activation.storage.records import Record
    from mindspeed_mem.device import Backend

logger = logging.getLogger(__name__)

_NOTICEABLE = 20e-6
"""Seconds of standing still; less is the wait itself."""

_CALLS = 8
"""Training calls that are looked at, at most."""


class AutoDistances:
    """The distance so far of each operator that produced an activation, by layer and path.

    Args:
        backend: takes the timestamps.
        operators_in: how many operators a layer has.
    """

    def __init__(self, backend: Backend, operators_in: Callable[[int], int]):
        self._backend, self._operators_in = backend, operators_in
        self._distances: dict[tuple[int, str], int] = {}
        self._waits: list[tuple[tuple[int, str], object, object]] = []
        self._seen = 0
        self.settled = backend.copies_block
        """Nothing is measured any more. A copy that blocks costs the same whenever it starts."""

    @property
    def searching(self) -> bool:
        """Whether distances may still change."""
        return not self.settled and bool(self._distances)

    def __call__(self, layer: int, op: str) -> int:
        """The distance of what this operator produced, in operators."""
        return self._distances.setdefault((layer, op), 1)

    def measures(self, record: Record) -> bool:
        return not self.settled and (record.layer, record.op) in self._distances

    def waited(self, record: Record, begin: object, end: object) -> None:
        """Compute stood still for the record's copy back between these timestamps."""
        self._waits.append(((record.layer, record.op), begin, end))

    def next_call(self) -> None:
        """A training call begins: judge by the last one."""
        waits, self._waits = self._waits, []
        if self.settled or not waits:
            return
        self._seen += 1
        if self._seen == 1:
            return
        between = self._backend.seconds_between
        late = {owner for owner, begin, end in waits if between(begin, end) > _NOTICEABLE}
        farther = {
            owner: far
            for owner in late
            if (far := min(2 * self._distances[owner], self._operators_in(owner[0]))) > self._distances[owner]
        }
        self._distances |= farther
        if not farther or self._seen > _CALLS:
            self.settled = True
            self._tell()

    def _tell(self) -> None:
        found: dict[tuple[int, str], set[int]] = {}
        for (layer, op), distance in sorted(self._distances.items()):
            found.setdefault((distance, op), set()).add(layer)
        for (distance, op), layers in found.items():
            logger.info(
                "backward_prefetch Auto is %d for %s in layer%s %s",
                distance,
                op or "the layer itself",
                "s" if len(layers) > 1 else "",
                as_ranges(layers),
            )

"""Micro-batches that a pipeline stage need not swap: copies that lower no peak of the job are not made.

In a pipeline the early stages hold more micro-batches than the late ones: stage p of P holds P - p of them, and on the
last stage each backward follows its forward at once. After the first step all ranks compare their peaks. A stage keeps
as many passes on the device as fit below the highest of these: all of them, if it would not come above that peak with
nothing moved at all; otherwise as many as the difference has room for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Measured(NamedTuple):
    """What one rank saw in its first training step, in bytes."""

    stage: int
    peak: int
    """The most it held, on a device that counts all its memory: everything, otherwise activations."""
    held: int
    """The most activations it held."""
    without: int
    """The most activations it would have held with nothing moved or recomputed."""
    moved: int
    """The most that one pass had on the host."""


def passes_to_keep(mine: Measured, everyone: Sequence[Measured]) -> float:
    """How many passes in flight this rank may keep on the device; infinity for all of them."""
    room = max(one.peak for one in everyone) - mine.peak
    if not mine.moved:
        return 0
    if mine.without - mine.held <= room:
        return math.inf
    return room // mine.moved


class Residency:
    """Decides at the start of each forward whether its activations stay."""

    def __init__(self) -> None:
        self.passes: float = 0
        """How many passes in flight may stay."""
        self.settled = False
        self.stayed = self.seen = 0
        """Passes that stayed, and all, since it was settled."""
        self._most_moved = 0
        self._trained = False

    def trained(self) -> None:
        """A training step has ended."""
        self._trained = True

    @property
    def due(self) -> bool:
        """Whether there is something to compare now: the same on all ranks."""
        return self._trained and not self.settled

    def moves(self, nbytes: int) -> None:
        """One pass has so many bytes on the host."""
        self._most_moved = max(self._most_moved, nbytes)

    def measured(self, stage: int, device_peak: int | None, held: int, without: int) -> Measured:
        return Measured(stage, held if device_peak is None else device_peak, held, without, self._most_moved)

    def settle(self, mine: Measured, everyone: Sequence[Measured]) -> list[str]:
        """Returns what is to be logged, a line for each kind of outcome."""
        self.settled = True
        self.passes = passes_to_keep(mine, everyone)
        stages: dict[float, set[int]] = {}
        for one in everyone:
            if keep := passes_to_keep(one, everyone):
                stages.setdefault(keep, set()).add(one.stage)
        return [
            f"pipeline stage{'s' if len(found) > 1 else ''} {', '.join(map(str, sorted(found)))}: "
            f"{'no micro-batch is' if keep == math.inf else f'{keep:g} at a time are not'} swapped from now on, as "
            "that lowers no peak of the job (swap_config.pp_aware: False swaps them all the same)"
            for keep, found in sorted(stages.items())
        ]

    def stays(self, in_flight: int, at_once: bool, others_at_once: bool) -> bool:
        """Whether the pass that begins keeps its activations on the device.

        Args:
            in_flight: how many passes are on the device already that keep them.
            at_once: its backward is the next pass.
            others_at_once: there are such passes in this schedule: one place is left to them.
        """
        room = self.passes - (others_at_once and not at_once)
        stays = in_flight < room
        self.seen += self.settled
        self.stayed += stays
        return stays

"""Micro-batches that a pipeline stage need not swap: copies that lower no peak of the job are not made.

In a pipeline the early stages hold more micro-batches than the late ones: stage p of P holds P - p of them, and on the
last stage each backward follows its forward at once. The ranks of a pipeline compare their peaks, and a stage keeps as
many passes on the device as fit below the highest of these. That is decided for each kind of training call apart,
before its third: after the first the optimizer makes its states, and the second is measured. Other pipelines may have
calls of other kinds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple


class StagePeak(NamedTuple):
    """What one rank saw in a training call in which it swapped everything that its plan says, in bytes."""

    stage: int
    peak: int
    """The most it has held so far: of everything on a device that counts its memory, otherwise of activations."""
    away: int
    """The most activations that were not on the device at one time, swapped or recomputed."""
    moved: int
    """The most that one pass had on the host."""
    in_flight: int
    """The most passes that had run forward and not yet backward."""


def passes_to_keep(mine: StagePeak, everyone: Sequence[StagePeak]) -> int:
    """How many passes in flight this rank may keep on the device without coming above the highest peak."""
    room = max(one.peak for one in everyone) - mine.peak
    if not mine.moved:
        return 0
    return mine.in_flight if mine.away <= room else min(room // mine.moved, mine.in_flight)


class StageBalance:
    """Decides at the start of each forward whether its activations stay."""

    def __init__(self) -> None:
        self.passes = 0
        """How many passes in flight may stay in this call."""
        self.stayed = self.seen = 0
        """Passes that stayed, and all, in calls for which that was decided."""
        self._calls: Counter[Hashable] = Counter()
        self._kept: dict[Hashable, int] = {}
        self._measured: dict[Hashable, StagePeak] = {}
        self._key: Hashable = None
        self._away = self._moved = self._in_flight = 0

    def begin(self, key: Hashable) -> bool:
        """A training call of this kind begins. Returns whether the stages are to compare now: on all of them alike."""
        self._key, self._away, self._moved, self._in_flight = key, 0, 0, 0
        self._calls[key] += 1
        self.passes = self._kept.get(key, 0)
        return self._calls[key] == 3

    def passed(self, moved: int, away: int, in_flight: int) -> None:
        """A forward has ended, with so many bytes of it on the host, and not on the device in all."""
        self._moved, self._away = max(self._moved, moved), max(self._away, away)
        self._in_flight = max(self._in_flight, in_flight)

    def end(self, stage: int, peak: int) -> None:
        """The call has ended as it should; ``peak`` as in `StagePeak`."""
        if self._calls[self._key] == 2:
            self._measured[self._key] = StagePeak(stage, peak, self._away, self._moved, self._in_flight)

    def compare(self, gather: Callable[[Any], list]) -> list[str]:
        """Decide with all stages. Returns what is to be logged, a line for each kind of outcome."""
        mine = self._measured.get(self._key)
        everyone = gather(mine)
        if None in everyone:  # that call failed somewhere: go on swapping
            everyone, mine = [], None
        self.passes = self._kept[self._key] = 0 if mine is None else passes_to_keep(mine, everyone)
        stages: dict[str, set[int]] = {}
        for one in everyone:
            if keep := passes_to_keep(one, everyone):
                what = f"{keep} at a time are not" if keep < one.in_flight else "no micro-batch is"
                stages.setdefault(what, set()).add(one.stage)
        return [
            f"pipeline stage{'s' if len(found) > 1 else ''} {', '.join(map(str, sorted(found)))}: {what} swapped from "
            "now on, as that lowers no peak of the job (swap_config.pp_aware: False swaps them all the same)"
            for what, found in stages.items()
        ]

    def stays(self, staying: int, at_once: bool, others_at_once: bool) -> bool:
        """Whether the pass that begins keeps its activations on the device.

        Args:
            staying: how many passes in flight keep theirs.
            at_once: its backward is the next pass.
            others_at_once: there are such passes in this schedule: one place is left to them.
        """
        stays = staying < self.passes - (others_at_once and not at_once)
        self.seen += self._key in self._kept
        self.stayed += stays
        return stays

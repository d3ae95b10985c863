"""In which order chunks are used: recorded once for each kind of pass, then followed.

A pass is what lies between two optimizer steps, or an evaluation: a whole pipeline schedule. Each kind (its key) has a
trace of its own, so that an evaluation in between does not put training out of phase.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Hashable


class Trace:
    """The uses of one kind of pass: position -> numbers of the chunks used at once."""

    def __init__(self) -> None:
        self.uses: list[tuple[int, ...]] = []
        self._positions: dict[int, list[int]] = {}

    def append(self, chunks: tuple[int, ...]) -> None:
        """The next use is of these chunks."""
        for chunk in chunks:
            self._positions.setdefault(chunk, []).append(len(self.uses))
        self.uses.append(chunks)

    def next_use(self, chunk: int, after: int) -> float:
        """Position of the first use of `chunk` behind position `after`; infinity if there is none."""
        positions = self._positions.get(chunk, ())
        found = bisect.bisect_right(positions, after)
        return positions[found] if found < len(positions) else math.inf


class Follower:
    """Records a pass of a kind that is new, and says of a known one what comes next.

    If a pass deviates from its trace, it has no future any more (`next_use` is None) and the kind is recorded anew
    the next time.
    """

    def __init__(self) -> None:
        self.deviations = 0
        """Passes that were not what had been recorded."""
        self._traces: dict[Hashable, Trace] = {}
        self._recording: Trace | None = None
        self._following: Trace | None = None
        self._key: Hashable = None
        self._at = -1

    def begin(self, key: Hashable) -> None:
        """A pass of the kind `key` starts."""
        self._key, self._at = key, -1
        self._following = self._traces.get(key)
        self._recording = Trace() if self._following is None else None

    def use(self, chunks: tuple[int, ...]) -> None:
        """These chunks are used now."""
        self._at += 1
        if self._recording is not None:
            self._recording.append(chunks)
        elif self._following is not None:
            uses = self._following.uses
            if self._at >= len(uses) or uses[self._at] != chunks:
                self._lose()

    def end(self, completed: bool = True) -> None:
        """The pass is over; an incomplete one is not kept."""
        if self._recording is not None and completed and self._recording.uses:
            self._traces[self._key] = self._recording
        elif self._following is not None and completed and self._at + 1 != len(self._following.uses):
            self._lose()
        self._recording = self._following = None

    def next_use(self, chunk: int) -> float | None:
        """How far away the next use of `chunk` lies, as a position; None if nobody knows."""
        return None if self._following is None else self._following.next_use(chunk, self._at)

    def coming(self, number: int) -> list[int]:
        """The next `number` different chunks to be used, in order; empty if nobody knows."""
        found: dict[int, None] = {}
        if self._following is not None:
            uses = self._following.uses
            position = self._at + 1
            while position < len(uses) and len(found) < number:
                found.update(dict.fromkeys(uses[position]))
                position += 1
        return list(found)[:number]

    def _lose(self) -> None:
        self.deviations += 1
        self._following = None
        self._traces.pop(self._key, None)

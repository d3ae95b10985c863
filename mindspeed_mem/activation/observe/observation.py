"""What is measured and counted while an engine runs; nothing of it by default."""

from __future__ import annotations

from typing import Protocol

from mindspeed_mem.activation.observe.census import Census
from mindspeed_mem.activation.observe.stopwatch import Stopwatch


class PassListener(Protocol):
    """Whoever wants to know of passes (`Profiler`)."""

    def begin_pass(self, direction: str, key: tuple[int | None, int]) -> None: ...

    def end_pass(self) -> None: ...


class Observation:
    """The parts that look on: each is there or not."""

    __slots__ = ("census", "counting", "stopwatch", "profiler")

    def __init__(self, census: Census | None = None) -> None:
        self.census = census
        self.counting = census
        """The census, while it counts the forward that runs."""
        self.stopwatch: Stopwatch | None = None
        self.profiler: PassListener | None = None

    def stop_census(self) -> Census | None:
        """Count no more; returns what has been counted."""
        census, self.census, self.counting = self.census, None, None
        return census

"""Where a process is in its model: what every part of the engine looks at, and only who runs operators moves."""

from __future__ import annotations

from mindspeed_mem.activation.course import Course, Watch
from mindspeed_mem.activation.rerun.second_run import Rerun
from mindspeed_mem.activation.storage.micro_batch import MicroBatch

NO_OPERATOR = (-1, "", False)


class Position:
    """The operators that run now, and of which micro-batch."""

    __slots__ = ("stack", "micro_batch", "rerun", "about_to_run", "course", "watch", "hooked", "known")

    def __init__(self) -> None:
        self.stack: list[tuple[int, str, bool]] = []
        """Layer, operator and whether it is inline code between two markers; innermost last."""
        self.micro_batch: MicroBatch | None = None
        self.rerun: Rerun | None = None
        """The recomputed operator that runs for the first time now."""
        self.about_to_run = (-1, "")
        """The recomputed operator whose inputs are being held."""
        self.course: Course | None = None
        """By which the forward goes: which operators need no hook. None: all have it."""
        self.watch: Watch | None = None
        """What follows the forward, where that is not known yet."""
        self.known = False
        """Of the recomputed operator that runs it is known what it saves."""
        self.hooked = 0
        """How many operators were running when the hook came into force by a course, that one included; 0: it did
        not."""

    def running(self) -> tuple[int, str] | None:
        """The operator that runs now, as (layer, path)."""
        return self.stack[-1][:2] if self.stack else None

    def leave(self) -> None:
        """Nothing runs any more, however it ended."""
        self.stack.clear()
        self.micro_batch = self.rerun = self.course = self.watch = None

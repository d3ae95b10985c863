"""What is measured and counted while an engine runs; nothing of it by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from mindspeed_mem.activation.observe.census import Census
from mindspeed_mem.activation.observe.observed_ops import Node
from mindspeed_mem.activation.observe.stopwatch import Stopwatch
from mindspeed_mem.activation.storage.records import Handle


class PassListener(Protocol):
    """Whoever wants to know of passes (`Profiler`)."""

    def begin_pass(self, direction: str, key: tuple[int | None, int]) -> None: ...

    def end_pass(self) -> None: ...

    def begin_weights(self, key: tuple[int | None, int] | None) -> None:
        """Gradients of weights that the backward of the pass ``key`` has put off are computed from now on, until
        `end_pass`; None: it is the backward that ran last."""

    def puts_off(self, read: Handle | None, holds: Sequence[torch.Tensor]) -> Node:
        """The backward that runs, or has just ended, has put off the gradient of a weight; returns whose.

        Args:
            read: the handle of what the layer was given; None: nobody knows it.
            holds: what waits beside that.
        """

    def makes_weights(self, node: Node) -> None:
        """What was put off for this operator is computed now."""


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

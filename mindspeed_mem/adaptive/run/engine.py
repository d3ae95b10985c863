"""The engine of --adaptive-memory-optimization: it survives, and finds its own plan meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mem.activation.surviving import SurvivingEngine
from mindspeed_mem.adaptive.run.adaptation import Adaptation, Call, Ranks

if TYPE_CHECKING:
    from mindspeed_mem.device import Backend
    from mindspeed_mem.plan import MemoryConfig


class AdaptiveEngine(SurvivingEngine):
    """One per process, like any engine. ``plan_file``: where the plan that is settled on is kept; None: nowhere."""

    _again = ""

    def __init__(
        self,
        config: MemoryConfig,
        backend: Backend,
        host_limit_bytes: int | None = None,
        watch_only: bool = False,
        plan_file: Path | None = None,
    ):
        super().__init__(config, backend, host_limit_bytes, watch_only)
        self.adaptation = Adaptation(self, plan_file)

    def begin_training_call(self, call: Call, ranks: Ranks, facts: Callable[[], dict[str, Any]]) -> None:
        """Before everything else that a training call does; all ranks are here."""
        self.adaptation.begin(call, ranks, facts)

    def end_training_call(self, completed: bool) -> None:
        self.adaptation.end(completed)

    def report(self) -> dict[str, Any]:
        since = "a plan was settled on" if self.adaptation.has_settled else ""
        return super().report() | {"adaptive": self.adaptation.report(), "since": since}

"""What is asked of the pipeline schedule in this process. Set by the adaptor, read by the patches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """Defaults: Megatron's own schedule and its own split of the layers."""

    max_inflight: int | None = None
    """Micro-batches, with virtual stages passes of one chunk, whose activations a stage may hold."""
    stages: tuple[int, ...] | None = None
    """Layers of each pipeline stage, or the stage of each layer."""


_current = ScheduleSettings()


def current() -> ScheduleSettings:
    return _current


def use(settings: ScheduleSettings) -> None:
    global _current
    _current = settings

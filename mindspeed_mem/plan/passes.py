"""The passes of a pipeline schedule, as every mechanism names them: a direction, a micro-batch and a model chunk."""

from __future__ import annotations

FORWARD, BACKWARD = "forward", "backward"
Pass = tuple[str, int | None, int]  # direction, micro-batch, model chunk

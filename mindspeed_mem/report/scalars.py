"""What this rank did since the last time, as numbers for a training log: TensorBoard, Weights & Biases and the like."""

from __future__ import annotations

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.zero.buffers import runtime

__all__ = ["Scalars"]

PREFIX = "mindspeed_mem/"
MIB = 1 << 20


class Scalars:
    """Counts are differences between two calls of `take`, divided by the training steps in between, from `step` on."""

    def __init__(self, step: int = 0) -> None:
        self._before: dict[str, float] = {}
        self._step = step

    def take(self, step: int) -> dict[str, float]:
        """Figures at training step `step`, by name; empty where neither activations nor chunks are managed.

        What was moved, recomputed and gathered, and the stalls, are per step since the last call. ``peak_...`` is the
        most so far (an adaptive run begins anew when it settles), ``chunks_on_host_mib`` what rests there now.
        """
        counted, levels = self._now()
        steps = max(1, step - self._step)
        found = {name: (value - self._before.get(name, 0.0)) / steps for name, value in counted.items()}
        self._before, self._step = counted, step
        return {PREFIX + name: value for name, value in (found | levels).items()}

    @staticmethod
    def _now() -> tuple[dict[str, float], dict[str, float]]:
        counted: dict[str, float] = {}
        levels: dict[str, float] = {}
        engine, chunks = engines.current(), runtime.current()
        if engine is not None and engine.manages:
            figures = engine.report()
            counted |= {
                "swapped_out_mib": figures.bytes_out / MIB,
                "swapped_in_mib": figures.bytes_in / MIB,
                "recomputed_mib": figures.recomputed_bytes / MIB,
                "evicted_mib": figures.evicted_bytes / MIB,
                "stall_ms": figures.stall_seconds * 1e3,
            }
            levels |= {
                "peak_activations_mib": figures.peak_bytes / MIB,
                "peak_activations_without_plan_mib": figures.peak_bytes_without / MIB,
                "peak_host_mib": figures.host_peak_bytes / MIB,
            }
        if chunks is not None:
            of_chunks = chunks.report()
            counted["gathers"] = of_chunks.counts.gathers
            counted["gathered_mib"] = of_chunks.counts.gathered_bytes / MIB
            levels["chunks_on_host_mib"] = of_chunks.host_bytes / MIB
        return counted, levels

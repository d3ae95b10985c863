"""Predicted step time over memory limits, drawn: our plan, keeping everything, full recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindspeed_mem.adaptive.problem.definition import GIB
from mindspeed_mem.adaptive.search.search import Found
from mindspeed_mem.adaptive.search.simulation import Simulated
from mindspeed_mem.output import save_figure

POINTS = 16


def limits(floor: int, needed: int, asked: int) -> list[int]:
    """Device limits to plan for: evenly from the least to what keeping everything needs, and the one asked for."""
    high = max(needed, floor) * 1.05
    return sorted({round(floor + (high - floor) * place / (POINTS - 1)) for place in range(POINTS)} | {asked})


def draw(
    found: Sequence[tuple[int, Found | None]],
    keep_all: Simulated,
    full: Simulated,
    asked: int,
    target: str | Path,
    title: str,
) -> None:
    """Write the picture to `target`. Raises ImportError if matplotlib is not installed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5))
    axes = figure.subplots()
    planned = [(limit / GIB, one.simulated.seconds) for limit, one in found if one is not None]
    end = max(limit for limit, _ in found) / GIB
    if planned:
        axes.step(*zip(*planned, strict=True), where="post", marker="o", markersize=3, label="plan")
    for one, name in ((keep_all, "keep all"), (full, "Megatron's full recompute")):
        start = max(one.peaks) / GIB
        axes.plot(
            [start, max(start, end)], [one.seconds] * 2, linestyle="--", marker="|", label=f"{name}, fits from here"
        )
    axes.axvline(asked / GIB, color="grey", linewidth=0.8)
    axes.set_xlabel("device memory limit of a rank, GiB (grey: the one asked for)")
    axes.set_ylabel("predicted step time, s")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    save_figure(figure, target)

"""A timeline as a picture: the passes of each stage over time, and below what each stage holds for backward."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mem.output import save_figure
from mindspeed_mem.passes import BACKWARD, FORWARD, WEIGHT
from mindspeed_mem.schedule.peak import in_flight
from mindspeed_mem.schedule.simulation import Span, Timeline

_SHADES = {FORWARD: "Blues", BACKWARD: "Greens", WEIGHT: "Oranges"}
_NAMED = 1200  # passes: more of them have no room for their names


def draw(timeline: Timeline, virtual_stages: int, target: str | Path, title: str, mib: float | None = None) -> None:
    """Write the picture to `target`; `mib` is what a pass in flight keeps, and then the lower panel shows MiB.

    Raises ImportError if matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    stages = range(len(timeline.stages))
    figure = Figure(figsize=(min(40, max(10, timeline.makespan / 6)), 1.5 + 0.45 * len(stages) + 3))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(max(2, 0.45 * len(stages)), 2))
    for stage in stages:
        _bars(above, timeline, stage, virtual_stages)
        held = held_over_time(timeline.stages[stage])
        below.step(list(held), [count * (mib or 1) for count in held.values()], where="post", label=f"stage {stage}")
    above.set_yticks(list(stages), [f"stage {stage}" for stage in stages])
    above.set_ylim(len(stages) - 0.5, -0.5)
    above.set_xlim(0, timeline.makespan)
    above.set_facecolor("#eeeeee")
    weights = any(span.work[0] == WEIGHT for spans in timeline.stages for span in spans)
    colours = f"forward blue, backward green,{' gradients of weights orange,' * weights} idle grey"
    shades = "; the darker, the later the chunk" if virtual_stages > 1 else ""
    above.set_title(f"{title}\n{colours} ({timeline.idle_share():.1%}){shades}")
    unit = "chunk passes" if virtual_stages > 1 else "micro-batches"
    below.set_ylabel("in flight, MiB" if mib else f"{unit} in flight")
    below.set_xlabel("time (one forward pass = 1)")
    below.set_ylim(bottom=0)
    below.grid(alpha=0.3)
    below.legend(loc="upper right", fontsize=7, ncols=1 + len(stages) // 8)
    figure.tight_layout()
    save_figure(figure, target)


def held_over_time(spans: tuple[Span, ...]) -> dict[float, int]:
    """How many passes are in flight from each time on: from the start of the forward to the end of the backward,
    or of the gradients of weights."""
    counts = in_flight(span.work for span in spans)
    held = {0.0: 0}
    for span, count in zip(spans, counts, strict=True):
        held[span.start if span.work[0] == FORWARD else span.end] = count
    return held


def _bars(axes, timeline: Timeline, stage: int, virtual_stages: int) -> None:
    from matplotlib import colormaps

    named = sum(len(spans) for spans in timeline.stages) <= _NAMED
    for span in timeline.stages[stage]:
        direction, micro_batch, chunk = span.work
        shades = colormaps[_SHADES[direction]]
        colour = shades(0.35 + 0.4 * chunk / max(1, virtual_stages - 1))
        axes.barh(stage, span.end - span.start, left=span.start, height=0.9, color=colour, edgecolor="white", lw=0.5)
        if named:
            middle = (span.start + span.end) / 2
            axes.text(middle, stage, str(micro_batch), ha="center", va="center", fontsize=6)

"""A timeline as text: a row for each stage, time to the right."""

from __future__ import annotations

from string import ascii_lowercase

from mindspeed_mem.passes import BACKWARD, FORWARD, WEIGHT, Pass
from mindspeed_mem.schedule.simulation import Timeline

_FILLS = {FORWARD: "-", BACKWARD: "=", WEIGHT: "~"}
_SHARPEST = 6  # columns for the shortest pass: wider is no clearer


def chart(timeline: Timeline, virtual_stages: int, width: int) -> list[str] | None:
    """The lines of the chart, at most `width` columns wide, or None if the passes do not fit with their names.

    A forward is its micro-batch and dashes, a backward its micro-batch and equal signs, gradients of weights apart from
    it their micro-batch and tildes, idle time is dots; with virtual stages a letter after the micro-batch names the
    chunk.
    """
    head = max(len(_head(stage)) for stage in range(len(timeline.stages)))
    spans = [span for of_stage in timeline.stages for span in of_stage]
    if not spans or timeline.makespan <= 0:
        return None
    longest = max(len(_label(span.work, virtual_stages)) for span in spans)
    shortest = min(span.end - span.start for span in spans)
    room = width - head
    for columns in range(_SHARPEST, longest - 1, -1):
        if shortest <= 0 or round(timeline.makespan * columns / shortest) > room:
            continue
        return [
            _row(timeline, stage, columns / shortest, head, virtual_stages) for stage in range(len(timeline.stages))
        ]
    return None


def _row(timeline: Timeline, stage: int, scale: float, head: int, virtual_stages: int) -> str:
    row = ["."] * round(timeline.makespan * scale)
    for span in timeline.stages[stage]:
        start, end = round(span.start * scale), round(span.end * scale)
        row[start:end] = _label(span.work, virtual_stages).ljust(end - start, _FILLS[span.work[0]])[: end - start]
    return f"{_head(stage):{head}}{''.join(row)}"


def _head(stage: int) -> str:
    return f"stage {stage} "


def _label(work: Pass, virtual_stages: int) -> str:
    letter = ascii_lowercase[work[2] % len(ascii_lowercase)] if virtual_stages > 1 else ""
    return f"{work[1]}{letter}"

"""A plan as a picture in text: a row for each operator group, a column for each layer, a letter for what is done."""

from __future__ import annotations

from mindspeed_mem.adaptive.problem.definition import Problem
from mindspeed_mem.adaptive.search.decisions import Plan

LEGEND = "K keep, S swap, R recompute, - given from outside, . no such group"
_ABSENT = "."


def grid(problem: Problem, plan: Plan, width: int = 100) -> list[str]:
    """The lines of the picture. A bar stands between pipeline stages (or their parts); what is wider than `width`
    continues below."""
    columns: list[tuple[int, dict[str, str], bool]] = []
    groups: dict[str, None] = {}
    parts = sorted(
        (part.first_layer, part.layers, letters)
        for stage, of_stage in zip(problem.stages, plan.stages, strict=True)
        for part, letters in zip(stage.parts, of_stage.parts, strict=True)
    )
    for first, names, letters in parts:
        for place, (name, text) in enumerate(zip(names, letters, strict=True)):
            row = {group.name: letter for group, letter in zip(problem.class_of[name].groups, text, strict=True)}
            groups |= dict.fromkeys(row)
            columns.append((first + place, row, place == 0 and first > 0))
    head = max(len(name) for name in ("layer", *groups)) + 1
    lines = []
    for bank in _banks(columns, max(10, width - head)):
        digits = len(str(bank[-1][0]))
        for digit in range(digits):
            numbers = (("|" if bar else "") + str(layer).rjust(digits)[digit] for layer, _, bar in bank)
            lines.append(("layer" if digit == 0 else "").ljust(head) + "".join(numbers))
        for name in groups:
            cells = (("|" if bar else "") + row.get(name, _ABSENT) for _, row, bar in bank)
            lines.append(name.ljust(head) + "".join(cells))
        lines.append("")
    return [*lines, LEGEND]


def _banks(columns: list, width: int) -> list[list]:
    banks: list[list] = [[]]
    used = 0
    for column in columns:
        size = 2 if column[2] else 1
        if banks[-1] and used + size > width:
            banks.append([])
            used = 0
        banks[-1].append(column)
        used += size
    return banks

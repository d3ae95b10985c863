"""How sizes and the rows of a table are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Row = TypeVar("Row")
Column = tuple[str, int, Callable[[Row], str]]
"""Its name, its width, and what it shows of a row."""


def mib(nbytes: float) -> str:
    """Bytes as MiB with two decimals, without the unit."""
    return f"{nbytes / 2**20:.2f}"


def table(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> list[str]:
    """A line with the columns' names, and one for each row."""
    lines = [[name for name, _, _ in columns], *([show(row) for _, _, show in columns] for row in rows)]
    widths = [width for _, width, _ in columns]
    return [" ".join(map(str.rjust, line, widths)) for line in lines]

"""Tables of the pages that commands write: outcomes in the cells, and the reasons below, each once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def table(columns: Iterable[str], rows: Mapping[str, Sequence[str]], corner: str = "") -> list[str]:
    """Lines of Markdown: a table, and the reasons that its cells give.

    Args:
        rows: by what the first column says; of a cell such as "refused: why" the table shows "refused (1)".
    """
    reasons: list[str] = []

    def cell(text: str) -> str:
        word, _, why = text.partition(": ")
        if why and why not in reasons:
            reasons.append(why)
        return f"{word} ({reasons.index(why) + 1})" if why else word

    columns = list(columns)
    lines = [f"| {corner}{' ' if corner else ''}| {' | '.join(columns)} |", f"|---{'|---' * len(columns)}|"]
    lines += [f"| {name} | {' | '.join(map(cell, cells))} |" for name, cells in rows.items()]
    return [*lines, *(["", *(f"{number}. {why}" for number, why in enumerate(reasons, 1))] if reasons else [])]

"""The end-of-run report of chunk ZeRO: one row per rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_mem.report.units import mib

_COLUMNS = (
    ("rank", 4),
    ("chunks", 7),
    ("on host", 8),
    ("host MiB", 9),
    ("whole", 9),
    ("budget", 9),
    ("peak", 9),
    ("gathers", 8),
    ("gathered", 10),
    ("ahead", 7),
)


def format_chunks(ranks: Sequence[dict[str, Any]]) -> str:
    """``ranks``: `Runtime.report` of each rank, in rank order, each with ``rank`` added. Sizes are shown in MiB."""
    first = ranks[0]
    lines = [
        f"chunk ZeRO stage {first['stage']}, placement {first['placement']}, per rank (MiB; whole: all parameters; "
        "budget, peak: gathered at once; gathered: in the whole run; ahead: gathers started before their use)",
        " ".join(name.rjust(width) for name, width in _COLUMNS),
    ]
    for row in ranks:
        sharded = row["whole_bytes"] > 0
        cells = (
            str(row["rank"]),
            str(row["chunks"]) if row["chunks"] else "-",
            str(row["on_host"]),
            mib(row["host_bytes"]),
            mib(row["whole_bytes"]) if sharded else "-",
            mib(row["budget"]) if row["budget"] is not None else "-",
            mib(row["peak_bytes"]) if sharded else "-",
            str(row["gathers"]),
            mib(row["gathered_bytes"]),
            f"{100 * row['ahead'] / row['gathers']:.0f} %" if row["gathers"] else "-",
        )
        lines.append(" ".join(cell.rjust(width) for cell, (_, width) in zip(cells, _COLUMNS, strict=True)))
    for row in ranks:
        if row["over_budget"]:
            lines.append(f"rank {row['rank']}: {row['over_budget']} uses needed more than the budget at once")
        if row["deviations"]:
            lines.append(f"rank {row['rank']}: {row['deviations']} passes did not follow the order recorded before")
    return "\n".join(lines)

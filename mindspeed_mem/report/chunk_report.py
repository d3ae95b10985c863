"""The end-of-run report of chunk ZeRO: one row per rank."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_mem.report.units import Column, mib, table
from mindspeed_mem.zero.buffers.figures import ChunkFigures

_COLUMNS: tuple[Column[ChunkFigures], ...] = (
    ("rank", 4, lambda row: str(row.rank)),
    ("chunks", 7, lambda row: str(row.chunks or "-")),
    ("on host", 8, lambda row: str(row.on_host)),
    ("host MiB", 9, lambda row: mib(row.host_bytes)),
    ("whole", 9, lambda row: mib(row.whole_bytes) if row.whole_bytes else "-"),
    ("budget", 9, lambda row: mib(row.budget) if row.budget is not None else "-"),
    ("peak", 9, lambda row: mib(row.counts.peak_bytes) if row.whole_bytes else "-"),
    ("gathers", 8, lambda row: str(row.counts.gathers)),
    ("gathered", 10, lambda row: mib(row.counts.gathered_bytes)),
    ("ahead", 7, lambda row: f"{100 * row.counts.ahead / row.counts.gathers:.0f} %" if row.counts.gathers else "-"),
)


def format_chunks(ranks: Sequence[ChunkFigures]) -> str:
    """``ranks``: `Runtime.report` of each rank, in rank order. Sizes are shown in MiB."""
    first = ranks[0]
    lines = [
        f"chunk ZeRO stage {first.stage}, placement {first.placement}, per rank (MiB; whole: all parameters; "
        "budget, peak: gathered at once; gathered: in the whole run; ahead: gathers started before their use)",
        *table(_COLUMNS, ranks),
    ]
    for row in ranks:
        if row.counts.over_budget:
            lines.append(f"rank {row.rank}: {row.counts.over_budget} uses needed more than the budget at once")
        if row.deviations:
            lines.append(f"rank {row.rank}: {row.deviations} passes did not follow the order recorded before")
    return "\n".join(lines)

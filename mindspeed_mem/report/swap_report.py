"""The end-of-run report of activation swap: one row per rank, then what had no effect and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_mem.report.units import mib


def format_report(ranks: Sequence[dict[str, Any]]) -> str:
    """``ranks``: `Engine.report` of each rank, in rank order, each with ``rank`` added. Sizes are shown in MiB."""
    lines = [
        "activation swap, per rank (MiB; peaks are of activations kept for backward)",
        f"{'rank':>4} {'out':>10} {'in':>10} {'peak':>9} {'without':>9} {'saved':>6} {'stall ms':>9} {'host peak':>9}",
    ]
    for row in ranks:
        peak, without = row["peak_bytes"], row["peak_bytes_without"]
        saved = f"{100 * (1 - peak / without):.0f} %" if without else "-"
        lines.append(
            f"{row['rank']:>4} {mib(row['bytes_out']):>10} {mib(row['bytes_in']):>10} {mib(peak):>9} {mib(without):>9} "
            f"{saved:>6} {1e3 * row['stall_seconds']:>9.1f} {mib(row['host_peak_bytes']):>9}"
        )
    for row in ranks:
        lines += _remarks(row)
    return "\n".join(lines)


def _remarks(row: dict[str, Any]) -> list[str]:
    where = f"rank {row['rank']}: "
    remarks = []
    if not row["bytes_out"]:
        remarks.append(where + "nothing was moved: no selected operator of this rank saved anything for backward")
    if row["stayed_bytes"]:
        remarks.append(
            where + f"{mib(row['stayed_bytes'])} MiB in all stayed on the device: the host budget was used up "
            "(--swap-host-memory-gib)"
        )
    for pin in row["pinned"]:
        remarks.append(
            where + f"layer {pin['layer']} {pin['op'] or 'layer'}: {mib(pin['bytes'])} MiB pinned by {pin['by']}"
        )
    return remarks

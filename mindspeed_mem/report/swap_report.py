"""The end-of-run report of swap and recompute: one row per rank, then what ran again, what had no effect and why."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_mem.activation.figures import EngineFigures, OperatorFigures, PinnedFigures
from mindspeed_mem.plan.layers import in_words
from mindspeed_mem.report.units import Column, mib, table

_OF_PLANS = (
    " (--survive-oom, attach: survive): a plan that swaps or recomputes more would not wait for that",
    ": in the first steps, before there was a plan, or in later ones that it did not foresee",
)


def _saved(row: EngineFigures) -> str:
    without = row.peak_bytes_without
    return f"{100 * (1 - row.peak_bytes / without):.0f} %" if without else "-"


_COLUMNS: tuple[Column[EngineFigures], ...] = (
    ("rank", 4, lambda row: str(row.rank)),
    ("out", 10, lambda row: mib(row.bytes_out)),
    ("in", 10, lambda row: mib(row.bytes_in)),
    ("recomputed", 10, lambda row: mib(row.recomputed_bytes)),
    ("peak", 9, lambda row: mib(row.peak_bytes)),
    ("without", 9, lambda row: mib(row.peak_bytes_without)),
    ("saved", 6, _saved),
    ("stall ms", 9, lambda row: f"{1e3 * row.stall_seconds:.1f}"),
    ("host peak", 9, lambda row: mib(row.host_peak_bytes)),
)


def format_report(ranks: Sequence[EngineFigures]) -> str:
    """The report of all ranks, given in rank order; empty where nothing is managed. Sizes are shown in MiB."""
    if not any(row.manages for row in ranks):
        return ""
    since = f" since {ranks[0].since}" if ranks[0].since else ""
    lines = [
        "activation memory, per rank (MiB; out, in, recomputed, host peak: in the whole run; peak, without: kept for "
        f"backward at most{since})",
        *table(_COLUMNS, ranks),
    ]
    lines += _second_runs(ranks)
    for row in ranks:
        lines += _remarks(row)
    for row in ranks:
        lines += row.adaptive or ()  # rank 0 has them
    return "\n".join(lines)


def _second_runs(ranks: Sequence[EngineFigures]) -> list[str]:
    """One line per operator, its layers and all ranks together."""
    found: dict[str, list[OperatorFigures]] = {}
    for row in ranks:
        for one in row.recomputed_by_operator:
            found.setdefault(one.op, []).append(one)
    lines = []
    for op, ones in found.items():
        layers = {one.layer for one in ones}
        nbytes, runs = sum(one.bytes for one in ones), sum(one.runs for one in ones)
        lines.append(
            f"recomputed: {op + ' of ' if op else 'the whole of '}{in_words(layers)}: {mib(nbytes)} MiB dropped, "
            f"{runs} second run{'' if runs == 1 else 's'}"
        )
    return lines


def _remarks(row: EngineFigures) -> list[str]:
    where = f"rank {row.rank}: "
    remarks = []
    if row.swaps and not row.bytes_out:
        remarks.append(where + "nothing was moved: no selected operator of this rank saved anything for backward")
    if row.recomputes and not row.recomputed_bytes:
        remarks.append(where + "nothing was recomputed: no selected operator of this rank made anything for backward")
    if row.evictions:
        remarks.append(
            where + f"{mib(row.evicted_bytes)} MiB in {row.evictions} activations left because device memory had "
            "run out" + _OF_PLANS[row.adaptive is not None]
        )
    if row.small_bytes:
        remarks.append(
            where + f"{mib(row.small_bytes)} MiB in all stayed on the device, in activations of less than "
            f"{row.smallest_bytes} bytes: too small to be worth copies (swap_config.smallest_bytes)"
        )
    if row.stayed_bytes:
        remarks.append(
            where + f"{mib(row.stayed_bytes)} MiB in all stayed on the device: the host budget was used up "
            "(--swap-host-memory-gib, attach: host_memory_gib)"
        )
    if row.passes_kept:
        remarks.append(
            where + f"{row.passes_kept} of {row.passes} forwards, since that was decided, kept their activations "
            "on the device: swapping them lowers no peak of the job (swap_config.pp_aware)"
        )
    pinned: dict[tuple[str, int, str], set[int]] = {}
    for pin in row.pinned:
        pinned.setdefault((pin.op, pin.bytes, pin.by), set()).add(pin.layer)
    for (op, nbytes, by), layers in pinned.items():
        each = " in each" if len(layers) > 1 else ""
        remarks.append(where + f"{PinnedFigures.place(op, layers)}: {mib(nbytes)} MiB{each} pinned by {by}")
    return remarks

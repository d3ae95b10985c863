"""What an engine did so far on this rank, as plain data for reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_mem.activation.ledger import LEDGER

if TYPE_CHECKING:
    from mindspeed_mem.activation.engine import Engine
    from mindspeed_mem.plan.config import SwapConfig


def figures(engine: Engine) -> dict[str, Any]:
    """Bytes, counts and seconds."""
    slabs = engine.mover.slabs
    return {
        "bytes_out": engine.mover.bytes_out,
        "bytes_in": engine.mover.bytes_in,
        "copies_out": engine.mover.copies_out,
        "copies_in": engine.mover.copies_in,
        "peak_bytes": LEDGER.held.highest,
        "peak_owned_bytes": LEDGER.owned.highest,
        "peak_bytes_without": LEDGER.without.highest,
        "held_bytes": LEDGER.held.now,
        "stall_seconds": engine.backend.stall_seconds() - engine.stalled_before,
        "host_peak_bytes": slabs.peak_in_use,
        "host_allocations": slabs.allocations,
        "stayed_bytes": engine.mover.stayed_bytes,
        "evicted_bytes": engine.mover.evicted_bytes,
        "evictions": engine.mover.evictions,
        "passes_kept": engine.residency.stayed,
        "passes": engine.residency.seen,
        "moved_by_operator": [
            {"layer": layer, "op": op, "bytes": n} for (layer, op), n in sorted(engine.mover.moved.items())
        ],
        "recomputed_bytes": engine.mover.dropped.total(),
        "recomputed_by_operator": [
            {"layer": layer, "op": op, "bytes": n, "runs": engine.mover.second_runs[layer, op]}
            for (layer, op), n in sorted(engine.mover.dropped.items())
        ],
        "pinned": engine.pinned.rows(),
        "swaps": _swaps(engine.config.swap),
        "recomputes": engine.recomputes,
    }


def _swaps(config: SwapConfig) -> bool:
    """Whether it names anything, or leaves that to the default policy."""
    entries = config.layer_swap, config.op_swap
    return config.swap and (entries == (None, None) or any(entries))

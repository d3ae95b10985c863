"""What chunks took and moved on a rank: plain data for reports, which ranks send each other."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_mem.zero.core.gathering import Counts


@dataclass(frozen=True, kw_only=True)
class ChunkFigures:
    """Of the whole run; sizes in bytes."""

    version: int = 1
    """Of these fields."""
    rank: int
    stage: int
    placement: str
    """The policy's name."""
    chunks: int
    on_host: int
    """Chunks that rest on the host; ``host_bytes`` with their optimizer's states."""
    host_bytes: int
    whole_bytes: int
    """Of all parameters that are gathered."""
    budget: int | None
    """How much may be gathered at once; None: nothing is."""
    counts: Counts
    deviations: int
    """Passes that did not follow the order recorded before."""

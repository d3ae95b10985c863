"""What an engine did on its rank: plain data for reports, which ranks send each other."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mindspeed_mem.plan.layers import in_words


@dataclass(frozen=True, kw_only=True)
class OperatorFigures:
    """What was swapped, or dropped and made again, of one operator of one layer."""

    layer: int
    op: str
    bytes: int
    runs: int = 0
    """Second runs."""


@dataclass(frozen=True, kw_only=True)
class PinnedFigures:
    """What stays on the device because somebody else holds it."""

    layer: int
    """-1: it was made outside the layers."""
    op: str
    bytes: int
    by: str

    @staticmethod
    def place(op: str, layers: Collection[int]) -> str:
        """Where, in words."""
        if min(layers) < 0:
            return "what was made outside the layers"
        return f"{op and f'{op} in '}{in_words(layers)}"


@dataclass(frozen=True, kw_only=True)
class EngineFigures:
    """Of the whole run; peaks are of activations that backward keeps."""

    version: int = 1
    """Of these fields."""
    rank: int
    bytes_out: int
    bytes_in: int
    copies_out: int = 0
    copies_in: int = 0
    peak_bytes: int
    peak_owned_bytes: int = 0
    """Of those that an operator of a layer made on this rank."""
    peak_bytes_without: int
    """What the peak would have been without the plan."""
    held_bytes: int = 0
    """Now."""
    stall_seconds: float
    """Computation waited for copies."""
    host_peak_bytes: int
    host_allocations: int = 0
    stayed_bytes: int
    """For lack of room on the host."""
    smallest_bytes: int = 0
    """What is smaller is not swapped."""
    small_bytes: int = 0
    """Of what stayed for that, each time it was saved."""
    evicted_bytes: int = 0
    evictions: int = 0
    """Activations that left because device memory had run out."""
    passes_kept: int
    """Forwards that kept their activations, as that raised no peak of the job; of ``passes``."""
    passes: int
    moved_by_operator: tuple[OperatorFigures, ...] = ()
    recomputed_bytes: int
    recomputed_by_operator: tuple[OperatorFigures, ...]
    pinned: tuple[PinnedFigures, ...]
    swaps: bool
    """The plan names something to be swapped."""
    recomputes: bool
    manages: bool = True
    """There is a plan or survival; otherwise somebody only looks on."""
    adaptive: tuple[str, ...] | None = None
    """Lines about the adaptive plan; None where none is looked for."""
    since: str = ""
    """Since when peaks are counted; empty: from the start."""

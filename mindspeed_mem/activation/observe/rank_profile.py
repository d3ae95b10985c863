"""What profiling one rank yields: plain data that is sent between ranks, and from which a planning problem is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OperatorProfile:
    """One operator of one layer: medians over micro-batches, seconds of its own, without operators inside it."""

    layer: int
    """Global index, counted from 0."""
    op: str
    """Path below the layer; "" is the layer itself."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class OutsideProfile:
    """What runs before the first or after the last layer of a chunk, for one micro-batch."""

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    bytes: int = 0
    """Of the storages that backward keeps."""


@dataclass(frozen=True, kw_only=True)
class ChunkProfile:
    """One model chunk: a stage without virtual stages has one."""

    layers: tuple[int, ...]
    """Global indices, ascending."""
    operators: tuple[OperatorProfile, ...]
    """In the order in which they start forward; an operator that runs twice in a pass is there once."""
    storages: tuple[dict[str, Any], ...]
    """`Census.storages`: what backward keeps, by storage."""
    dataflow: dict[str, Any]
    """`Census.dataflow`: what operators read and make, kept or not."""
    before: OutsideProfile = field(default_factory=OutsideProfile)
    after: OutsideProfile = field(default_factory=OutsideProfile)


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """Speed of host copies in GB/s (1e9 bytes), measured with all ranks of the host copying at once."""

    out: float
    back: float
    out_alone: float
    """While nothing is computed."""
    back_alone: float
    blocking: bool = False
    """Computation stands still while anything is copied (a CPU copies in the computing thread)."""


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """One rank of one pipeline stage."""

    stage: int
    chunks: tuple[ChunkProfile, ...]
    static_bytes: int
    """Allocated between steps: parameters, gradients, optimizer states."""
    temporary_bytes: int
    """The most that was allocated beyond these and the activations that backward keeps."""
    step_seconds: float
    """From the end of one training call of the schedule to the start of the next: optimizer, data."""
    link: LinkProfile

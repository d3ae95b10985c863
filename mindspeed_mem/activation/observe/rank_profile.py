"""What profiling one rank yields: plain data that is sent between ranks, and from which a planning problem is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_mem.device.link_speed import LinkSpeed


@dataclass(frozen=True, kw_only=True)
class OperatorProfile:
    """One operator of one layer: medians over micro-batches, seconds of its own, without operators inside it."""

    layer: int
    """Global index, counted from 0."""
    op: str
    """Path below the layer; "" is the layer itself."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    forward_temporary_bytes: int = 0
    """The most that was allocated while it ran beyond what backward keeps; over all micro-batches."""
    backward_temporary_bytes: int = 0
    weight_seconds: float = 0.0
    """Of the backward, what gradients of weights take that were put off,"""
    weight_bytes: int = 0
    """and the output gradients that were held for them; each storage counted where it was put off first."""


@dataclass(frozen=True, kw_only=True)
class Outside:
    """What runs before the first or after the last layer of a chunk, for one micro-batch: embedding; final norm, output
    head, loss."""

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    bytes: int = 0
    """Of the storages that backward keeps. Before the layers they are held from the start of the forward to the end of
    the backward; after them from the end of the forward until its own backward is done."""
    weight_seconds: float = 0.0
    """Of the backward, what gradients of weights take that a split backward puts off,"""
    weight_bytes: int = 0
    """and what it holds for them from then on: output gradients, and what of `bytes` they are made from."""
    gradient_bytes: int = 0
    """Of these, the output gradients."""
    forward_temporary_bytes: int = 0
    """As an operator's."""
    backward_temporary_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class HostCost:
    """What the engine itself takes of computation's time, beyond what it takes while everything is kept: that is in the
    times of a profile, whose tensors are all watched. 0 where a device computes meanwhile."""

    moved_seconds: float = 0.0
    """For each tensor that is swapped, half of it in the forward."""
    rerun_seconds: float = 0.0
    """For each operator that runs again, besides running."""


@dataclass(frozen=True, kw_only=True)
class ChunkProfile:
    """One model chunk: a stage without virtual stages has one."""

    layers: tuple[int, ...]
    """Global indices, ascending."""
    operators: tuple[OperatorProfile, ...]
    """In the order in which they start forward; an operator that runs twice in a pass is there once."""
    storages: tuple[dict[str, Any], ...]
    """`Census.storages`: what backward keeps, by storage. Of what gradients of weights that were put off are made from
    ``for_weights`` says "alone", where nothing else needs it, or "too"."""
    dataflow: dict[str, Any]
    """`Census.dataflow`: what operators read and make, kept or not."""
    before: Outside = field(default_factory=Outside)
    after: Outside = field(default_factory=Outside)


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
    link: LinkSpeed
    host: HostCost = field(default_factory=HostCost)

"""What is asked of chunk ZeRO in this process. `runtime` holds what is in force."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_mem.device import Backend
from mindspeed_mem.zero.core.placement import Placement

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class ChunkSettings:
    """Defaults: what --chunk-zero-stage alone means."""

    stage: int = 0
    """0: off. Sharded are with 1 the optimizer's states, as Megatron does it, with 2 gradients, with 3 parameters."""
    placement: Placement = Placement()
    backend: Backend | None = None
    step_on_host: bool = False
    """Adam on the host for chunks that rest there; otherwise their states are brought to the device for the step."""
    reduce_each: bool = False
    """Reduce gradients in every micro-batch, not only in the last: less memory, other sums in the last digit."""
    host_limit_bytes: int | None = None
    """Host memory that this process's chunks may take; None: what the host has."""
    search_range: int = 32 * MIB
    """Elements: how much larger than `min_chunk_size` a chunk may be."""
    min_chunk_size: int = 32 * MIB
    """Elements."""
    hidden_size: int | None = None
    """Step of the search, in elements; None: the model's hidden size."""

"""What is asked of chunk ZeRO in this process. Set by the adaptor, read by the patches."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_mem.chunk.placement import Placement
from mindspeed_mem.device import Backend

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class ChunkSettings:
    """Defaults: what --chunk-zero-stage alone means."""

    stage: int = 0
    """0: off. 1: optimizer states are sharded (Megatron's distributed optimizer), 2: gradients too, 3: parameters too."""
    placement: Placement = Placement()
    backend: Backend | None = None
    search_range: int = 32 * MIB
    """Elements: how much larger than `min_chunk_size` a chunk may be."""
    min_chunk_size: int = 32 * MIB
    """Elements."""
    hidden_size: int | None = None
    """Step of the search, in elements; None: the model's hidden size."""


_current = ChunkSettings()


def current() -> ChunkSettings:
    return _current


def use(settings: ChunkSettings) -> None:
    global _current
    _current = settings

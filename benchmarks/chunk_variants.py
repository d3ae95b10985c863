"""The ways to shard one training that are put side by side, and what is expected of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chunk_page import (
    ALONE,
    BASE,
    EACH,
    FSDP_KEPT,
    FSDP_OFFLOAD,
    FSDP_RESHARD,
    MEGATRON_OFFLOAD,
    ONCE,
    STAGE1,
    STAGE2,
    STAGE3,
)
from sharded_gpt import Fsdp2, Job, Megatron

from mindspeed_mem.zero.buffers.settings import ChunkSettings
from mindspeed_mem.zero.core.placement import Placement

UNLIMITED = 2**60


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way."""

    make: Callable[[Job], Any]
    """Makes the model and its optimizer: `sharded_gpt.Megatron` or `Fsdp2`."""
    peer: bool = False
    """Somebody else's way, to be compared with."""
    exact: bool = False
    """Whether losses and norms have to be `BASE`'s, bit for bit."""


def variants() -> dict[str, Variant]:
    """All of them by name; `BASE` is Megatron's distributed optimizer with its overlaps, as the pack's are run."""
    host = functools.partial(Placement, "host")
    found = {BASE: Variant(make=Megatron, peer=True, exact=True)}
    found[ALONE] = Variant(make=functools.partial(Megatron, overlap=False), peer=True)
    found[STAGE1], found[STAGE2], found[STAGE3] = (_ours(stage, Placement()) for stage in (1, 2, 3))
    found["stage 3, everything gathered"] = _ours(3, Placement(budget=UNLIMITED))
    found |= {f"stage {stage}, host": _ours(stage, host()) for stage in (1, 2, 3)}
    found |= {f"stage {stage}, host, stepped there": _ours(stage, host(), step_on_host=True) for stage in (1, 2, 3)}
    found["stage 3, half on the host"] = _ours(3, Placement("static", None, 0.5))
    found |= {f"{name}{EACH}": _ours(stage, Placement(), each=True) for name, stage in ((STAGE2, 2), (STAGE3, 3))}
    found[f"stage 3, host{EACH}"] = _ours(3, host(), each=True)
    found[FSDP_RESHARD] = _fsdp2(reshard=True)
    found[FSDP_KEPT] = _fsdp2(reshard=False)
    found[f"{FSDP_RESHARD}{ONCE}"] = _fsdp2(reshard=True, whole_gradients=True)
    found[f"{FSDP_KEPT}{ONCE}"] = _fsdp2(reshard=False, whole_gradients=True)
    found[FSDP_OFFLOAD] = _fsdp2(reshard=True, offload=True)
    found[MEGATRON_OFFLOAD] = Variant(make=functools.partial(Megatron, offload=True), peer=True)
    return found


def _ours(stage: int, placement: Placement, step_on_host: bool = False, each: bool = False) -> Variant:
    def make(job: Job) -> Megatron:
        asked = {"min_chunk_size": job.chunk_elements, "search_range": 0, "hidden_size": job.shape["hidden"]}
        asked |= {"stage": stage, "placement": placement, "backend": job.backend}
        return Megatron(job, chunks=ChunkSettings(step_on_host=step_on_host, reduce_each=each, **asked))

    return Variant(make=make, exact=not step_on_host and not each)


def _fsdp2(**how: bool) -> Variant:
    return Variant(make=functools.partial(Fsdp2, **how), peer=True)

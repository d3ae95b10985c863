"""Chunk ZeRO as it runs in this process: its settings, the one gathering, and the models that take part."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary, WeakSet

import torch

from mindspeed_mem.device import Backend, get_backend, host_memory
from mindspeed_mem.ranks import number
from mindspeed_mem.zero.buffers.buckets import Bucket, BucketChunks, Buffer, in_order_of_use
from mindspeed_mem.zero.buffers.figures import ChunkFigures
from mindspeed_mem.zero.buffers.settings import ChunkSettings
from mindspeed_mem.zero.core import hooks
from mindspeed_mem.zero.core.chunk import Chunk
from mindspeed_mem.zero.core.gathering import Gathering
from mindspeed_mem.zero.core.passes import PassesOverChunks, resting_bytes
from mindspeed_mem.zero.core.shard_memory import DEVICE, HostStore, Store
from mindspeed_mem.zero.layout.size_search import search_bucket_size
from mindspeed_mem.zero.optimizer.placed import GROUP_BYTES, LEAST_GROUP_BYTES

logger = logging.getLogger(__name__)


class BudgetError(ValueError):
    """The budget for gathered parameters is less than one module needs; the message says how much that is."""


class HostMemoryError(ValueError):
    """The chunks that are to rest on the host do not fit there; the message says what they need and what there is."""


@dataclass(eq=False)
class HostChunk:
    """One chunk of one optimizer on the host, with masters and states: what it takes, and how it comes up."""

    chunk: Chunk | None
    """None where the model keeps its parameters and gradients itself (stage 1)."""
    of_shard: bool
    """Whether masters are pieces of the chunk's own shard, as those of fp32 parameters are."""
    masters: dict[torch.nn.Parameter, torch.Tensor] = field(default_factory=dict)
    """Of this rank's pieces of the chunk's parameters."""
    on_host: bool = True

    @property
    def nbytes(self) -> int:
        """What all this takes, with a shard of parameters and one of gradients, if it has them."""
        return resting_bytes(self.chunk, self.masters.values(), self.of_shard)

    @torch.no_grad()
    def to_device(self) -> None:
        """Rest on the device from now on; between two steps. The optimizer's states follow at its next step."""
        chunk, self.on_host = self.chunk, False
        if chunk is not None:
            chunk.move(DEVICE)
        for param, master in self.masters.items():
            if self.of_shard and chunk is not None:
                master.data = chunk.own_part(param)
            else:
                master.data = torch.empty_like(master, device=param.device).copy_(master)
            master.grad = None
        if chunk is not None and chunk.shard is not None and not self.of_shard:
            chunk.follow(self.masters)


class Runtime:
    """One run of chunk ZeRO, from its first model on."""

    def __init__(self, given: ChunkSettings) -> None:
        self.settings = given
        self.backend: Backend = given.backend or get_backend()
        self.gathering = Gathering(given.placement.budget)
        self._passes = PassesOverChunks(self.gathering, given.placement.budget)
        self._models: WeakSet[BucketChunks] = WeakSet()
        self._new: WeakKeyDictionary[BucketChunks, None] = WeakKeyDictionary()  # since the last pass
        self.hidden_size = 1024
        """Of the model at hand."""
        self._settled_for: tuple[list[int], int] = [], 0
        self._warned: set[str] = set()
        self._resting: WeakKeyDictionary[HostChunk, None] = WeakKeyDictionary()
        self._host_bytes: WeakKeyDictionary[object, int] = WeakKeyDictionary()

    @property
    def cuts_buckets(self) -> bool:
        """Whether buckets are as large as `bucket_size` says, and not as Megatron has them."""
        return self.settings.stage >= 2 or self.settings.placement.policy in ("static", "auto")

    def bucket_size(self, params: Sequence[torch.nn.Parameter], ranks: int, high_bandwidth_padding: bool) -> int:
        """Elements after which a bucket of these parameters, in the model's order, is closed."""
        given = self.settings
        return search_bucket_size(
            [param.numel() for param in params],
            ranks,
            range_elements=given.search_range,
            minimum_elements=given.min_chunk_size,
            step_elements=given.hidden_size or self.hidden_size,
            high_bandwidth_padding=high_bandwidth_padding,
            alone=[place for place, param in enumerate(params) if getattr(param, "shared_embedding", False)],
        ).target_elements

    @functools.cached_property
    def host(self) -> Store | None:
        """Where chunks rest on the host; None if the policy leaves all on the device."""
        policy = self.settings.placement.policy
        advice = ". Say how much with --device-memory-gib"
        if policy == "auto" and not self._passes.measure(self.backend, "--placement-policy auto", advice):
            return None
        return None if policy == "device" else HostStore(self.backend)

    @property
    def starts_on_host(self) -> bool:
        """Whether all chunks rest on the host at first."""
        return self.host is not None and self.settings.placement.policy in ("host", "auto")

    @property
    def group_bytes(self) -> int:
        """Of the device buffers through which optimizer states pass: little, of what the device has."""
        limit = self.backend.limit()
        return GROUP_BYTES if limit is None else max(LEAST_GROUP_BYTES, min(GROUP_BYTES, limit // 64))

    def stores(self, buffers: Iterable[Buffer]) -> Callable[[Bucket], Store]:
        """Where each bucket of `buffers`, one optimizer's, rests, by the placement policy."""
        if self.host is None:
            return lambda bucket: DEVICE
        in_order = in_order_of_use(buffers)
        on_host = self.settings.placement.on_host([bucket.param_data.numel() for bucket in in_order])
        chosen = {bucket: self.host if resting else DEVICE for bucket, resting in zip(in_order, on_host, strict=True)}
        return chosen.__getitem__

    def check_ranks(self, buffers: Iterable[Buffer]) -> None:
        """Warn if there is nothing to split: one data-parallel rank."""
        if all(buffer.data_parallel_group.size() == 1 for buffer in buffers):
            rest = "" if self.settings.placement.policy == "device" else "; only --placement-policy has an effect"
            self.warn_once(
                f"--chunk-zero-stage {self.settings.stage}: there is one data-parallel rank, so nothing is split{rest}"
            )

    def check_host(self, ddp: object, buffers: Iterable[Buffer]) -> None:
        """Before anything rests on the host: raise HostMemoryError unless this model, too, fits there."""
        if self.host is None:
            return
        given, share = self.settings, self.settings.placement.fraction
        own = 0
        for buffer in buffers:
            size, ranks = sum(b.param_data.numel() for b in buffer.buckets), buffer.data_parallel_group.size()
            own_master = buffer.param_dtype is torch.float32
            each = 4 * (2 + (not own_master)) * (given.stage == 3 or not own_master)  # moments and masters
            gradients = given.stage >= 2 or not (own_master or self.backend.copies_block)
            each += 4 * gradients + (given.stage == 3) * buffer.param_dtype.itemsize
            own += int(each * size * share) // ranks
        self._host_bytes[ddp] = own
        needed = sum(self._host_bytes.values())
        free, ranks = host_memory.available(), host_memory.ranks_here()
        limits = {"--chunk-host-memory-gib": given.host_limit_bytes}
        limits[f"what the host has free, for {ranks} ranks"] = None if free is None else free // ranks
        for what, limit in limits.items():
            if limit is not None and needed > limit:
                raise HostMemoryError(
                    f"--placement-policy {given.placement.policy}: the chunks of this rank need {needed} "
                    f"bytes of host memory ({needed / 2**30:.2f} GiB); {what}: {limit} bytes. Use more "
                    "data-parallel ranks, --placement-policy static with a smaller share, or device"
                )

    def report(self) -> ChunkFigures:
        """What this rank's chunks took and moved so far."""
        gathering = self.gathering
        return ChunkFigures(
            rank=number(),
            stage=self.settings.stage,
            placement=self.settings.placement.policy,
            chunks=sum(len(one.chunks) for one in self._models),
            on_host=sum(one.on_host for one in self.resting),
            host_bytes=sum(one.nbytes for one in self.resting if one.on_host),
            whole_bytes=sum(chunk.nbytes for chunk in gathering.chunks),
            budget=gathering.budget,
            counts=replace(gathering.counts),
            deviations=gathering.order.deviations,
        )

    def rest(self, chunks: Iterable[HostChunk]) -> None:
        """These rest on the host, with their optimizer's states, as long as that keeps them; in the order of use."""
        self._resting.update(dict.fromkeys(chunks))

    @property
    def resting(self) -> list[HostChunk]:
        """Those that are still there."""
        return list(self._resting)

    def add(self, ddp: object, chunks: BucketChunks) -> None:
        """`chunks` are those of `ddp`; with it they go."""
        self._models.add(chunks)
        if chunks.stage == 3:
            self._new[chunks] = None
            self.gathering.prepare(self._before_any_pass)
        weakref.finalize(ddp, _remove, self.gathering, chunks.chunks).atexit = False

    def warn_once(self, text: str) -> None:
        """Warn with `text`, once in a run."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text)

    # ---- passes

    def begin(self, kind: Hashable, models: Sequence[BucketChunks], forward_only: bool) -> None:
        """A pipeline schedule of this kind starts, with these models."""
        sharded = [one for one in models if one.stage == 3 and one.chunks]
        self._new.clear()
        key = (kind, *(one.chunks[0].index for one in models if one.chunks))
        # What is read at once depends on what will be recomputed, which is settled once the schedule has started.
        movable = None if forward_only else self.resting
        self._passes.begin(key, movable, functools.partial(self._settle_budget, sharded))

    def end(self, completed: bool) -> None:
        """It is over."""
        self._passes.end(completed)

    def _before_any_pass(self, needed: Collection[Chunk]) -> None:
        """A model is called before the first schedule: it, too, is not to be gathered as a whole.

        Only what is called counts: the others may be there on some ranks and gone on others.
        """
        self.gathering.prepare(self._before_any_pass)  # again, if this raises or others wait
        called = [one for one in list(self._new) if not set(needed).isdisjoint(one.chunks)]
        before = self.gathering.budget
        self._settle_budget(called)
        after = self.gathering.budget
        if self.settings.placement.budget is None and before is not None and after is not None:
            self.gathering.budget = max(before, after)
        for one in called:
            del self._new[one]
        if not self._new:
            self.gathering.prepare(None)

    def _settle_budget(self, models: Sequence[BucketChunks], *unused: object) -> None:
        """Check the budget given, or choose what one use and the next chunk need.

        By the models that take part, not by what there is besides: a model that is gone is forgotten on each rank in
        its own time, and ranks need the same budget.
        """
        taking_part = [one.chunks[0].index for one in models]
        least = max((self.gathering.largest_use(hooks.uses(one.module)) for one in models), default=0)
        if not models or (taking_part, least) == self._settled_for:
            return
        self._passes.allow(least, (chunk for one in models for chunk in one.chunks), self._too_small)
        self._settled_for = taking_part, least

    def _too_small(self, given: int, least: int, enough: int) -> BudgetError:
        return BudgetError(
            f"--placement-policy {self.settings.placement.policy}:{given}: one module reads parameters in chunks "
            f"of {least} bytes at once. Give at least {least} bytes ({enough} to fetch the next chunk meanwhile), or "
            "smaller chunks (--min-chunk-size-mib)"
        )


def _remove(gathering: Gathering, chunks: Iterable[Chunk]) -> None:
    for chunk in chunks:
        if chunk in gathering.chunks:
            gathering.remove(chunk)


_current: Runtime | None = None


def use(settings: ChunkSettings) -> None:
    """Let a new run with these settings begin; models made before are none of it. Stage 0: chunk ZeRO is off."""
    resume(Runtime(settings) if settings.stage else None)


def resume(running: Runtime | None) -> None:
    """Let `running`, made earlier, be what runs now; None: nothing. For processes with several."""
    global _current
    _current = running


def current() -> Runtime | None:
    """What runs now; None where chunk ZeRO is off."""
    return _current


def settings_in_force() -> ChunkSettings:
    """Those of what runs now."""
    return ChunkSettings() if _current is None else _current.settings


def in_use() -> bool:
    """Whether a model has chunks of what runs now."""
    return _current is not None and bool(_current._models)

"""Megatron's parameter-and-gradient buckets as chunks: one model wrapped in its DistributedDataParallel.

Megatron decides which parameters lie in which bucket, scales and reduces gradients, and updates its masters; here is
only when a bucket's memory exists. `Buffer` and `Bucket` say all that is known of Megatron's.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from mindspeed_mem.zero.buffers import whole_states
from mindspeed_mem.zero.core import hooks
from mindspeed_mem.zero.core.chunk import Chunk, Piece, free
from mindspeed_mem.zero.core.gathering import Gathering, Reading
from mindspeed_mem.zero.core.gradients import GradientShards, Waitable
from mindspeed_mem.zero.core.shard_memory import DEVICE, Store

_numbers = itertools.count()
_EMBEDS = "is_embedding_or_output_parameter"
"""Megatron's mark on weights that models take from their embedding, to call the output layer with them."""


class Bucket(Protocol):
    """A part of a buffer, which is reduced and gathered as a whole."""

    params_list: Sequence[torch.nn.Parameter]
    offset: int
    """Elements before it in its buffer."""
    param_data: torch.Tensor
    grad_data: torch.Tensor | None
    """None: it lies in the buffer's."""

    def __hash__(self) -> int: ...


class Buffer(Protocol):
    """All parameters of one type of a model, with their gradients."""

    buckets: Sequence[Bucket]
    """In the order of backward."""
    data_parallel_group: dist.ProcessGroup
    param_dtype: torch.dtype
    param_data: torch.Tensor | None
    grad_data: torch.Tensor | None
    param_index_map: Mapping[torch.nn.Parameter, tuple[int, int, int]]
    """First element, the one behind the last, and the bucket's number."""


class BucketChunks:
    """The chunks of one DistributedDataParallel.

    Args:
        module: the model inside it.
        buffers: its parameter-and-gradient buffers, of experts too.
        stage: 2 shards gradients, 3 parameters as well.
        start_reduction: given a bucket, starts Megatron's own reduction of its gradient; returns what to wait for.
        opens_for_backward: whether gradients are written to inside backward (fused weight gradients), so that the whole
            gradient has to be there before.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        buffers: Iterable[Buffer],
        stage: int,
        gathering: Gathering,
        start_reduction: Callable[[Bucket], Waitable | None],
        opens_for_backward: bool,
    ) -> None:
        self.module, self.stage, self.gathering = module, stage, gathering
        self._bucket_of: dict[Chunk, Bucket] = {}
        self._chunk_of_bucket: dict[Bucket, Chunk] = {}
        self._chunk_of: dict[torch.nn.Parameter, Chunk] = {}
        self._whole_gradient: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._opens_for_backward = opens_for_backward
        self._sealed: set[Chunk] = set()
        self.reduce_each = False
        """Whether gradients are reduced in every micro-batch."""
        for buffer in buffers:
            self._take(buffer)
        # Of modules that are used twice: under recomputation each use has a backward of its own.
        found = Counter(param for _, param in module.named_parameters(remove_duplicate=False))
        shared = [param for param, times in found.items() if times > 1 and param in self._chunk_of]
        self.gradients = GradientShards(
            self._bucket_of, lambda chunk: start_reduction(self._bucket_of[chunk]), gathering.order, shared
        )

    # ---- what there is

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(self._bucket_of)

    def chunk_of(self, param: torch.nn.Parameter) -> Chunk:
        return self._chunk_of[param]

    def of_bucket(self, bucket: Bucket) -> Chunk:
        return self._chunk_of_bucket[bucket]

    def gradient(self, param: torch.nn.Parameter) -> torch.Tensor:
        """This rank's piece of the reduced gradient of `param`, one-dimensional, perhaps empty."""
        return self._chunk_of[param].own_gradient(param)

    def shard(self, param: torch.nn.Parameter) -> torch.Tensor:
        """This rank's piece of `param` itself, one-dimensional, perhaps empty; with stage 3, once sealed.

        Its master, where that stands for it.
        """
        chunk = self._chunk_of[param]
        return chunk.masters[param] if chunk.masters else chunk.own_part(param)

    # ---- life

    def seal(self, buffers: Iterable[Buffer], stores: Callable[[Bucket], Store] = lambda bucket: DEVICE) -> None:
        """The optimizer has its masters of `buffers`: of these only shards stay, each bucket's where `stores` says."""
        for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
            chunk = self._chunk_of_bucket.get(bucket)
            if chunk is None or chunk in self._sealed:
                continue
            self._sealed.add(chunk)
            chunk.grad_store = stores(bucket)
            if self.stage == 3:
                chunk.keep_shard(chunk.grad_store)
                whole_states.register(chunk)
                self.gathering.add(chunk)
        opens = self._open if self._opens_for_backward else None
        if not self._handles and (self.stage == 3 or opens):
            running: list[Reading] = []
            foreign = hooks.ForeignReads(self.gathering, running, _EMBEDS) if self.stage == 3 else None
            returned = None if foreign is None else foreign.returned
            self._handles = hooks.attach(self.module, self.gathering, opens, running, returned)
            if foreign is not None:
                foreign.watch(self.module)

    def follow(self, masters: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Chunks that rest on the device need no shard beside these masters of its pieces, all of a sealed chunk's."""
        of_chunk: dict[Chunk, dict[torch.nn.Parameter, torch.Tensor]] = {}
        for param, master in masters.items():
            of_chunk.setdefault(self._chunk_of[param], {})[param] = master
        for chunk, own in of_chunk.items():
            if chunk.shard is not None and not chunk.grad_store.on_host:
                chunk.follow(own)

    def sealed(self, bucket: Bucket) -> bool:
        """Whether only the shard of `bucket` stays."""
        return self._chunk_of_bucket[bucket] in self._sealed

    def begin_step(self) -> None:
        """Gradients are zeroed: their memory goes until the first one arrives."""
        self.gradients.begin_step()
        for param, whole in self._whole_gradient.items():
            _give(param, whole)

    def before_gradient(self, param: torch.nn.Parameter) -> None:
        """Megatron is about to add a gradient of `param` to its ``main_grad``."""
        self.gradients.before(param)

    def after_gradient(self, param: torch.nn.Parameter, last: bool) -> None:
        """It has; `last`: in the step's last micro-batch."""
        self.gathering.settled(param)
        self.gradients.after(param, last)

    def finish_gradients(self, buckets: Iterable[Bucket]) -> None:
        """Reduce all gradients of `buckets`: ``main_grad`` is this rank's piece of them from now on. Collective."""
        for bucket in buckets:
            chunk = self._chunk_of_bucket[bucket]
            self.gradients.finish(chunk)
            for param in chunk.pieces:
                _give(param, chunk.own_gradient(param))

    # ---- inside

    def _open(self, params: tuple[torch.nn.Parameter, ...]) -> None:
        for param in params:
            self.gradients.before(param)

    @torch.no_grad()
    def _take(self, buffer: Buffer) -> None:
        """Give each bucket of `buffer` memory of its own, so that it can go alone."""
        names = {param: name for name, param in self.module.named_parameters()}
        assert buffer.param_data is not None and buffer.grad_data is not None, "once"
        dtype, device = buffer.grad_data.dtype, buffer.param_data.device
        for bucket in buffer.buckets:
            bucket.grad_data = None
            for param in bucket.params_list:
                _give(param, None)
        buffer.grad_data = None
        for bucket in buffer.buckets:
            spans = [(param, buffer.param_index_map[param]) for param in bucket.params_list]
            inside = [(param, Piece(one[0] - bucket.offset, one[1] - bucket.offset)) for param, one in spans]
            if self.stage == 3:
                bucket.param_data = bucket.param_data.clone()
                for param, piece in inside:
                    param.data = bucket.param_data[slice(*piece)].view(param.shape)
            whole = bucket.grad_data = torch.empty(bucket.param_data.numel(), dtype=dtype, device=device)
            for param, piece in inside:
                self._whole_gradient[param] = whole[slice(*piece)].view(param.shape)
                _give(param, self._whole_gradient[param])
            free(whole)
            chunk = Chunk(next(_numbers), inside, bucket.param_data, whole, buffer.data_parallel_group)
            ends = dict.fromkeys((names[inside[0][0]], names[inside[-1][0]]))
            chunk.label += f" ({' to '.join(ends)})"
            self._bucket_of[chunk], self._chunk_of_bucket[bucket] = bucket, chunk
            self._chunk_of.update((param, chunk) for param, _ in inside)
        if self.stage == 3:
            buffer.param_data = None


def _give(param: Any, gradient: torch.Tensor | None) -> None:
    param.main_grad = gradient


def in_order_of_use(buffers: Iterable[Buffer]) -> list[Bucket]:
    """The buckets of `buffers` as forward comes to them: Megatron makes them in the order of backward."""
    return [bucket for buffer in buffers for bucket in reversed(buffer.buckets)]

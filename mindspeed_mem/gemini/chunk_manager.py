"""ChunkManager: which parameters of a model share a chunk, the chunks once they are built, and moving them by hand.

Chunks are filled in order: one ends before the parameter that would take it above `chunk_size`, or with a parameter
larger than that. It is as large as what lies in it, so that nothing but alignment is wasted, whatever the size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_mem.device import get_backend, is_host_device
from mindspeed_mem.gemini.groups import data_parallel, tensor_parallel
from mindspeed_mem.gemini.lazy import initial_value
from mindspeed_mem.gemini.options import OptionError, refuse
from mindspeed_mem.ranks import reduce_scatter
from mindspeed_mem.zero.core.chunk import Chunk, Piece
from mindspeed_mem.zero.core.gathering import Gathering, Reading
from mindspeed_mem.zero.core.shard_memory import DEVICE, HostStore, device_of
from mindspeed_mem.zero.layout.cutting import ALIGNMENT, bucket_multiple, round_up
from mindspeed_mem.zero.layout.size_search import search_chunk_size
from mindspeed_mem.zero.plain.built_chunk import BuiltChunk, PlannedChunk


@dataclass(frozen=True)
class Rest:
    """Where one chunk rests."""

    sharded: bool = True
    """Whether each rank keeps only its part of the parameters."""
    parameters_on_host: bool = False
    optimizer_on_host: bool = False
    """Masters, moments and reduced gradients."""


class ChunkManager:
    """The chunks of one model.

    Args:
        chunk_size: elements after which a chunk is closed; None: every parameter has one of its own.
        process_group: the data-parallel ranks; None: all, or this process alone.
        enable_distributed_storage: whether each rank keeps only its part of a chunk.
        init_device: where gathered chunks are; None: the accelerator, or the CPU.

    Raises OptionError with all that is wrong.
    """

    def __init__(
        self,
        chunk_size: int | None,
        process_group: Any = None,
        enable_distributed_storage: bool = True,
        init_device: torch.device | str | None = None,
    ) -> None:
        whole = isinstance(chunk_size, int) and not isinstance(chunk_size, bool) and chunk_size >= 1
        if chunk_size is not None and not whole:
            refuse([f"chunk_size is a number of elements of at least 1, or None, not {chunk_size!r}"])
        self.chunk_size, self.enable_distributed_storage = chunk_size, enable_distributed_storage
        self.process_group = process_group
        self.group, self.tensor_parallel_group = data_parallel(process_group), tensor_parallel(process_group)
        asked = None if init_device is None else torch.device(init_device)
        self.backend = get_backend(None if asked is None else asked.type)
        self.device = device_of(self.backend) if asked is None or asked.index is None else asked
        self.gathering = Gathering()
        self.built: dict[Chunk, BuiltChunk] = {}
        self._groups: dict[str, list[torch.nn.Parameter]] = {}
        self._dtype_of: dict[torch.nn.Parameter, torch.dtype] = {}
        self._chunk_of: dict[torch.nn.Parameter, BuiltChunk] = {}
        self._by_hand: dict[Chunk, Reading] = {}
        self._host = HostStore(self.backend)
        self._numbers = itertools.count()

    @staticmethod
    def search_chunk_size(
        module: torch.nn.Module,
        search_range: int,
        n_grids: int,
        min_chunk_size: int | None = None,
        filter_exlarge_params: bool = True,
    ) -> int:
        """The chunk size for which equal-size chunks would waste least, as ColossalAI 0.1.10 searches it. Elements.

        search_range: how much larger than the smallest candidate, which is the largest parameter or `min_chunk_size`;
        n_grids: into how many steps it is divided. filter_exlarge_params: leave out parameters far above the mean;
        without it a chunk is at least as large as the largest parameter.

        Raises ValueError with all that is wrong.
        """
        wrong = [
            f"{name} is a whole number of at least {least}, not {number!r}"
            for name, number, least in (("search_range", search_range, 0), ("n_grids", n_grids, 1))
            if not isinstance(number, int) or number < least
        ]
        indivisible = f"search_range is a multiple of n_grids, {n_grids}, not {search_range}"
        refuse(wrong or ([indivisible] if search_range % n_grids else []))
        sizes = [param.numel() for param in module.parameters()]
        smallest = min_chunk_size or 0
        if not filter_exlarge_params:
            smallest = max([smallest, *sizes])
        return search_chunk_size(
            sizes,
            1,
            range_elements=search_range,
            minimum_elements=min(smallest, sum(sizes)),
            step_elements=max(1, search_range // n_grids),
            start_on_step=False,
        ).chunk_elements

    # ---- filling

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups that there are."""
        return tuple(self._groups)

    def create_group(self, group_name: str) -> None:
        """Parameters of different groups share no chunk. Raises OptionError for a group that there is."""
        if group_name in self._groups:
            raise OptionError(f"the group {group_name!r} exists already")
        self._groups[group_name] = []

    def append_tensor(self, tensor: torch.nn.Parameter, group_name: str, dtype: torch.dtype | None = None) -> None:
        """`tensor` is the next parameter of `group_name`; in its chunk it has `dtype` (None: its own).

        All of a group are of one dtype, and either all trainable or all frozen. Raises OptionError otherwise, for a
        group that has not been created, and for a parameter given twice.
        """
        if group_name not in self._groups:
            raise OptionError(f"there is no group {group_name!r}; create_group first; there are {list(self._groups)}")
        if not isinstance(tensor, torch.nn.Parameter) or tensor in self._dtype_of or tensor in self._chunk_of:
            raise OptionError("append_tensor takes torch.nn.Parameters, each once")
        wanted = dtype or tensor.dtype
        for other in self._groups[group_name][:1]:
            if (self._dtype_of[other], other.requires_grad) != (wanted, tensor.requires_grad):
                raise OptionError(
                    f"the group {group_name!r} has {_kind(self._dtype_of[other], other.requires_grad)}, and cannot "
                    f"take {_kind(wanted, tensor.requires_grad)}; use another group"
                )
        self._groups[group_name].append(tensor)
        self._dtype_of[tensor] = wanted

    def plan(self) -> list[PlannedChunk]:
        """What `build` will make of the parameters appended and not yet built."""
        return [one for params in self._groups.values() for one in self._cut(params)]

    def build(
        self,
        places: Sequence[Rest] | None = None,
        initial: Callable[[torch.nn.Parameter], torch.Tensor] = initial_value,
    ) -> list[BuiltChunk]:
        """Build what is planned, chunk by chunk: the memory that parameters had before is freed as their chunk is made.

        places: where each chunk rests; None: on the device. initial: a parameter's first value.
        """
        plans = self.plan()
        places = [Rest(self.enable_distributed_storage)] * len(plans) if places is None else places
        host, made = self._host, []
        for params in self._groups.values():
            params.clear()
        self._dtype_of.clear()
        for plan, place in zip(plans, places, strict=True):
            one = BuiltChunk(
                next(self._numbers),
                plan,
                self.group,
                self.device,
                initial,
                place.sharded and self.enable_distributed_storage,
                host if place.parameters_on_host else DEVICE,
                host if place.optimizer_on_host else DEVICE,
            )
            made.append(one)
            self.built[one.chunk] = one
            self._chunk_of.update(dict.fromkeys(plan.pieces, one))
            if one.sharded:
                self.gathering.add(one.chunk)
        return made

    def of(self, tensor: torch.nn.Parameter) -> BuiltChunk:
        """What `tensor` lies in, built if it is not yet. Raises OptionError for one that was not appended."""
        if tensor in self._dtype_of:
            self.build()
        if tensor not in self._chunk_of:
            raise OptionError("this tensor is in no chunk: it has not been appended")
        return self._chunk_of[tensor]

    # ---- by hand

    def get_chunk(self, tensor: torch.nn.Parameter) -> Chunk:
        """The chunk of `tensor`."""
        return self.of(tensor).chunk

    def get_chunks(self, tensors: Iterable[torch.nn.Parameter]) -> tuple[Chunk, ...]:
        """Their chunks, each once, in the order of the tensors."""
        return tuple(dict.fromkeys(self.get_chunk(tensor) for tensor in tensors))

    def access_chunk(self, chunk: Chunk) -> None:
        """Have `chunk` whole until `release_chunk`. Collective."""
        if chunk in self.gathering.chunks and chunk not in self._by_hand:
            self._by_hand[chunk] = reading = Reading(chunk.params)
            self.gathering.acquire(reading)

    def release_chunk(self, chunk: Chunk) -> None:
        """It is not needed whole any more: only the shard stays, unless a module reads it."""
        reading = self._by_hand.pop(chunk, None)
        if reading is not None:
            self.gathering.done(reading)
            self.gathering.drop(chunk)

    def move_chunk(self, chunk: Chunk, device: torch.device | str) -> None:
        """Let the parameters' shard of `chunk` rest on the "device" or on the "host" (or torch's cpu)."""
        to_host = str(device) == "host" or (str(device) != "device" and is_host_device(device))
        if self.built[chunk].sharded:
            chunk.move_shard(self._host if to_host else DEVICE)

    def copy_tensor_to_chunk_slice(self, tensor: torch.nn.Parameter, data: torch.Tensor) -> None:
        """Let `data`, the same on all ranks, be the value of `tensor`, whether its chunk is whole or not."""
        if data.shape != tensor.shape:
            raise OptionError(f"the parameter has shape {tuple(tensor.shape)}, the data {tuple(data.shape)}")
        self.of(tensor).write(tensor, data)

    def reduce_chunk(self, chunk: Chunk) -> None:
        """Average the whole gradient of `chunk` over the ranks; `grad_shard` grows by this rank's part. Collective."""
        work = self.start_reduction(chunk)
        if work is not None:
            work.wait()
        chunk.keep_gradients()
        chunk.grad_store.settle()

    def start_reduction(self, chunk: Chunk) -> Any:
        """Start to average the whole gradient of `chunk` over the ranks; returns what to wait for, or None. Collective.

        Divided before the sum, in fp32.
        """
        if self.group.size() == 1:
            return None
        chunk.grad.div_(self.group.size())
        return reduce_scatter(chunk.grad[chunk.mine], chunk.grad, self.group)

    @property
    def total_mem(self) -> dict[str, int]:
        """Bytes of parameters now, gathered and shards: {"device": ..., "host": ...}."""
        total = {"device": 0, "host": 0}
        for one in self.built.values():
            if one.chunk.gathered:
                total["device"] += one.chunk.nbytes
            if one.chunk.shard is not None:
                total["host" if one.shard_on_host else "device"] += one.chunk.shard.nbytes
        return total

    # ---- inside

    def _cut(self, params: list[torch.nn.Parameter]) -> Iterator[PlannedChunk]:
        pieces: dict[torch.nn.Parameter, Piece] = {}
        end = 0
        for param in params:
            first = round_up(end, ALIGNMENT)
            if pieces and first + param.numel() > (self.chunk_size or 0):
                yield self._planned(pieces, end)
                pieces, first = {}, 0
            end = first + param.numel()
            pieces[param] = Piece(first, end)
        if pieces:
            yield self._planned(pieces, end)

    def _planned(self, pieces: dict[torch.nn.Parameter, Piece], end: int) -> PlannedChunk:
        first, capacity = next(iter(pieces)), round_up(max(1, end), bucket_multiple(self.group.size()))
        return PlannedChunk(pieces, capacity, self._dtype_of[first], first.requires_grad)


def init_chunk_manager(
    model: torch.nn.Module,
    init_device: torch.device | str | None = None,
    hidden_dim: int | None = None,
    search_range_mb: float = 32,
    min_chunk_size_mb: float = 32,
    process_group: Any = None,
    filter_exlarge_params: bool = True,
) -> ChunkManager:
    """A ChunkManager for `model`, with the chunk size that ColossalAI 0.5.0 finds in this range.

    Args:
        init_device: where chunks rest at first; None: `ChunkManager`'s default.
        hidden_dim: the step of the search, in elements; None: 1024.
        search_range_mb, min_chunk_size_mb: in 2^20 elements, as there, whatever the name says.
        process_group: the ranks that share the chunks; None: all.
        filter_exlarge_params: chunks may be smaller than the largest parameter, which has one of its own then.

    Raises:
        OptionError: with all that is wrong.
    """
    wrong = [
        f"{name} is a number of at least 0, not {number!r}"
        for name, number in (("search_range_mb", search_range_mb), ("min_chunk_size_mb", min_chunk_size_mb))
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < float("inf")
    ]
    if hidden_dim is not None and (not isinstance(hidden_dim, int) or hidden_dim < 1):
        wrong.append(f"hidden_dim is a number of elements of at least 1, or None, not {hidden_dim!r}")
    refuse(wrong)
    sizes = [param.numel() for param in model.parameters()]
    found = search_chunk_size(
        sizes,
        data_parallel(process_group).size(),
        range_elements=int(search_range_mb * 2**20),
        minimum_elements=max(int(min_chunk_size_mb * 2**20), 0 if filter_exlarge_params else max(sizes, default=0)),
        step_elements=hidden_dim if hidden_dim is not None else 1024,
    )
    return ChunkManager(found.chunk_elements, process_group, init_device=init_device)


def _kind(dtype: torch.dtype, trainable: bool) -> str:
    return f"{'trainable' if trainable else 'frozen'} parameters of {dtype}"

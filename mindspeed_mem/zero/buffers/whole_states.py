"""State dicts of parameters that are kept as shards: complete copies on the host, and writing without gathering.

Who asks a model for its state, or loads one, gets to tensors whose memory is freed. Copies are made chunk by chunk: one
chunk is whole on the device at a time, and its copy on the host is what the state dict's tensors are views of. Loading
needs no communication: every rank is given whole tensors, and keeps its part of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from mindspeed_mem.device import Backend, get_backend
from mindspeed_mem.zero.core.chunk import Chunk, fill, storage_of
from mindspeed_mem.zero.core.shard_memory import HostStore


class ChunkStateError(RuntimeError):
    """The state of a model was asked for in a way that would give tensors without content."""


_of_storage: WeakValueDictionary[int, Chunk] = WeakValueDictionary()
_parameter_of_copy = WeakTensorKeyDictionary()


def register(chunk: Chunk) -> None:
    """`chunk` keeps only its shard from now on: let state dicts find it, and have copies of its parameters refused."""
    _of_storage[storage_of(chunk.whole)] = chunk
    for param in chunk.params:
        vars(param).update(__deepcopy__=_refuse, __reduce_ex__=_refuse)


def parameter_of(tensor: torch.Tensor) -> torch.nn.Parameter | None:
    """The parameter that `tensor`, from a state dict made here, is the copy of; None if it is not such a copy."""
    return _parameter_of_copy.get(tensor)


class HostCopies:
    """Chunks as they are now, copied to the host when first asked for."""

    def __init__(self, backend: Backend | None) -> None:
        self._store = HostStore(backend or get_backend())
        self._copies: dict[Chunk, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What `tensor` would be if its parameter were whole: same shape and strides, on the host.

        `tensor` itself if it is in no chunk. Collective over the chunk's group if the chunk is not copied yet. Raises
        ChunkStateError if its memory is freed and the chunk is gone.
        """
        chunk = _of_storage.get(storage_of(tensor))
        if chunk is None:
            if tensor.numel() and not tensor.is_meta and not tensor.untyped_storage().nbytes():
                raise ChunkStateError(
                    "a tensor of this state dict has no memory: the model's DistributedDataParallel, which kept its "
                    "shards, is gone. Take the state dict while it exists"
                )
            return tensor
        whole = self.take(chunk)
        offset = whole.storage_offset() + tensor.storage_offset() - chunk.whole.storage_offset()
        copy = whole.as_strided(tensor.size(), tensor.stride(), offset)
        if isinstance(tensor, torch.nn.Parameter):
            _parameter_of_copy[copy] = tensor
        return copy

    @torch.no_grad()
    def take(self, chunk: Chunk) -> torch.Tensor:
        """[numel], the copy of `chunk`. Collective over its group if there is none yet."""
        if chunk not in self._copies:
            gathered = chunk.gathered
            if not gathered:
                chunk.gather()
            chunk.wait()
            copy = self._store.like(chunk.whole)
            copy.copy_(chunk.whole)
            self._copies[chunk] = copy
            if not gathered:
                chunk.release()
        return self._copies[chunk]


class _OfThread(threading.local):
    inside = False
    ahead: HostCopies | None = None


_thread = _OfThread()


@contextlib.contextmanager
def completing(backend: Backend | None) -> Iterator[HostCopies | None]:
    """Around a call that makes a state dict, which may contain others of its kind; copies are made by `backend`.

    Yields what to replace its tensors by; None within another such call, whose result is replaced as a whole.
    """
    if _thread.inside:
        yield None
        return
    _thread.inside = True
    try:
        yield _thread.ahead or HostCopies(backend)
    finally:
        _thread.inside = False


@contextlib.contextmanager
def copied_ahead(modules: Iterable[torch.nn.Module], backend: Backend | None = None) -> Iterator[None]:
    """Copy the parameters of `modules` now, on all data-parallel ranks; inside, any of them may take state dicts."""
    copies = HostCopies(backend)
    for module in modules:
        for param in module.parameters():
            copies.of(param)
    _thread.ahead = copies
    try:
        yield
    finally:
        _thread.ahead = None


@contextlib.contextmanager
@torch.no_grad()
def written(params: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """`params` can be written to inside, with the same on all ranks; reading them gives only this rank's part."""
    found = (_of_storage.get(storage_of(param)) for param in params)
    chunks = list(dict.fromkeys(chunk for chunk in found if chunk is not None))
    opened = [chunk for chunk in chunks if not chunk.gathered]
    for chunk in opened:
        fill(chunk.whole)
        chunk.fill_own()
    try:
        yield
    finally:
        for chunk in chunks:
            chunk.keep_changes()
        for chunk in opened:
            chunk.release()


def sharded(params: Iterable[torch.nn.Parameter]) -> bool:
    """Whether one of `params` is kept as a shard."""
    return any(storage_of(param) in _of_storage for param in params)


def _refuse(*unused: Any) -> Any:
    raise ChunkStateError(
        "this model's parameters are kept as shards (--chunk-zero-stage 3): a copy or pickle of it would be empty. "
        "Save model.state_dict() or model.sharded_state_dict(), called on all data-parallel ranks; to copy a model, "
        "build another one and load that state into it"
    )

"""A chunk: one contiguous piece of memory with parameters of a data-parallel group, whole or as this rank's shard.

    whole        --shard-->   shard only   --gather-->   whole (a copy)   --release-->   shard only

The whole is one flat tensor whose storage is resized to 0 while it is not gathered: the parameters, and what autograd
saved of them, are views of it, and live on. Whoever reads them meanwhile reads freed memory, so that only `Gathering`
decides when that is. Gradients go the other way: the whole is there from the first gradient until it is reduced.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mindspeed_mem.device import Event, get_backend
from mindspeed_mem.device.refill import refill
from mindspeed_mem.zero.core.arrival import Arrival
from mindspeed_mem.zero.core.shard_memory import DEVICE, Store

_numbers: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


class Piece(NamedTuple):
    """Where a parameter lies: elements of its chunk, the end excluded."""

    start: int
    end: int


EMPTY = Piece(0, 0)


class Chunk:
    """Parameters that are gathered, released and moved together.

    Args:
        index: the chunk's number in this process.
        params: its parameters, each with its `Piece`; their ``data`` are views of `data`.
        data: [numel], the whole: a storage of its own, numel divisible by the size of `group`.
        grad: [numel] of the dtype in which gradients are added up, with a storage of its own; None, and then of no
            elements, if gradients are not this chunk's business.
        group: the data-parallel ranks that hold the same parameters.
    """

    def __init__(
        self,
        index: int,
        params: Iterable[tuple[torch.nn.Parameter, Piece]],
        data: torch.Tensor,
        grad: torch.Tensor | None,
        group: dist.ProcessGroup,
    ) -> None:
        self.index, self.group = index, group
        self.number_in_group = next(_numbers.setdefault(group, itertools.count()))
        """Of all chunks that this process ever made for `group`: the same on all its ranks."""
        self.label = f"chunk {self.number_in_group}"
        """For messages."""
        self.pieces = dict(params)
        self.whole, self.grad = data, data.new_empty(0) if grad is None else grad
        ranks, rank = group.size(), group.rank()
        assert data.numel() % ranks == 0, "a chunk is padded to its ranks"
        size = data.numel() // ranks
        self.mine = slice(rank * size, (rank + 1) * size)
        self.shard: torch.Tensor | None = None
        """[numel / ranks], this rank's part of the parameters; None while the chunk is always whole, or has masters."""
        self.masters: dict[torch.nn.Parameter, torch.Tensor] = {}
        """fp32 masters of this rank's pieces, which stand for its shard: what is gathered is cast from them."""
        self.grad_shard: torch.Tensor | None = None
        """[numel / ranks], this rank's part of the reduced gradients; None before the first reduction of a step."""
        self.shard_store: Store = DEVICE
        """Where `shard` rests."""
        self.grad_store: Store = DEVICE
        """Where `grad_shard` rests."""
        self.gathered = True
        self._arrival: Arrival | None = None
        self._reduced_before: tuple[torch.Tensor, Event] | None = None
        self._spare: torch.Tensor | None = None  # host memory for `grad_shard`: pinning is slow

    @property
    def params(self) -> tuple[torch.nn.Parameter, ...]:
        return tuple(self.pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole, gathered."""
        return self.whole.numel() * self.whole.element_size()

    def own_piece(self, param: torch.nn.Parameter) -> Piece:
        """The part of `param` that lies in this rank's shard, in elements of the shard; may be empty."""
        piece, first = self.pieces[param], self.mine.start
        start = min(max(piece.start, first), self.mine.stop)
        end = max(min(piece.end, self.mine.stop), start)
        return Piece(start - first, end - first) if end > start else EMPTY

    def own_part(self, param: torch.nn.Parameter) -> torch.Tensor:
        """This rank's piece of `param`, a view of `shard`: one-dimensional, perhaps empty."""
        assert self.shard is not None, "only the whole is there"
        return self.shard[slice(*self.own_piece(param))]

    def own_gradient(self, param: torch.nn.Parameter) -> torch.Tensor:
        """The same of its reduced gradient, a view of `grad_shard`."""
        assert self.grad_shard is not None, "nothing is reduced"
        return self.grad_shard[slice(*self.own_piece(param))]

    def cut_own(self, param: torch.nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        """This rank's piece of `value`, which has all elements of `param` in one dimension."""
        own, first = self.own_piece(param), self.pieces[param].start - self.mine.start
        return value[own.start - first : own.end - first]

    # ---- parameters

    @torch.no_grad()
    def keep_shard(self, store: Store = DEVICE) -> None:
        """From now on only this rank's part stays, in `store`."""
        shard = store.like(self.whole[self.mine])
        shard.copy_(self.whole[self.mine])
        self.adopt_shard(shard, store)

    def adopt_shard(self, shard: torch.Tensor, store: Store = DEVICE) -> None:
        """From now on `shard` [numel / ranks], in `store`, is this rank's part, and all that stays; nothing is read."""
        assert self.shard is None and self.gathered
        self.shard, self.shard_store, self.grad_store = shard, store, store
        self.release()

    def follow(self, masters: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """From now on the shard is cast from `masters`: a flat tensor for each piece of this rank that is not empty."""
        assert set(masters) == {param for param in self.pieces if self.own_piece(param) != EMPTY}
        self.masters, self.shard = dict(masters), None

    @torch.no_grad()
    def fill_own(self) -> None:
        """Write this rank's part into the whole, which has memory."""
        brought = self._bring_own()
        if brought is not None:
            self.shard_store.meet(brought)

    @torch.no_grad()
    def move(self, store: Store) -> None:
        """Let this rank's part rest in `store` from now on."""
        self.grad_store.settle()
        if self.grad_shard is not None:
            self.grad_shard = store.like(self.grad_shard, self.whole.device).copy_(self.grad_shard)
        self.grad_store, self._spare = store, None
        self.move_shard(store)

    @torch.no_grad()
    def move_shard(self, store: Store) -> None:
        """Let this rank's part of the parameters alone rest in `store` from now on."""
        self.shard_store.settle()
        if self.shard is not None:
            self.shard = store.like(self.shard, self.whole.device).copy_(self.shard)
        self.shard_store = store

    @torch.no_grad()
    def gather(self) -> None:
        """Start to make the chunk whole, asynchronously; collective over the group. `wait` before use."""
        assert not self.gathered and self._arrival is None
        self._arrival = Arrival(get_backend(self.whole.device.type))
        fill(self.whole)
        brought = self._bring_own()
        if brought is not None:
            self._arrival.meet = functools.partial(self.shard_store.meet, brought)
        if self.group.size() > 1:
            own = self.whole[self.mine]
            with self.shard_store.beside() if brought is not None else contextlib.nullcontext():
                work = dist.all_gather_into_tensor(self.whole, own, group=self.group, async_op=True)
            self._arrival.meet = work.wait  # the collective has met what was brought
        self.gathered = True

    def wait(self) -> None:
        """Let what comes next on the device's current stream see the gathered parameters."""
        if self._arrival is not None:
            self._arrival.wait()

    def release(self) -> None:
        """Free the whole; the shard stays."""
        if self._arrival is not None:
            self._arrival.end()
            self._arrival = None
        free(self.whole)
        self.gathered = False

    @torch.no_grad()
    def keep_changes(self) -> None:
        """Take this rank's part of the gathered parameters, which somebody has written to, as the shard.

        A master keeps its digits where what was written is what it would be cast to.
        """
        self.wait()
        if self.shard is not None:
            self.shard.copy_(self.whole[self.mine])
        for written, master in zip(self._own_parts(), self.masters.values(), strict=True):
            master.copy_(torch.where(master.to(written.dtype) == written, master, written.float()))

    def _bring_own(self) -> Event | None:
        """Start to write this rank's part into the whole; what to meet, as of `Store.bring`."""
        if self.masters:
            torch._foreach_copy_(self._own_parts(), list(self.masters.values()))
        elif self.shard is not None:
            return self.shard_store.bring(self.whole[self.mine], self.shard)
        return None

    def _own_parts(self) -> list[torch.Tensor]:
        """What `masters` are cast into, in their order."""
        own = self.whole[self.mine]
        return [own[slice(*self.own_piece(param))] for param in self.masters]

    # ---- gradients

    @property
    def has_gradients(self) -> bool:
        """Whether the whole gradient is there."""
        return self.grad.untyped_storage().nbytes() > 0

    @torch.no_grad()
    def open_gradients(self) -> None:
        """Make room for the whole gradient, with zeros, unless it is there."""
        if not self.has_gradients:
            fill(self.grad)
            self.grad.zero_()

    @torch.no_grad()
    def fetch_gradients(self) -> None:
        """The whole gradient is about to be reduced: start to bring what `keep_gradients` will add to, if it is away.

        Beside a device that computes meanwhile the sum is made there, and no host waits.
        """
        if self.grad_shard is not None and self._reduced_before is None:
            self._reduced_before = self.grad_store.fetch(self.grad_shard, self.grad.device)

    @torch.no_grad()
    def keep_gradients(self) -> None:
        """This rank's part of the whole gradient, which has been reduced, is added to its shard; the whole is freed.

        Before the host reads the shard its store has to `settle`.
        """
        own = self.grad[self.mine]
        self.fetch_gradients()
        if self.grad_shard is None:
            shard = self.grad_store.like(own) if self._spare is None else self._spare
            self.grad_store.take(shard, own)
            self.grad_shard = shard
        elif self._reduced_before is None:
            self.grad_shard.add_(own)
        else:
            (before, event), self._reduced_before = self._reduced_before, None
            self.grad_store.meet(event)
            self.grad_store.take(self.grad_shard, before.add_(own), lasting=True)
        free(self.grad)

    def drop_gradients(self) -> None:
        """The step's gradients are not needed any more; their store is settled."""
        free(self.grad)
        self._reduced_before = None
        if self.grad_shard is not None:
            self._spare = self.grad_shard if self.grad_store.on_host else None
        self.grad_shard = None


def free(tensor: torch.Tensor) -> None:
    """Give back the memory of all views of `tensor`; they stay what they are, without content."""
    tensor.untyped_storage().resize_(0)


def storage_of(tensor: torch.Tensor) -> int:
    """A number for the memory of `tensor` and its views; not its address, which is 0 for all that are freed."""
    return tensor.untyped_storage()._cdata


def fill(tensor: torch.Tensor) -> None:
    """Memory again, uninitialised, for what `free` has freed."""
    refill(tensor)

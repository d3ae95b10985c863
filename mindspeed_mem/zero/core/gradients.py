"""Gradients of chunks: made whole when the first one arrives, reduced when the last one has, kept as shards.

At most one chunk is being reduced while others are computed, so that whole gradients are there for few chunks only.
A reduction is collective. Ranks start them in one order: the one recorded, or as long as there is none, a chunk's when
it is complete on all ranks; if it is not (a gradient may never come on some rank), at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
import torch.distributed as dist

from mindspeed_mem.zero.core.chunk import Chunk
from mindspeed_mem.zero.core.use_order import Act, Intent, UseOrder


class Waitable(Protocol):
    def wait(self) -> object: ...


class GradientShards:
    """The gradients of some chunks.

    Args:
        chunks: each has a whole `grad`.
        reduce: starts to reduce a chunk's whole gradient, so that this rank's part of it holds the result; returns what
            to wait for, or None if it is done.
        order: records and repeats the order of reductions among uses of chunks.
        at_end: parameters whose gradient may come in several parts in one backward; their chunks are reduced at the
            end of the step.
    """

    def __init__(
        self,
        chunks: Iterable[Chunk],
        reduce: Callable[[Chunk], Waitable | None],
        order: UseOrder,
        at_end: Iterable[torch.nn.Parameter] = (),
    ) -> None:
        self._reduce, self._order = reduce, order
        self._chunk_of = {param: chunk for chunk in chunks for param in chunk.params}
        self._at_end = {self._chunk_of[param] for param in at_end}
        self._by_number = {chunk.index: chunk for chunk in self._chunk_of.values()}
        self._ready: dict[Chunk, set[torch.nn.Parameter]] = {}
        self._reducing: tuple[Chunk, Waitable] | None = None
        self._to_reduce: dict[Chunk, None] = {}
        self._put_off: set[dist.ProcessGroup] = set()
        """Groups whose ranks do not complete chunks alike in this step: all that is left is reduced at its end."""
        order.reducers.update(dict.fromkeys(self._by_number, self))
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self._finish()
        for store in {chunk.grad_store for chunk in self._by_number.values()}:
            store.settle()  # a step may have been broken off
        for chunk in self._by_number.values():
            chunk.drop_gradients()
        self._ready = {chunk: set() for chunk in self._by_number.values()}
        self._to_reduce = dict.fromkeys(self._ready)
        self._put_off.clear()

    def before(self, param: torch.nn.Parameter) -> None:
        """A gradient of `param` is about to be added to the whole gradient of its chunk."""
        chunk = self._chunk_of.get(param)
        if chunk is None:
            return
        if self._reducing is not None and not (chunk.has_gradients and self._reducing[0] is not chunk):
            # A parameter whose gradient comes in several parts; or a third chunk with a whole gradient.
            if self._reducing[0] is chunk or any(one.has_gradients for one in self._to_reduce):
                self._finish()
        chunk.open_gradients()
        self._to_reduce[chunk] = None

    def after(self, param: torch.nn.Parameter, last: bool) -> None:
        """It has been added; `last`: no other micro-batch will add to it in this step."""
        chunk = self._chunk_of.get(param)
        if chunk is None or not last:
            return
        self._ready[chunk].add(param)
        if self.is_complete(chunk.index) and self._order.complete(chunk.index):
            self._start(chunk, Act.REDUCE)

    def start(self, chunk: Chunk) -> None:
        """Reduce `chunk`, also if some of its gradients never came, unless that has been done. Collective.

        All ranks call this for all chunks in the same order, after the step's last backward.
        """
        if chunk in self._to_reduce:
            self._order.last_call(chunk.index)
        if chunk in self._to_reduce:
            self._start(chunk, Act.REDUCE_LAST)

    def finish(self, chunk: Chunk) -> None:
        """Have the reduced shard of `chunk` in its place, for anybody. Collective if it has not been started."""
        self.start(chunk)
        if self._reducing is not None and self._reducing[0] is chunk:
            self._finish()
        chunk.grad_store.settle()

    # ---- as a `use_order.Reducer`

    def is_complete(self, number: int) -> bool:
        chunk = self._by_number[number]
        known = chunk in self._to_reduce and chunk not in self._at_end
        return known and len(self._ready[chunk]) == len(chunk.pieces)

    def start_number(self, number: int) -> None:
        chunk = self._by_number[number]
        if chunk in self._to_reduce:
            self._start(chunk, Act.REDUCE)

    def missing(self, number: int) -> str:
        chunk = self._by_number[number]
        shapes = [str(tuple(param.shape)) for param in chunk.params if param not in self._ready[chunk]]
        return f"{chunk.label} (gradients of shape {', '.join(shapes)})"

    # ---- inside

    def _start(self, chunk: Chunk, act: Act) -> None:
        put_off = act is Act.REDUCE and chunk.group in self._put_off
        if put_off or not self._order.may_do(Intent(act, chunk.number_in_group), chunk.group, chunk.grad.device):
            self._put_off.add(chunk.group)
            return
        self._order.reduction(chunk.index)
        del self._to_reduce[chunk]
        self._ready[chunk].clear()
        self._finish()
        chunk.open_gradients()
        chunk.fetch_gradients()
        work = self._reduce(chunk)
        if work is None:
            chunk.keep_gradients()
        else:
            self._reducing = chunk, work

    def _finish(self) -> None:
        if self._reducing is None:
            return
        chunk, work = self._reducing
        self._reducing = None
        work.wait()
        chunk.keep_gradients()

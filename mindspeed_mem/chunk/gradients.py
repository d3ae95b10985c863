"""Gradients of chunks: made whole when the first one arrives, reduced when the last one has, kept as shards.

At most one chunk is being reduced while others are computed, so that whole gradients are there for few chunks only.
A reduction is collective: it starts when the chunk is complete, which all ranks reach in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from mindspeed_mem.chunk.chunk import Chunk


class Waitable(Protocol):
    def wait(self) -> object: ...


class GradientShards:
    """The gradients of some chunks.

    Args:
        chunks: each has a whole `grad`.
        reduce: starts to reduce a chunk's whole gradient, so that this rank's part of it holds the result; returns what
            to wait for, or None if it is done.
    """

    def __init__(self, chunks: Iterable[Chunk], reduce: Callable[[Chunk], Waitable | None]) -> None:
        self._reduce = reduce
        self._chunk_of = {param: chunk for chunk in chunks for param in chunk.params}
        self._ready: dict[Chunk, set[torch.nn.Parameter]] = {}
        self._reducing: tuple[Chunk, Waitable] | None = None
        self._to_reduce: dict[Chunk, None] = {}
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self._finish()
        for chunk in dict.fromkeys(self._chunk_of.values()):
            chunk.drop_gradients()
        self._ready = {chunk: set() for chunk in self._chunk_of.values()}
        self._to_reduce = dict.fromkeys(self._ready)

    def before(self, param: torch.nn.Parameter) -> None:
        """A gradient of `param` is about to be added to the whole gradient of its chunk."""
        chunk = self._chunk_of.get(param)
        if chunk is None:
            return
        if self._reducing is not None and self._reducing[0] is chunk:
            self._finish()  # a parameter whose gradient comes in several parts
        chunk.open_gradients()
        self._to_reduce[chunk] = None

    def after(self, param: torch.nn.Parameter, last: bool) -> None:
        """It has been added; `last`: no other micro-batch will add to it in this step."""
        chunk = self._chunk_of.get(param)
        if chunk is None or not last:
            return
        self._ready[chunk].add(param)
        if len(self._ready[chunk]) == len(chunk.pieces):
            self.start(chunk)

    def start(self, chunk: Chunk) -> None:
        """Reduce `chunk`, also if some of its gradients never came, unless that has been done. Collective."""
        if chunk not in self._to_reduce:
            return
        del self._to_reduce[chunk]
        self._ready[chunk].clear()
        self._finish()
        chunk.open_gradients()
        work = self._reduce(chunk)
        if work is None:
            chunk.keep_gradients()
        else:
            self._reducing = chunk, work

    def finish(self, chunk: Chunk) -> None:
        """Have the reduced shard of `chunk` in its place. Collective if it has not been started."""
        self.start(chunk)
        if self._reducing is not None and self._reducing[0] is chunk:
            self._finish()

    def _finish(self) -> None:
        if self._reducing is None:
            return
        chunk, work = self._reducing
        self._reducing = None
        work.wait()
        chunk.keep_gradients()

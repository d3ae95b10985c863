"""Chunk ZeRO as it runs in this process: its settings, the one residency, and the models that take part."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch

from mindspeed_mem.chunk import hooks, settings
from mindspeed_mem.chunk.buckets import BucketChunks
from mindspeed_mem.chunk.chunk import Chunk
from mindspeed_mem.chunk.residency import Residency
from mindspeed_mem.chunk.search import search_bucket_size
from mindspeed_mem.chunk.settings import ChunkSettings

logger = logging.getLogger(__name__)


class BudgetError(ValueError):
    """The budget for gathered parameters is less than one module needs; the message says how much that is."""


class Runtime:
    """One run of chunk ZeRO, from its first model on."""

    def __init__(self, given: ChunkSettings) -> None:
        self.settings = given
        self.residency = Residency(given.placement.budget)
        self._models: WeakSet[BucketChunks] = WeakSet()
        self.hidden_size = 1024
        """Of the model at hand."""
        self._settled = 0

    def bucket_size(self, params: Sequence[torch.nn.Parameter], ranks: int) -> int:
        """Elements after which a bucket of these parameters, in the model's order, is closed."""
        given = self.settings
        return search_bucket_size(
            [param.numel() for param in params],
            ranks,
            range_elements=given.search_range,
            minimum_elements=given.min_chunk_size,
            step_elements=given.hidden_size or self.hidden_size,
            alone=[place for place, param in enumerate(params) if getattr(param, "shared_embedding", False)],
        ).target_elements

    def add(self, ddp: Any, chunks: BucketChunks) -> None:
        """`chunks` are those of `ddp`; with it they go."""
        self._models.add(chunks)
        weakref.finalize(ddp, _remove, self.residency, chunks.chunks).atexit = False

    # ---- passes

    def begin(self, key: Hashable) -> None:
        """A pipeline schedule starts; `key` tells its kind."""
        self._settle_budget()
        self.residency.begin(key)

    def end(self, completed: bool) -> None:
        """It is over."""
        self.residency.end(completed)

    def _settle_budget(self) -> None:
        """Once all models are there: check the budget given, or choose what one use and the next chunk need."""
        chunks = self.residency.chunks
        if len(chunks) == self._settled or not chunks:
            return
        self._settled = len(chunks)
        models = [one for one in self._models if one.stage == 3]
        least = max(self.residency.largest_use(hooks.uses(one.module)) for one in models)
        given = self.settings.placement.budget
        if given is None:
            self.residency.budget = least + max(chunk.nbytes for chunk in chunks)
        elif given < least:
            raise BudgetError(
                f"--placement-policy {self.settings.placement.policy}:{given}: one module reads parameters in chunks of "
                f"{least} bytes at once. Give at least {least} bytes ({least + max(c.nbytes for c in chunks)} to fetch the "
                "next chunk meanwhile), or smaller chunks (--min-chunk-size-mib)"
            )


def _remove(residency: Residency, chunks: Iterable[Chunk]) -> None:
    for chunk in chunks:
        if chunk in residency.chunks:
            residency.remove(chunk)


_current: Runtime | None = None


def current() -> Runtime | None:
    """What runs now; None where chunk ZeRO is off."""
    global _current
    given = settings.current()
    if given.stage == 0:
        _current = None
    elif _current is None or _current.settings != given:
        _current = Runtime(given)
    return _current

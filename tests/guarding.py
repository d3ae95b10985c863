"""What tests of the guard around single operators share: limited memory, and something to make room of."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_mem.device import get_backend
from mindspeed_mem.device.limited_cpu import CompilerError, LimitedMemory
from mindspeed_mem.device.op_guard import OpGuard

N = 4096  # elements


class Sandbag:
    """Memory that can be given up, piece by piece."""

    def __init__(self, memory, pieces=64):
        self.memory, self.asked, self.pinned = memory, [], []
        self.pieces = [torch.empty(N, dtype=torch.uint8) for _ in range(pieces)]

    def make_room(self, nbytes, pinned):
        self.asked.append(nbytes)
        self.pinned.append(pinned)
        freed = 0
        while self.pieces and freed < nbytes:
            freed += self.pieces.pop().numel()
        return freed


class GaveUp(torch.OutOfMemoryError):
    pass


@contextlib.contextmanager
def limited_memory() -> Iterator[LimitedMemory]:
    """The CPU backend's memory is counted; skips the test where that cannot be built."""
    try:
        limited = LimitedMemory()
    except CompilerError as error:
        pytest.skip(str(error))
    backend = get_backend("cpu")
    backend.attach_ledger(limited)
    gc.collect()  # what earlier tests left in cycles is counted, and would make room in the middle of a test
    try:
        with limited:
            yield limited
    finally:
        backend.attach_ledger(None)


def settled(memory: Any) -> int:
    """Bytes allocated by a `LimitedMemory` or backend when all is gone that earlier code has let go of: what lies in
    cycles, and what gloo's threads still hold of what they have sent. To be compared with later figures."""
    read = memory.allocated if callable(memory.allocated) else lambda: memory.allocated
    gc.collect()
    before, now = None, read()
    while now != before and dist.is_available() and dist.is_initialized():
        time.sleep(0.05)
        before, now = now, read()
    return now


def guarded(sandbag):
    return OpGuard(get_backend("cpu"), sandbag.make_room, lambda op, nbytes, why: GaveUp(f"{op}: {nbytes}: {why}"))


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

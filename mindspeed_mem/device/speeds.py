"""What the device at hand does: its memory, matrix products, moves within its memory, copies to the host and back."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from mindspeed_mem.device.base import Backend, Event, Stream
from mindspeed_mem.device.host_memory import ranks_here
from mindspeed_mem.device.link_speed import measure_link

_SIDES = (8192, 4096, 2048, 1024)  # of square matrices; the best counts, smaller where the first would take too long
_LONGEST = 1.0  # seconds for one operator
_MOVED = 2**28  # bytes


def measure(backend: Backend[Stream, Event]) -> dict[str, float]:
    """Speeds of this process's device by their names in a table of devices, and ``memory_gib``.

    Where torchrun started several processes on this host, copies are timed by the first alone and by all at once, of
    which the slowest counts; they have to call this together.
    """
    backend.use_device_of_rank()
    found = {"tflops": _products(backend), "memory_gbps": _moves(backend)}
    ranks = ranks_here()
    if ranks > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    alone = None
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        alone = measure_link(backend)
    if ranks > 1:
        torch.distributed.barrier()
        all_at_once = measure_link(backend)
        slowest = torch.tensor(min(all_at_once.out, all_at_once.back), dtype=torch.float64)
        torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MIN)
        found["link_all_gbps"] = float(slowest)
    if alone is not None:
        found["link_alone_gbps"] = min(alone.out, alone.back)
    limit = backend.limit()
    if limit is not None:
        found["memory_gib"] = limit / 2**30
    return found


def _products(backend: Backend[Stream, Event]) -> float:
    """TFLOP/s of bf16 matrix products, the best of a few sizes."""
    best = 0.0
    for side in reversed(_SIDES):
        one, other = (backend.empty(2 * side**2).view(torch.bfloat16).view(side, side).fill_(0.5) for _ in range(2))
        product = torch.empty_like(one)
        seconds = _seconds(backend, lambda: torch.mm(one, other, out=product))  # noqa: B023  # called at once
        best = max(best, 2 * side**3 / seconds / 1e12)
        if 8 * seconds > _LONGEST:  # so much longer does the next one take
            break
    return best


def _moves(backend: Backend[Stream, Event]) -> float:
    """GB/s read and written while a tensor is copied within the device."""
    source, target = (backend.empty(_MOVED).fill_(1) for _ in range(2))
    return 2 * _MOVED / _seconds(backend, lambda: target.copy_(source)) / 1e9


def _seconds(backend: Backend[Stream, Event], work: Callable[[], object], rounds: int = 5) -> float:
    """The least that `work` takes, after one run to warm up."""
    work()
    times = []
    for _ in range(rounds):
        backend.synchronize()
        begin = backend.timestamp()
        work()
        backend.synchronize()
        times.append(backend.seconds_between(begin, backend.timestamp()))
        if sum(times) > _LONGEST:
            break
    return max(min(times), 1e-9)

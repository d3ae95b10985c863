"""How fast bytes go from a device to the host and back, while nothing is computed and beside matrix products.

To be called by all ranks of a host at once, since they share its memory and often a link: what each then gets is what
it will get in training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from mindspeed_mem.device.base import Backend, Stream

_LEAST = 2**12  # bytes, for devices that are as good as full; so little shows a copy's start-up more than its speed
_SIDE = 2048  # of the square matrices multiplied meanwhile: enough to fill a device, and no longer than a launch
_PRODUCTS = 256  # queued at most: a device's queue is finite, and the host must not wait in it
_LONG = 1e-3  # seconds of a product after which nothing else of what the host does counts


class LinkSpeed(NamedTuple):
    """GB/s (1e9 bytes); of one rank, with its neighbours copying as well."""

    out: float
    """Device to host, beside computation."""
    back: float
    """Host to device, beside computation."""
    out_alone: float
    back_alone: float
    blocking: bool = False
    """Computation stands still while anything is copied; then the two kinds are the same."""


def measure_link(
    backend: Backend, nbytes: int = 64 * 2**20, rounds: int = 5, seconds: float = 0.3, beside: bool = True
) -> LinkSpeed:
    """Copy ``nbytes`` (less where device memory is tight) out and back, up to ``rounds`` times, and take the medians.

    After ``seconds`` no further round begins. Without ``beside`` nothing is computed, and the speeds beside computation
    are those without. What it allocates is freed again. Raises the device's out-of-memory error where there is no room
    for 4 KiB.
    """
    rounds = max(rounds, 1)
    with _on_device(backend, nbytes, beside) as (memory, matrices):
        ends = [backend.host_empty(memory.numel()) for _ in range(2)]
        stream = backend.new_stream("link")
        for buffer in (*ends, memory):  # what nobody has written to yet has no pages
            buffer.fill_(1)
        backend.synchronize()
        directions = ((ends[0], memory), (memory, ends[1]))
        for pair in directions:
            _copy(backend, pair, stream)
        alone: list[list[float]] = [[], []]
        loaded: list[list[float]] = [[], []]
        deadline = time.perf_counter() + seconds
        for number in range(rounds):
            if number and time.perf_counter() > deadline:
                break
            for index, pair in enumerate(directions):
                alone[index].append(_copy(backend, pair, stream))
                if matrices is not None:
                    loaded[index].append(_copy_beside(backend, pair, stream, matrices, alone[index][-1]))
        nbytes = memory.numel()
    speeds = [nbytes / statistics.median(times) / 1e9 for times in (*alone, *(loaded if all(loaded) else alone))]
    return LinkSpeed(speeds[2], speeds[3], speeds[0], speeds[1], backend.copies_block)


@contextmanager
def _on_device(backend: Backend, nbytes: int, beside: bool) -> Iterator[tuple[torch.Tensor, list[torch.Tensor] | None]]:
    """A buffer of at most ``nbytes`` and, where copies may run ``beside`` computation, two matrices and room for their
    product.

    Freed at the end, when all that used it is done.
    """
    room = backend.room()
    if room is not None:
        nbytes = max(min(nbytes, room // 4), _LEAST)  # an attempt that fails may cost the device its cached memory
    while True:
        memory = matrices = None
        try:
            memory = backend.empty(nbytes)
            if beside and memory.device.type != "cpu":  # where the device computes by itself
                matrices = [backend.empty(2 * _SIDE**2).view(torch.float16).view(_SIDE, _SIDE) for _ in range(3)]
            break
        except (RuntimeError, MemoryError) as error:
            if not backend.is_out_of_memory(error):
                raise
            if nbytes <= _LEAST and memory is not None:
                matrices = None  # what copies lose beside computation is then not known
                break
            if nbytes <= _LEAST:
                raise
        nbytes = max(nbytes // 2, _LEAST)
    for matrix in matrices or ():
        matrix.fill_(0.5)
    try:
        yield memory, matrices
    finally:
        backend.synchronize()


def _copy(backend: Backend, pair: tuple[torch.Tensor, torch.Tensor], stream: Stream) -> float:
    """Seconds that one copy takes."""
    begin = backend.timestamp(stream)
    backend.copy(*pair, stream)
    end = backend.timestamp(stream)
    backend.synchronize(backend.record(stream))
    return max(backend.seconds_between(begin, end), 1e-9)


def _copy_beside(
    backend: Backend,
    pair: tuple[torch.Tensor, torch.Tensor],
    stream: Stream,
    matrices: list[torch.Tensor],
    alone: float,
) -> float:
    """The same while the device multiplies matrices for at least twice as long as the copy takes ``alone``."""
    one, other, product = matrices

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(one, other, out=product)

    def seconds_of_each(times: int) -> float:
        begin = backend.timestamp()
        multiply(times)
        return max(backend.seconds_between(begin, backend.timestamp()) / times, 1e-7)

    each = seconds_of_each(1)
    if each < _LONG:
        each = seconds_of_each(8)  # which the first launch hides
    multiply(min(int(2 * alone / each) + min(8, int(_LONG / each) + 1), _PRODUCTS))
    found = _copy(backend, pair, stream)
    backend.synchronize()
    return found

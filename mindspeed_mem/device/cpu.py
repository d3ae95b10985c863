"""The host as a device: copies happen at once, streams and events are formalities, host buffers are numpy's."""

from __future__ import annotations

import os
import platform
import time
import warnings
from contextlib import AbstractContextManager

import numpy
import torch

from mindspeed_mem.device.base import AnyEvent, AnyStream, Backend, Event, Stream, check_copy, check_limit
from mindspeed_mem.device.ledger import DeviceLedger
from mindspeed_mem.device.limited_cpu import CompilerError, LimitedMemory

_STREAM = Stream("cpu", "cpu", side=False)
DONE = Event()


def why_absent() -> str | None:
    """Nothing: it is always there."""
    return None


class HostBackend(Backend[AnyStream, AnyEvent]):
    """The host's memory as a device's; streams and events are a subclass's.

    Device memory is what an attached `DeviceLedger` or `LimitedMemory` counts; host buffers are numpy's: outside it.
    """

    tensor_type = "cpu"
    is_host = sums_float64 = fuses_adam = True

    def __init__(self) -> None:
        self.ledger: DeviceLedger | LimitedMemory | None = None
        self._own_memory: LimitedMemory | None = None  # attached by limit_memory
        self._unenforced: int | None = None

    def attach_ledger(self, ledger: DeviceLedger | LimitedMemory | None) -> None:
        """Answer `allocated`, `peak` and `limit` from `ledger` from now on; None detaches it."""
        self.ledger = ledger

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def host_empty(self, nbytes: int) -> torch.Tensor:
        return torch.from_numpy(numpy.empty(nbytes, dtype=numpy.uint8))

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def allocated(self) -> int | None:
        return None if self.ledger is None else self.ledger.allocated

    def peak(self) -> int | None:
        return None if self.ledger is None else self.ledger.peak

    def reset_peak(self) -> None:
        if self.ledger is not None:
            self.ledger.reset_peak()

    def limit(self) -> int | None:
        return self._unenforced if self.ledger is None else self.ledger.limit

    def limit_memory(self, nbytes: int | None) -> None:
        """See `Backend.limit_memory`. Counted is what torch's CPU allocator hands out from the first call on.

        Where a C++ compiler is missing, there is one warning, and the limit is only the number that `limit` returns:
        nothing is refused, and `allocated` stays None. A `DeviceLedger` that is attached refuses nothing either.
        """
        check_limit(nbytes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this host")
        self._unenforced = None
        if nbytes is None and self._own_memory is not None:
            if self.ledger is self._own_memory:
                self.attach_ledger(None)
            self._own_memory.__exit__()
            self._own_memory = None
        if nbytes is not None and self.ledger is None:
            try:
                self._own_memory = LimitedMemory().__enter__()
            except CompilerError as error:
                self._unenforced = nbytes
                warnings.warn(f"cpu: the memory limit is not enforced: {error}", RuntimeWarning, stacklevel=2)
            else:
                self.attach_ledger(self._own_memory)
        if self.ledger is not None:
            self.ledger.limit = nbytes

    def is_out_of_memory(self, exc: BaseException) -> bool:
        # torch's own CPU allocator raises a plain RuntimeError; an allocator with a limit raises the real type.
        return isinstance(exc, (torch.OutOfMemoryError, MemoryError)) or (
            isinstance(exc, RuntimeError) and "DefaultCPUAllocator" in str(exc)
        )

    def on_host(self) -> AbstractContextManager:
        return self.ledger.on_host() if isinstance(self.ledger, LimitedMemory) else super().on_host()

    def rng_state(self, index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, index: int | None = None) -> None:
        torch.set_rng_state(state)

    def describe(self) -> dict[str, object]:
        return super().describe() | {
            "device": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
        }


class CpuBackend(HostBackend[Stream, Event]):
    """The CPU: everything has happened when a call returns."""

    type = "cpu"
    copies_block = one_stream = True

    def __init__(self) -> None:
        super().__init__()
        self._copy_seconds = 0.0

    def current_stream(self) -> Stream:
        return _STREAM

    def stream_key(self) -> object:
        return None

    def new_stream(self, name: str) -> Stream:
        return Stream(object(), name, side=True)

    def record(self, stream: Stream) -> Event:
        return DONE

    def wait(self, stream: Stream, event: Event, reason: str) -> None:
        pass

    def done(self, event: Event) -> bool:
        return True

    def synchronize(self, event: Event | None = None) -> None:
        pass

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        check_copy(target, source)
        begin = time.perf_counter()
        target.data.copy_(source)  # .data: a version counter of its own; tensor.copy_: releases the GIL
        self._copy_seconds += time.perf_counter() - begin

    def stall_seconds(self) -> float:
        return self._copy_seconds

"""NVIDIA (and ROCm) GPUs through torch.cuda; host buffers are plain pages registered with the driver."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import weakref
from collections.abc import Hashable
from typing import Any

import numpy
import torch

from mindspeed_mem.device.accelerator import AcceleratorBackend


def why_absent() -> str | None:
    """Why no GPU can be used here; None when one can."""
    # torch.cuda may be replaced by host stand-ins on a CPU run, so its answer alone counts for nothing.
    if not torch.backends.cuda.is_built() or not (torch.version.cuda or torch.version.hip):
        return f"this torch ({torch.__version__}) is built without CUDA"
    if not torch.cuda.is_available():
        return "torch.cuda finds no GPU (see nvidia-smi and CUDA_VISIBLE_DEVICES)"
    return None


_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of this process
# Of a convolution, also where torch's allocator has refused all of cuDNN's plans their workspaces: torch swallows that
# (Conv_v8.cpp, Conv_v7.cpp).
_NO_PLAN = r"unable to find an engine to execute|unable to find a valid cuDNN algorithm"


class CudaBackend(AcceleratorBackend):
    """The current GPU of this process."""

    type, collectives = "cuda", "nccl"
    allocator_variables = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    sums_float64 = fuses_adam = True
    driver_full = re.compile(
        r"_STATUS_ALLOC(?:ATION)?_FAILED|DEVICE_ALLOCATION_FAILED|CUFFT_ALLOC_FAILED|miopenStatusAllocFailed"
        r"|rocblas_status_memory_error|(?:cuda|hip)ErrorMemoryAllocation|hipErrorOutOfMemory"
        r"|\b(?:CUDA|HIP)\b[^\n]{0,40}\bout of memory|CUDA_ERROR_OUT_OF_MEMORY|Failed to CUDA [cm]alloc"
        r"|resource allocation failed when calling `?cusparse|MAGMA[^\n]*cannot allocate memory on GPU device",
        re.IGNORECASE,
    )
    # The first, and cuSPARSE's initialization error, of a handle that could not be made.
    perhaps_full = re.compile(
        r"_STATUS_NOT_INITIALIZED|_STATUS_INSUFFICIENT_RESOURCES"
        rf"|(?:initialization error|insufficient resources) when calling `?cusparse|{_NO_PLAN}",
        re.IGNORECASE,
    )

    _refused = 0  # requests to torch's allocator, when that was looked at last

    def __init__(self) -> None:
        super().__init__(torch.cuda)

    def is_out_of_memory(self, exc: BaseException) -> bool:
        # Under a limit the driver has memory left when torch's allocator refuses some: its own count tells.
        refused = torch.cuda.memory_stats_as_nested_dict().get("num_ooms", 0)
        lately, self._refused = refused not in (0, self._refused), refused
        if lately and isinstance(exc, RuntimeError) and re.search(_NO_PLAN, str(exc), re.IGNORECASE):
            return True
        return super().is_out_of_memory(exc)

    def stream_key(self) -> Hashable:
        return torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())  # without making a stream object of it

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def begin_range(self, name: str) -> Any:
        with contextlib.suppress(RuntimeError):  # this torch is built without NVTX
            return torch.cuda.nvtx.range_start(name)
        return None

    def end_range(self, begun: Any) -> None:
        if begun is not None:
            torch.cuda.nvtx.range_end(begun)

    def _pinned(self, nbytes: int) -> torch.Tensor:
        # torch's pinned allocator rounds up to a power of two, which nearly doubles the host memory of some sizes.
        buffer = _registered(nbytes) if nbytes else torch.empty(0, dtype=torch.uint8, device="cpu")
        return super()._pinned(nbytes) if buffer is None else buffer

    def describe(self) -> dict[str, object]:
        return super().describe() | {"cuda": torch.version.cuda or torch.version.hip}


def _registered(nbytes: int) -> torch.Tensor | None:
    """uint8[nbytes] in pages of its own, pinned by registration; None when the driver refuses."""
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"host buffer of {nbytes} bytes: {error}") from error
    # Fewer pages to pin: registering is several times faster; and a forked data loader must not copy pinned pages.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with contextlib.suppress(AttributeError, OSError):  # a kernel may be built without either
            pages.madvise(getattr(mmap, advice))
    array = numpy.frombuffer(pages, dtype=numpy.uint8)
    address = array.ctypes.data
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(address, nbytes, _PORTABLE)) != 0:
        _forget_error()
        return None
    # The tensor's storage holds the array, the array its pages: at the array's end they are still mapped.
    weakref.finalize(array, _unregister, runtime, address, os.getpid()).atexit = False
    return torch.from_numpy(array)


def _forget_error() -> None:
    """The runtime remembers a refused call and blames the next kernel for it; let a kernel of no account take that."""
    try:
        torch.empty(1, device="cuda").fill_(0)
    except RuntimeError:
        pass


def _unregister(runtime: Any, address: int, process: int) -> None:
    if os.getpid() == process:  # a forked child inherits the finalizer but not the registration
        runtime.cudaHostUnregister(address)

"""Ascend NPUs through torch_npu's public API (torch.npu).

Not run on hardware: this file was written against torch_npu's sources (what is said of it below was read in v2.6.0 and
v2.7.1, and holds up to v2.12.0), and is tested with stand-ins. Treat the first run on an NPU as its first run.

torch_npu hands work to a thread of its own, which launches it (TASK_QUEUE_ENABLE, 1 unless told). Records and waits
travel in that queue in the order in which they were asked for, and CANN's wait means the record before it
(aclrtRecordEvent's documentation), so events can be used again. Not with PER_STREAM_QUEUE: there each stream has a
queue, and a wait may be launched after a later record of the event that it waits for. `query` of an event does not wait
for the queue to be empty; `elapsed_time` and the hash of a stream do (NPUEvent.cpp, NPUStream::stream).
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable
from typing import Any

import torch

from mindspeed_mem import reserve
from mindspeed_mem.device.accelerator import AcceleratorBackend


def why_absent() -> str | None:
    """Why no NPU can be used here; None when one can."""
    try:
        import torch_npu  # noqa: F401  (importing it is what makes torch.npu exist)
    except (ImportError, OSError, RuntimeError) as error:  # a CANN toolkit that is missing or does not match
        if isinstance(error, ModuleNotFoundError) and error.name == "torch_npu":
            return "torch_npu is not installed"
        return f"torch_npu cannot be imported ({error})"
    if not torch.npu.is_available():  # type: ignore[attr-defined]  # torch_npu adds it
        return "torch_npu finds no NPU (see npu-smi info)"
    return None


_QUEUE_IS_LOST = "process exits for this inner error"


class NpuBackend(AcceleratorBackend):
    """The current NPU of this process."""

    type, collectives = "npu", "hccl"
    allocator_variables = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    runs_mindspeed = True
    # 207001 is ACL's; EI0007 is what HCCL reports of a resource that it got none of, whatever kind
    driver_full = re.compile(
        r"\bNPU\b[^\n]{0,40}\bout of memory|ACL_ERROR_RT_MEMORY_ALLOCATION|\b207001\b|\bEI0007\b[^\n]*DeviceMemory"
        r"|Reason: out of memory",
        re.IGNORECASE,
    )
    perhaps_full = re.compile(r"HCCL_E_MEMORY|\bEI0007\b|HCCL function error[^\n]*error code is 3\b")

    reading_waits = True

    def __init__(self) -> None:
        import torch_npu

        super().__init__(torch.npu)  # type: ignore[attr-defined]  # torch_npu adds it
        self._version = torch_npu.__version__
        self._current: Any = torch_npu._C._npu_getCurrentStream
        settings = (os.environ.get(name, "") for name in self.allocator_variables)  # torch_npu and torch read one each
        self._expandable = any("pin_memory_expandable_segments:True" in text for text in settings)
        self.reuses_events = os.environ.get("PER_STREAM_QUEUE", "0") in ("", "0")

    def stream_key(self) -> Hashable:
        return self._current(self._module.current_device())  # without making a stream object of it

    def begin_range(self, name: str) -> Any:
        return self._module.mstx.range_start(name, self._module.current_stream())

    def end_range(self, begun: Any) -> None:
        if begun is not None:
            self._module.mstx.range_end(begun)

    def host_bytes(self, nbytes: int) -> int:
        # torch_npu's pinned allocator of 2.6, and torch's own since 2.7.1, round to powers of two; an expandable one,
        # where CANN and the driver know it, hardly (CachingHostAllocator.cpp).
        return nbytes if self._expandable or not nbytes else 1 << (nbytes - 1).bit_length()

    def free_host(self) -> None:
        empty = getattr(self._module, "host_empty_cache", None)  # not in the first torch_npu 2.6
        if empty is not None:
            empty()

    def is_out_of_memory(self, exc: BaseException) -> bool:
        # What the launching thread could not do is raised by whatever comes next, be it an OutOfMemoryError: the queue
        # has been thrown away by then, and drops silently all that it is given later (NPUQueue.cpp, ReadQueue and
        # Enqueue). To go on would be to train on garbage.
        return _QUEUE_IS_LOST not in str(exc) and super().is_out_of_memory(exc)

    def is_from_driver(self, exc: BaseException) -> bool:
        # CANN's own lack of memory is an OutOfMemoryError, too (NPUException.h); the allocator says how much it wanted.
        return not self.bytes_wanted(exc)

    def _reserve(self) -> int:
        # With TASK_QUEUE_ENABLE=2 workspaces are taken by the launching thread, beside torch's allocator and its limit
        # (NPUWorkspaceAllocator.cpp); otherwise through it, by the operator.
        workspaces = os.environ.get("TASK_QUEUE_ENABLE") == "2"
        return super()._reserve() + (reserve.workspaces(self._total()) if workspaces else 0)

    def describe(self) -> dict[str, object]:
        return super().describe() | {"torch_npu": self._version}

"""Ascend NPUs through torch_npu's public API (torch.npu).

Not run on hardware: this file was written against torch_npu's documented interface, which mirrors torch.cuda's, and is
tested with a stand-in module only. Treat the first run on an NPU as its first run.
"""

from __future__ import annotations

import re

import torch

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


class NpuBackend(AcceleratorBackend):
    """The current NPU of this process."""

    type, collectives = "npu", "hccl"
    runs_mindspeed = True
    # 207001 is ACL's; EI0007 is what HCCL reports of a resource that it got none of, whatever kind
    driver_full = re.compile(
        r"\bNPU\b[^\n]{0,40}\bout of memory|ACL_ERROR_RT_MEMORY_ALLOCATION|\b207001\b|\bEI0007\b[^\n]*DeviceMemory"
        r"|Reason: out of memory",
        re.IGNORECASE,
    )
    perhaps_full = re.compile(r"HCCL_E_MEMORY|\bEI0007\b|HCCL function error[^\n]*error code is 3\b")

    def __init__(self) -> None:
        import torch_npu

        super().__init__(torch.npu)  # type: ignore[attr-defined]  # torch_npu adds it
        self._version = torch_npu.__version__

    def describe(self) -> dict[str, object]:
        return super().describe() | {"torch_npu": self._version}

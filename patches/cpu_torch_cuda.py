"""torch.cuda answers for the host: the device's identity, its memory figures, waiting, profiling markers.

`torch.cuda.is_available()` stays False, so that torch's own code keeps to its CPU paths. Replaced is only what Megatron
calls; everything is looked up at call time, so Megatron may have been imported before or after.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

from mindspeed_mem.device.host_memory import ranks_here
from mindspeed_mem.patching import around

_PAGE = os.sysconf("SC_PAGE_SIZE")


@around("torch.cuda:current_device")
def _current_device(original):
    """A device, as torch.cpu.current_device() answers: what is made with ``device=`` this lands on the host."""
    return "cpu"


@around("torch.cuda:device_count")
def _device_count(original):
    """The launcher's ranks on this machine: Megatron sets up no parallel groups when there are 0 devices."""
    return ranks_here()


@around("torch.cuda:get_device_properties")
def _get_device_properties(original, *args, **kwargs):
    """The host's memory, and no compute capability: what asks for one stays off."""
    return SimpleNamespace(
        name="cpu",
        major=0,
        minor=0,
        total_memory=_PAGE * os.sysconf("SC_PHYS_PAGES"),
        multi_processor_count=os.cpu_count() or 1,
    )


@around("torch.cuda:get_device_capability")
def _get_device_capability(original, *args, **kwargs):
    """As above."""
    return 0, 0


@around("torch.cuda.memory:memory_stats")
def _memory_stats(original, *args, **kwargs):
    """The process's resident memory, parameters and the interpreter included: torch counts nothing on the host.

    memory_allocated, memory_reserved and their max_* forms read this dictionary.
    """
    now = _resident()
    peak = max(now, _resident_peak())
    figures = {"num_alloc_retries": 0, "num_ooms": 0, "allocation.all.current": 0}
    for kind in ("allocated", "reserved", "active"):
        figures |= {f"{kind}_bytes.all.current": now, f"{kind}_bytes.all.peak": peak}
    return figures


def _nothing(original, *args, **kwargs):
    return 0


for _name in (
    "torch.cuda:set_device",  # there is one host
    "torch.cuda:synchronize",  # which has finished what it was called for
    "torch.cuda.memory:reset_peak_memory_stats",  # the kernel keeps the peak of the process's whole life
    "torch.cuda.nvtx:range_push",  # no profiler listens; Megatron calls both without asking
    "torch.cuda.nvtx:range_pop",
):
    around(_name)(_nothing)


def _resident() -> int:
    """Bytes resident now (where there is no /proc: at most so far)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * _PAGE
    except OSError:
        return _resident_peak()


def _resident_peak() -> int:
    """Bytes resident at most so far."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

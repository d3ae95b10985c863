"""Devices: `get_backend` gives the one to use, `available_backends` those that this machine has."""

from __future__ import annotations

import functools
import importlib
import os

from mindspeed_mem.device.base import Backend, DeviceError, Event, Stream, is_host_device

__all__ = ["Backend", "DeviceError", "Event", "Stream", "available_backends", "get_backend", "is_host_device"]

_BACKENDS = {  # in the order of preference; the simulated device is never chosen by itself
    "npu": "NpuBackend",
    "cuda": "CudaBackend",
    "cpu": "CpuBackend",
    "simulated": "SimulatedBackend",
}
_VARIABLE = "MINDSPEED_MEM_DEVICE"


def get_backend(name: str | None = None) -> Backend:
    """The backend called `name` ("cpu", "cuda", "npu" or "simulated"); always the same object for the same name.

    None or "auto" means what the environment variable MINDSPEED_MEM_DEVICE says, and without it the first present of
    npu, cuda, cpu. Raises DeviceError for an unknown name and for a device that is not there.
    """
    wanted = name
    if wanted in (None, "auto"):
        wanted = os.environ.get(_VARIABLE, "").strip().lower() or "auto"
    if wanted == "auto":
        wanted = next(known for known in _BACKENDS if _why_absent(known) is None)
    said = f"device {wanted!r}" + ("" if wanted == name else f" (from {_VARIABLE})")
    if wanted not in _BACKENDS:
        allowed = ", ".join(name for name in _BACKENDS if name != "simulated")
        raise DeviceError(f"{said} is unknown; allowed: auto, {allowed}; present here: {_present()}")
    reason = _why_absent(wanted)
    if reason is not None:
        raise DeviceError(
            f"{said} is not available: {reason}; present here: {_present()}; "
            f"choose one of these or auto (--device or {_VARIABLE}), or make {wanted} available"
        )
    return _make(wanted)


def available_backends() -> tuple[str, ...]:
    """Names of the devices that `get_backend` can give here, best first."""
    return tuple(name for name in _BACKENDS if _why_absent(name) is None)


def _present() -> str:
    return ", ".join(name for name in available_backends() if name != "simulated")


def _why_absent(name: str) -> str | None:
    if name in ("cpu", "simulated"):
        return None
    return importlib.import_module(f"mindspeed_mem.device.{name}").why_absent()


@functools.cache
def _make(name: str) -> Backend:
    return getattr(importlib.import_module(f"mindspeed_mem.device.{name}"), _BACKENDS[name])()

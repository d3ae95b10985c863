"""Devices: `get_backend` gives the one to use, `available_backends` those that this machine has.

A device is a row in `DEVICES` and a module of the same name beside this file, with a class derived from `Backend` and
``why_absent() -> str | None``: in a sentence why it cannot be used here. What others ask is what its class says.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import NamedTuple

from mindspeed_mem.device.base import Backend, DeviceError, Event, Stream, is_host_device

__all__ = [
    "Backend",
    "DeviceError",
    "Event",
    "Stream",
    "available_backends",
    "device_names",
    "get_backend",
    "is_host_device",
]


class Row(NamedTuple):
    """A device, by the name of its module."""

    backend: str
    """The name of the class."""
    for_tests: bool = False
    """Never chosen by itself, and not named to users."""
    operators: tuple[str, ...] = ()
    """Namespaces of operators that come with it and only compute."""


DEVICES = {  # in the order of preference
    "npu": Row("NpuBackend", operators=("npu",)),
    "cuda": Row("CudaBackend"),
    "cpu": Row("CpuBackend"),
    "simulated": Row("SimulatedBackend", for_tests=True),
}
_VARIABLE = "MINDSPEED_MEM_DEVICE"


def device_names() -> tuple[str, ...]:
    """The names of all devices that a user may ask for, best first."""
    return tuple(name for name, row in DEVICES.items() if not row.for_tests)


def get_backend(name: str | None = None) -> Backend:
    """The backend of the device called `name`; always the same object for the same name.

    Args:
        name: a key of `DEVICES`. None or "auto" means what the environment variable MINDSPEED_MEM_DEVICE says, and
            without it the first of `device_names` that is present.

    Raises DeviceError for an unknown name and for a device that is not there.
    """
    wanted = name or "auto"
    if wanted == "auto":
        wanted = os.environ.get(_VARIABLE, "").strip().lower() or "auto"
    if wanted == "auto":
        wanted = next(known for known in device_names() if _why_absent(known) is None)
    said = f"device {wanted!r}" + ("" if wanted == name else f" (from {_VARIABLE})")
    if wanted not in DEVICES:
        allowed = ", ".join(device_names())
        raise DeviceError(f"{said} is unknown; allowed: auto, {allowed}; present here: {_present()}")
    reason = _why_absent(wanted)
    if reason is not None:
        raise DeviceError(
            f"{said} is not available: {reason}; present here: {_present()}; "
            f"choose one of these or auto (--device or {_VARIABLE}), or make {wanted} available"
        )
    return _make(wanted)


def available_backends() -> tuple[str, ...]:
    """Names of the devices that `get_backend` can give here, best first; the last is the simulated one, for tests."""
    return tuple(name for name in DEVICES if _why_absent(name) is None)


def _present() -> str:
    return ", ".join(name for name in available_backends() if not DEVICES[name].for_tests)


def _why_absent(name: str) -> str | None:
    return importlib.import_module(f"{__name__}.{name}").why_absent()


@functools.cache
def _make(name: str) -> Backend:
    return getattr(importlib.import_module(f"{__name__}.{name}"), DEVICES[name].backend)()

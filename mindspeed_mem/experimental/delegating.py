"""An allocator in front of torch's own that asks for room when memory runs out, and tries again.

    python -m mindspeed_mem build-allocator          # once; needs a C++ compiler and the headers of CUDA
    undo = delegating.install(backend, make_room)

It rescues what no dispatch mode sees, such as workspaces inside an operator, and costs nothing while memory suffices.
The request is repeated outside of the allocator's own lock, so that whoever makes room can take the GIL.

The allocators of CUDA and NPU compile against torch 2.13 and torch_npu 2.13, and have never been run on a device. The
one of the CPU, which shares everything but the table of methods with them, is tested under a memory limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from mindspeed_mem.device.base import Backend, DeviceError
from mindspeed_mem.device.native_build import cache_folder, library_name

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
DEVICES = tuple(sorted(path.stem.partition("_")[2] for path in SOURCES.glob("delegating_*.cpp")))
FOLDER_VARIABLE = "MINDSPEED_MEM_ALLOCATOR"
_MakeRoom = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
_kept: list[object] = []  # functions that C++ has been given: a thread may be inside one that is no longer in force


def available(device: str) -> Path | None:
    """The library that was built for `device` ("cuda", "npu" or "cpu"), this torch and these sources.

    Looked for in the folder that MINDSPEED_MEM_ALLOCATOR names, otherwise in the user's cache folder. None where it was
    not built; nothing is built here.
    """
    if device not in DEVICES:
        return None
    folder = os.environ.get(FOLDER_VARIABLE, "").strip()
    library = (Path(folder) if folder else cache_folder(create=False)) / file_name(device)
    return library if library.is_file() else None


def file_name(device: str) -> str:
    """The library's file name; another torch, device toolkit or source has another one."""
    toolkit = str(torch.version.cuda)
    if device == "npu":
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            toolkit = importlib.metadata.version("torch_npu")
    header = (SOURCES / "delegating.h").read_text(encoding="utf-8")
    return library_name(SOURCES / f"delegating_{device}.cpp", header + toolkit)


def install_if_built(backend: Backend, make_room: Callable[[int], int]) -> bool:
    """`install` for good, where the library is built; returns whether it is."""
    built = available(backend.type) is not None
    if built:
        install(backend, make_room)
    return built


def install(backend: Backend, make_room: Callable[[int], int]) -> Callable[[], None]:
    """Put the allocator in front of the one of the backend's device; returns a function that takes it away again.

    Args:
        make_room: called as ``make_room(nbytes)`` in the thread whose request did not fit, inside whatever operator
            that is; returns the bytes that it has freed. 0, as well as an exception, which is logged, let the request
            fail as it would have. What the operator works on has other holders than whoever evicts: leave alone what
            is held elsewhere. Not called for requests of its own, while a graph is captured, and in forked processes.

    Raises DeviceError where the library is not built.
    """
    library = available(backend.type)
    if library is None:
        raise DeviceError(
            f"the delegating allocator is not built for {backend.type} and torch {torch.__version__}: run "
            f"python -m mindspeed_mem build-allocator (looked for in ${FOLDER_VARIABLE} and in {cache_folder(False)})"
        )
    loaded = ctypes.CDLL(str(library))
    loaded.delegating_make_room.argtypes = [_MakeRoom]
    process, in_force = os.getpid(), [make_room]  # emptied at the end: what makes room may hold a whole engine

    def ask(nbytes: int) -> int:
        if os.getpid() != process:
            return 0
        try:
            return sum(int(make(nbytes)) for make in in_force)
        except Exception:
            logger.exception("making room for %d bytes failed", nbytes)
            return 0

    function = _MakeRoom(ask)
    _kept.append(function)
    backend.synchronize()  # initialises the device, and with it the native allocator
    loaded.delegating_make_room(function)
    loaded.delegating_install()

    def undo() -> None:
        loaded.delegating_remove()
        loaded.delegating_make_room(_MakeRoom(0))
        in_force.clear()

    return undo


def retries(device: str) -> int:
    """How many requests were repeated so far in this process; 0 where the library is not built."""
    library = available(device)
    if library is None:
        return 0
    loaded = ctypes.CDLL(str(library))
    loaded.delegating_retries.restype = ctypes.c_int64
    return loaded.delegating_retries()

"""Lets torch's allocator ask for room when memory runs out, and try again.

    python -m mindspeed_mem build-allocator          # once; needs a C++ compiler
    undo = delegating.install(backend, make_room)

It rescues what no dispatch mode sees, such as workspaces inside an operator, and costs nothing while memory suffices.
The request is repeated outside of the allocator's own lock, so that whoever makes room can take the GIL. What is asked
for otherwise than by `c10::Allocator::allocate` (thrust's scratch memory by `raw_alloc`, say) fails as it would have.

One library serves all devices and all releases of torch and torch_npu. It is tested on a CPU under a memory limit, and
has never been run on a GPU or NPU.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from mindspeed_mem.device import device_names
from mindspeed_mem.device.base import Backend, DeviceError
from mindspeed_mem.device.native_build import cache_folder, compile_library, is_complete, lasting_folder, library_name

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "csrc" / "delegating.cpp"
FOLDER_VARIABLE = "MINDSPEED_MEM_ALLOCATOR"
_MakeRoom = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p)
_kept: list[object] = []  # functions that C++ has been given: a thread may be inside one that is no longer in force


def build(folder: Path | None = None) -> Path:
    """Build the delegating allocator in `folder` (None: the user's cache folder).

    Returns the library, which is built again even if it is there. Raises DeviceError (CompilerError where the compiler
    is missing or refuses) saying what to do.
    """
    if folder is not None and not folder.is_dir():
        raise DeviceError(f"--output: there is no folder {folder}: make it first")
    target = (folder or lasting_folder()).resolve() / library_name(SOURCE)
    return compile_library(SOURCE, target, purpose="the delegating allocator", flags=("-fvisibility=hidden",))


def available() -> Path | None:
    """The library that was built for this torch and these sources.

    Looked for in the folder that MINDSPEED_MEM_ALLOCATOR names, otherwise in the user's cache folder. None where it was
    not built; nothing is built here.
    """
    folder = os.environ.get(FOLDER_VARIABLE, "").strip()
    library = (Path(folder) if folder else cache_folder(create=False)) / library_name(SOURCE)
    return library if is_complete(library) else None


def install_if_built(backend: Backend, make_room: Callable[[int], int]) -> bool:
    """`install` for good, where the library is built; returns whether it is."""
    built = available() is not None and backend.type in device_names()
    if built:
        install(backend, make_room)
    return built


def install(backend: Backend, make_room: Callable[[int], int]) -> Callable[[], None]:
    """Let the allocator of the backend's device ask for room; returns a function that ends it.

    Args:
        make_room: called as ``make_room(nbytes)`` in the thread whose request did not fit, inside whatever operator
            that is; returns the bytes that it has freed. 0, as well as an exception, which is logged, let the request
            fail as it would have. What the operator works on has other holders than whoever evicts: leave alone what
            is held elsewhere. Not called for requests of its own, while a graph is captured, and in forked processes.

    Raises DeviceError where the library is not built, and where the allocator cannot be changed.
    """
    library = available()
    if library is None:
        raise DeviceError(
            f"the delegating allocator is not built for torch {torch.__version__}: run python -m mindspeed_mem "
            f"build-allocator (looked for in ${FOLDER_VARIABLE} and in {cache_folder(False)})"
        )
    loaded = ctypes.CDLL(str(library))
    loaded.delegating_make_room.argtypes = [_MakeRoom]
    captures = getattr(torch.get_device_module(backend.tensor_type), "is_current_stream_capturing", bool)
    process, in_force = os.getpid(), [make_room]  # emptied at the end: what makes room may hold a whole engine

    def ask(nbytes: int, said: bytes) -> int:
        if os.getpid() != process:
            return 0
        try:
            if captures() or not backend.is_out_of_memory(torch.OutOfMemoryError(said.decode(errors="replace"))):
                return 0
            return sum(int(make(nbytes)) for make in in_force)
        except Exception:
            logger.exception("making room for %d bytes failed", nbytes)
            return 0

    function = _MakeRoom(ask)
    _kept.append(function)
    backend.synchronize()  # initialises the device, and with it the native allocator
    number = loaded.delegating_install(backend.tensor_type.encode())
    if number < 0:
        raise DeviceError(f"the allocator of {backend.type} cannot be changed: this system keeps its code as it is")
    loaded.delegating_make_room(function)

    def undo() -> None:
        loaded.delegating_remove(number)
        loaded.delegating_make_room(_MakeRoom(0))
        in_force.clear()

    return undo


def retries() -> int:
    """How many requests were repeated so far in this process; 0 where the library is not built."""
    library = available()
    if library is None:
        return 0
    loaded = ctypes.CDLL(str(library))
    loaded.delegating_retries.restype = ctypes.c_int64
    return loaded.delegating_retries()

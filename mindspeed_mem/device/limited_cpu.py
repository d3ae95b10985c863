"""Host memory with a limit: a real torch.OutOfMemoryError from inside any operator, without an accelerator.

    with LimitedMemory() as memory:            # compiles csrc/limited_cpu.cpp once per torch version, about 2 seconds
        get_backend("cpu").attach_ledger(memory)
        memory.limit = memory.allocated + 10 * 2**20

It counts what torch's CPU allocator hands out from its installation on. Not counted: numpy's memory and mapped files
(where host buffers of the CPU backend lie), `torch.UntypedStorage(n)`, and tensors from before.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mindspeed_mem.device.base import DeviceError

_SOURCE = Path(__file__).parent / "csrc" / "limited_cpu.cpp"


class CompilerError(DeviceError):
    """A C++ source cannot be compiled here: there is no compiler, or it refuses. The message says which."""


class LimitedMemory:
    """The process's limited CPU memory; there is one, so all instances show the same figures (bytes).

    As a context manager it is installed inside; on leaving, the limit is off and torch's own allocator is back.
    Tensors may outlive it in both directions. Raises CompilerError where it cannot be built.
    """

    def __init__(self) -> None:
        self._library = _library()

    def __enter__(self) -> LimitedMemory:
        self._library.limited_cpu_install()
        self.reset_peak()
        return self

    def __exit__(self, *_: object) -> None:
        self.limit = None
        self._library.limited_cpu_uninstall()

    @property
    def allocated(self) -> int:
        """In use now."""
        return self._library.limited_cpu_allocated()

    @property
    def peak(self) -> int:
        """The most in use since `reset_peak`."""
        return self._library.limited_cpu_peak()

    @property
    def refused(self) -> int:
        """How many requests the limit has refused so far."""
        return self._library.limited_cpu_refused()

    @property
    def limit(self) -> int | None:
        """Beyond it a request is refused; None: it only counts."""
        return self._limit

    @limit.setter
    def limit(self, nbytes: int | None) -> None:
        if nbytes is not None and nbytes < 0:
            raise ValueError(f"limit of CPU memory: got {nbytes} bytes; give 0 or more, or None for no limit")
        LimitedMemory._limit = nbytes
        self._library.limited_cpu_set_limit(-1 if nbytes is None else nbytes)

    _limit: int | None = None

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """What this thread allocates inside is host memory: it is not counted (random states, say)."""
        self._library.limited_cpu_on_host(1)
        try:
            yield
        finally:
            self._library.limited_cpu_on_host(-1)

    def reset_peak(self) -> None:
        """Let `peak` start again from `allocated`."""
        self._library.limited_cpu_reset_peak()


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_compiled()))
    for name in ("allocated", "peak", "refused"):
        getattr(library, f"limited_cpu_{name}").restype = ctypes.c_int64
    library.limited_cpu_set_limit.argtypes = [ctypes.c_int64]
    return library


def _compiled() -> Path:
    """The compiled source, from the user's cache folder where it has been compiled for this torch before."""
    abi = int(torch.compiled_with_cxx11_abi())
    version = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]
    target = _cache_folder() / f"limited_cpu-torch{torch.__version__}-abi{abi}-{version}.so"
    if target.exists():
        return target
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if compiler is None:
        raise CompilerError("limited CPU memory needs a C++ compiler (g++ or clang++), and none is on the PATH")
    base = Path(torch.__file__).parent
    # Several ranks may compile at once: each under a name of its own, and the last rename wins.
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    flags = ["-O2", "-std=c++20", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    where = [f"-I{base / 'include'}", f"-L{base / 'lib'}", "-lc10"]
    try:
        done = subprocess.run([compiler, str(_SOURCE), *flags, *where, "-o", name], capture_output=True, text=True)
        if done.returncode != 0:
            raise CompilerError(f"{compiler} cannot compile {_SOURCE.name}: {done.stderr.strip()[-2000:]}")
        os.replace(name, target)
    finally:
        if os.path.exists(name):
            os.unlink(name)
    return target


def _cache_folder() -> Path:
    """A folder of this user that can be written to; where there is none, one that is new each time."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mindspeed_mem"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="mindspeed_mem"))

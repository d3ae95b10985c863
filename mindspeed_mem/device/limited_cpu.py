"""Host memory with a limit: a real torch.OutOfMemoryError from inside any operator, without an accelerator.

    with LimitedMemory() as memory:            # compiles csrc/limited_cpu.cpp once per torch version, about 2 seconds
        get_backend("cpu").attach_ledger(memory)
        memory.limit = memory.allocated + 10 * 2**20

It counts what torch's CPU allocator hands out from its installation on. Not counted: numpy's memory and mapped files
(where host buffers of the CPU backend lie), `torch.UntypedStorage(n)`, tensors from before, and what gloo's own threads
allocate.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from mindspeed_mem.device.native_build import (
    SOURCES,
    CompilerError,
    cache_folder,
    compile_library,
    is_complete,
    library_name,
)

__all__ = ["CompilerError", "LimitedMemory", "on_host"]

_SOURCE = SOURCES / "limited_cpu.cpp"


class LimitedMemory:
    """The process's limited CPU memory; there is one, so all instances show the same figures (bytes).

    As a context manager it is installed inside; on leaving, the limit is off and torch's own allocator is back.
    Tensors may outlive it in both directions. Raises CompilerError where it cannot be built.
    """

    def __init__(self) -> None:
        self._library = _library()

    def __enter__(self) -> LimitedMemory:
        self._library.limited_cpu_install()
        LimitedMemory._installed = self
        self.reset_peak()
        return self

    def __exit__(self, *_: object) -> None:
        self.limit = None
        LimitedMemory._installed = None
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
    _installed: LimitedMemory | None = None

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


def on_host() -> AbstractContextManager[None]:
    """What this thread allocates inside is host memory, where CPU memory is limited; elsewhere nothing changes."""
    limited = LimitedMemory._installed
    return nullcontext() if limited is None else limited.on_host()


@functools.cache
def _library() -> ctypes.CDLL:
    target = cache_folder() / library_name(_SOURCE)
    if not is_complete(target):
        compile_library(_SOURCE, target, purpose="limited CPU memory")
    library = ctypes.CDLL(str(target))
    for name in ("allocated", "peak", "refused"):
        getattr(library, f"limited_cpu_{name}").restype = ctypes.c_int64
    library.limited_cpu_set_limit.argtypes = [ctypes.c_int64]
    # A forked data loader works in host memory: what it adds to the copied figures is nobody's device memory.
    os.register_at_fork(after_in_child=functools.partial(library.limited_cpu_set_limit, -1))
    return library

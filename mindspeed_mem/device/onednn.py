"""oneDNN's kernels on a CPU whose memory is limited: that one of them ran out of memory must not go unnoticed.

torch takes the error for a defect of oneDNN: it warns, switches oneDNN off for the whole process, and lets other
kernels compute this product and all later ones. Their sums have other last bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mindspeed_mem.device.limited_cpu import LimitedMemory


class FellBackError(torch.OutOfMemoryError):
    """A kernel of oneDNN's ran out of memory, and another one has computed instead. oneDNN is switched on again."""


def call(op: Any, args: tuple, kwargs: dict, memory: LimitedMemory) -> Any:
    """What `op` returns. Raises FellBackError if a kernel of oneDNN's ran out of `memory` meanwhile."""
    enabled, refused = torch._C._get_mkldnn_enabled(), memory.refused
    result = op(*args, **kwargs)
    if enabled and _fell_back(memory, refused):
        del result  # the error's traceback holds this frame
        raise _error(str(op))
    return result


@contextmanager
def noticed(memory: object) -> Iterator[None]:
    """Raises FellBackError at the end if a kernel of oneDNN's ran out of memory inside.

    ``memory``: what counts the device's memory; nothing happens unless it is a `LimitedMemory`.
    """
    if not isinstance(memory, LimitedMemory):
        yield
        return
    enabled, refused = torch._C._get_mkldnn_enabled(), memory.refused
    fell_back = False
    try:
        yield
    finally:
        fell_back = enabled and _fell_back(memory, refused)
    if fell_back:
        raise _error("an operator")


def _fell_back(memory: LimitedMemory, refused: int) -> bool:
    """Whether oneDNN is off since memory was refused; if so, it is switched on again. Where nothing was refused, it
    failed for another reason, and torch may have its way."""
    if torch._C._get_mkldnn_enabled() or memory.refused == refused:
        return False
    torch._C._set_mkldnn_enabled(True)
    return True


def _error(where: str) -> FellBackError:
    return FellBackError(f"limited CPU memory: out of memory in a oneDNN kernel of {where}; torch used another kernel")

"""What the engine asks of each saved tensor, as fast as can be: in C++ where that has been built, else in Python.

Both do the same. Whoever calls `view_of` and `is_plain` looks them up here each time: see `use`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from mindspeed_mem.device.extensions import Extension
from mindspeed_mem.device.native_build import SOURCES

_keys = torch._C._dispatch_keys
_PLAIN: dict[tuple[int, str], bool] = {}  # by a tensor's dispatch keys, which have its device, layout and what is lazy
_EMPTY: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor without elements, always the same."""
    found = _EMPTY.get((dtype, device))
    if found is None:
        found = _EMPTY[dtype, device] = torch.empty(0, dtype=dtype, device=device)
    return found


def view_in_python(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | torch.SymInt,
) -> torch.Tensor:
    """A tensor that lies so in ``storage``."""
    found = _EMPTY.get((dtype, storage.device))
    if found is None:
        found = empty(dtype, storage.device)
    return found.new_empty(0).set_(storage, offset, size, stride)


def is_plain_in_python(tensor: torch.Tensor, device_type: str) -> bool:
    """Whether it is an ordinary tensor on such a device: no subclass, nor a view of one, of no other layout, and with
    a version counter."""
    if type(tensor) is not torch.Tensor:
        return False
    kind = _keys(tensor).raw_repr(), device_type
    plain = _PLAIN.get(kind)
    if plain is None:
        plain = tensor.layout is torch.strided and tensor.device.type == device_type
        # a layout alone does not say what they are
        lazy = tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()  # the last: bytes without memory
        plain = _PLAIN[kind] = plain and not (lazy or tensor.is_nested or tensor.is_inference())
    base = tensor._base  # aten's linear saves ``weight.t()``, an ordinary tensor
    return plain and (base is None or type(base) is torch.Tensor)


view_of: Callable[[torch.UntypedStorage, torch.dtype, Sequence[int], Sequence[int], Any], torch.Tensor]
is_plain: Callable[[torch.Tensor, str], bool]


EXTENSION = Extension(SOURCES / "fast_tensors.cpp", "the engine's hooks", (SOURCES / "fast_tensors.h",))


def use(module: ModuleType | None) -> None:
    """From now on it is that of ``module``; None: Python's."""
    global view_of, is_plain
    view_of = view_in_python if module is None else module.view_of
    is_plain = is_plain_in_python if module is None else module.is_plain


use(EXTENSION.wanted())

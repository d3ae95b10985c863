"""The tensors in what a module is given and returns: in mappings, sequences, dataclasses and other trees of torch's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_LEAVES = frozenset({int, float, complex, bool, str, bytes, type(None)})


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``value``, which may refer to itself, in order."""
    seen: dict[int, Any] = {}  # by id; held, or another object may get the id of one that is gone
    ahead = [value]
    while ahead:
        one = ahead.pop()
        if type(one) in _LEAVES:  # of long lists, quickly
            continue
        if isinstance(one, torch.Tensor):
            yield one
        elif id(one) not in seen:
            seen[id(one)] = one
            ahead += reversed(_inside(one))


def _inside(one: Any) -> list[Any]:
    if isinstance(one, dict):
        return list(dict.values(one))  # a subclass's own may do anything
    if isinstance(one, Mapping):
        return list(one.values())
    if isinstance(one, (list, tuple)):
        return list(one)
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        own = getattr(one, "__dict__", None)  # not its properties, which may compute or raise
        names = [field.name for field in dataclasses.fields(one)]
        return [getattr(one, name, None) if own is None else own.get(name) for name in names]
    return [leaf for leaf in tree_leaves(one) if leaf is not one]

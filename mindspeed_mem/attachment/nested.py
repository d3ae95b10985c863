"""What a model is given and returns, gone into: mappings, lists, tuples and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_LEAVES = frozenset({int, float, complex, bool, str, bytes, type(None)})


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``value``, which may refer to itself."""
    seen: dict[int, Any] = {}  # by id; held, or another object may get the id of one that is gone
    ahead = [value]
    while ahead:
        one = ahead.pop()
        if type(one) in _LEAVES:  # of long lists, quickly
            continue
        if isinstance(one, torch.Tensor):
            yield one
            continue
        inside: list[Any]
        if isinstance(one, Mapping):
            inside = list(one.values())
        elif isinstance(one, (list, tuple)):
            inside = list(one)
        elif dataclasses.is_dataclass(one) and not isinstance(one, type):
            inside = [getattr(one, field.name, None) for field in dataclasses.fields(one)]
        else:
            continue
        if id(one) not in seen:
            seen[id(one)] = one
            ahead += reversed(inside)


def nodes_of(value: Any) -> dict[Any, None]:
    """The nodes of the graph that made tensors in ``value``, each once."""
    return dict.fromkeys(one.grad_fn for one in tensors_in(value) if one.grad_fn is not None)

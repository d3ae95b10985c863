"""Nested arguments taken apart into their tensors and the rest, and put together again with other tensors.

Tuples (named ones too), lists and dicts are gone into; anything else is a leaf. As torch's pytree does it, at a
fraction of its cost for the few flat arguments that operators have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from mindspeed_mem.activation import hot_path

_LEAVES = {type(None), bool, int, float, str, torch.dtype, torch.device}
"""Types of much that operators take: looked up faster than gone through."""


class Slot(NamedTuple):
    """Where a tensor was."""

    number: int


NOTHING: tuple[tuple, dict[str, Any], None] = (), {}, None
"""What is left of arguments and attributes once nobody runs on them any more: tensors of an operator's graph may
lie in them by then, and that graph holds who runs it again."""


def split(value: Any, take: Callable[[torch.Tensor], Any], taken: list[Any]) -> Any:
    """A copy of ``value`` with a `Slot` in place of each tensor for which ``take`` returned something.

    What it returned is appended to ``taken``; a tensor for which it returns None stays where it is, and one for which
    it returns a `Slot` goes there.
    """
    if hot_path.native is not None:
        return hot_path.native.split(value, take, taken)
    kind = type(value)
    if isinstance(value, torch.Tensor):
        found = take(value)
        if found is None:
            return value
        if type(found) is Slot:
            return found
        taken.append(found)
        return Slot(len(taken) - 1)
    if kind is tuple or kind is list:
        return kind([item if type(item) in _LEAVES else split(item, take, taken) for item in value])
    if kind is dict:
        return {key: split(item, take, taken) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*[split(item, take, taken) for item in value])
    return value


def join(value: Any, tensors: Sequence[Any]) -> Any:
    """What `split` took apart, with ``tensors`` in its slots."""
    if hot_path.native is not None:
        return hot_path.native.join(value, tensors)
    kind = type(value)
    if kind is Slot:
        return tensors[value.number]
    if kind is tuple or kind is list:
        return kind([item if type(item) in _LEAVES else join(item, tensors) for item in value])
    if kind is dict:
        return {key: join(item, tensors) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*[join(item, tensors) for item in value])
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of nested arguments or results, in order."""
    if hot_path.native is not None:
        return hot_path.native.tensors_in(value)
    found: list[torch.Tensor] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if type(one) in _LEAVES:
            continue
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, (tuple, list)):
            waiting.extend(reversed(one))
        elif type(one) is dict:
            waiting.extend(reversed(one.values()))
    return found


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Those that an object has of its own; None if it has no dictionary of them."""
    try:
        found = vars(value)
    except Exception:  # a class's own __getattr__ may raise anything
        return None
    return found if isinstance(found, dict) else None

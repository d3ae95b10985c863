"""What the modules of an operator are set to when it runs, so that its second run finds the same.

A program may set them anew between a forward and its backward: evaluation mode, another adapter, weights that it lends
a module for one forward, a factor. Noted are a module's parameters, whether they need a gradient, and attributes that
hold plain values or functions; others may be large. The objects themselves are kept, and compared.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

Setting = tuple[Any, str, Any]
"""Whose it is, its name, and the value: an item of a dictionary, of anything else an attribute."""

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_PLAIN = (*_NUMBERS, torch.dtype, torch.device, types.FunctionType, types.BuiltinFunctionType)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def names_of_settings(module: torch.nn.Module) -> tuple[str, ...] | None:
    """Of a module's attributes; None of one that keeps its state elsewhere (torch.jit's)."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    return tuple(name for name, value in vars(module).items() if _is_plain(value))


def settings_of(modules: Sequence[torch.nn.Module], names: Sequence[tuple[str, ...] | None]) -> list[Setting]:
    """Those of modules as they are now; ``names``: of each, see `names_of_settings`."""
    found: list[Setting] = []
    for module, known in zip(modules, names, strict=True):
        if known is None:
            found += [(module, "training", module.training)]
            continue
        attributes = module.__dict__  # no calls below: this is run for each operator
        for name in known:
            if name in attributes:
                found += ((attributes, name, attributes[name]),)
        parameters = attributes["_parameters"]
        for name in parameters:
            one = parameters[name]
            found += ((parameters, name, one),)
            if one is not None:
                found += ((one, "requires_grad", one.requires_grad),)
    return found


def put_back_settings(settings: Sequence[Setting], stack: ExitStack) -> None:
    """They are as they were; once ``stack`` is left, as they are now."""
    for owner, name, then in settings:
        now = owner.get(name, _ABSENT) if isinstance(owner, dict) else getattr(owner, name)
        if now is not then:
            stack.callback(_set, owner, name, now)
            _set(owner, name, then)


_ABSENT = object()


def _set(owner: Any, name: str, value: Any) -> None:
    if not isinstance(owner, dict):
        setattr(owner, name, value)
    elif value is _ABSENT:
        owner.pop(name, None)
    else:
        owner[name] = value

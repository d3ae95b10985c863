"""torch.autograd.graph: whoever disables saved-tensor hooks may do so under ours; torch.func.grad and vjp do.

Why here: torch refuses while any hook is in force, ours around a layer or a step, too, although what runs is native
without them. They are taken off meanwhile: what is saved there stays as it is. Other people's hooks stay, and torch
refuses as it does without us. At these two because torch.func holds the context manager that calls them, and
torch.compile knows it by identity.

Before torch 2.7 nobody tells whose hooks are in force: there it refuses.
"""

from __future__ import annotations

import threading
from types import BuiltinFunctionType

import torch

from mindspeed_mem.activation import hot_path
from mindspeed_mem.patching import around

_OURS = "mindspeed_mem.activation."
_top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_push, _pop = torch._C._autograd._push_saved_tensors_default_hooks, torch._C._autograd._pop_saved_tensors_default_hooks


class _Off(threading.local):
    """The hooks taken off in this thread, the innermost first."""

    def __init__(self) -> None:
        self.hooks: list[tuple] = []


_off = _Off()


def _is_ours(pack) -> bool:
    home = getattr(pack, "__module__", None) or ""
    if isinstance(pack, BuiltinFunctionType):  # a method in C++, of a class there or here
        home = type(pack.__self__).__module__
        if hot_path.native is not None and home == hot_path.native.__name__:
            return True
    return home.startswith(_OURS)


def _put_back(hooks: list[tuple]) -> None:
    while hooks:
        _push(*hooks.pop())


@around("torch._C._autograd:_saved_tensors_hooks_disable")
def _disable(original, message, fail_if_non_empty=True):
    """Some ask it not to refuse: nothing is in its way then."""
    if not fail_if_non_empty or _top is None:
        return original(message) if fail_if_non_empty else original(message, fail_if_non_empty)
    found: list[tuple] = []
    while (hooks := _top(True)) is not None and _is_ours(hooks[0]):
        found.append(hooks)
        _pop()
    if hooks is not None:  # somebody's, and it refuses
        _put_back(found)
    else:
        _off.hooks += found
    return original(message)


@around("torch._C._autograd:_saved_tensors_hooks_enable")
def _enable(original):
    original()
    _put_back(_off.hooks)

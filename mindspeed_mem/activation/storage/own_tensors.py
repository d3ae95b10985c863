"""What a custom autograd function saved is what it gets back, with all that its backward may look for on it.

Of what a hook hands back autograd makes a new tensor, at each reading of ``ctx.saved_tensors``: without the ``.grad``
or ``main_grad`` of a leaf, without attributes and Python class. Torch's own operators read data only. A function in
Python may read anything, so reading goes through a `reader` (a patch sees to that): leaves that need gradients are the
very same tensors, others have their class and the attributes that a program set on them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from mindspeed_mem.activation.storage.records import OfFunction

Saved = TypeVar("Saved", bound="OfFunction")

_native_apply: Any = vars(torch.autograd.Function)["apply"]
APPLY_IS_PYTHON = isinstance(_native_apply, classmethod)
"""Torch 2.14 and newer have it in C."""


def applied(cls: type, *args: Any, **kwargs: Any) -> Any:
    """``cls.apply`` where that is in C: its frame shows, as Python's own did, whose tensors are being packed."""
    return _native_apply.__get__(None, cls)(*args, **kwargs)


APPLY = (_native_apply.__func__ if APPLY_IS_PYTHON else applied).__code__
"""Of the frame below that of a pack hook, where it packs what a custom function saves."""

MARKS: list[str] = []
"""Attributes by which libraries say that a tensor that their functions save is to stay on the device."""


class _Reading(threading.local):
    """Handles in the order in which the ``ctx.saved_tensors`` that is being read unpacks them; None: none is."""

    handles: list[OfFunction] | None = None


reading = _Reading()


def made_by_function(tensor: torch.Tensor) -> str | None:
    """The name of the custom function that saves ``tensor``, for a pack hook further up; None if it was given it."""
    function, given = _applied()
    return None if any(one is tensor for one in given) else function.__name__


def _applied() -> tuple[type, tuple]:
    """The custom function whose tensors are being packed, and what it was given."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not APPLY:
        frame = frame.f_back
    assert frame is not None
    found = frame.f_locals
    return found["cls"], found["args"]


def _returned(tensor: torch.Tensor) -> bool:
    """Whether the custom function that saves ``tensor`` returns it."""
    if not isinstance(tensor.grad_fn, BackwardCFunction):
        return False
    function, given = _applied()
    return type(tensor.grad_fn) is function._backward_cls and all(one is not tensor for one in given)


def stays_itself(tensor: torch.Tensor) -> bool:
    """Whether autograd keeps it, whatever a hook makes of it: its gradient is accumulated there.

    Not in a view that a custom function's forward makes of its input, as TransformerEngine's linears with norms do of
    the residual stream: that claims to need a gradient, as its base does, and nothing accumulates one.
    """
    if not (tensor.requires_grad and tensor.is_leaf):
        return False
    if not tensor._is_view():
        return True
    # Another view of it leads to where its gradient goes. Neither its class nor a mode is to see that.
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
        node = torch.ops.aten.alias(tensor).grad_fn
    return node is not None and node.next_functions[0][0] is not None


def told_to_stay(tensor: torch.Tensor) -> bool:
    """Whether the library whose custom function saves ``tensor`` has said so."""
    attributes = vars(tensor)
    return bool(attributes) and any(attributes.get(name) for name in MARKS)


def own(handle: Saved, tensor: torch.Tensor) -> Saved:
    """``handle`` is of ``tensor``, which a custom function saves."""
    if stays_itself(tensor):
        handle.alias = tensor
    if _returned(tensor):  # comes back plain from autograd itself, too; its attributes may lead to the node, a cycle
        handle.own = None, {}
    else:
        handle.own = type(tensor), {} if handle.alias is tensor else vars(tensor)  # what is set on it later, too
    return handle


def unpacked(handle: OfFunction) -> None:
    """``handle``, which a custom function saved, has been brought back."""
    if reading.handles is not None:
        reading.handles.append(handle)


def reader(native: Callable[[Any], tuple]) -> Callable[[Any], tuple]:
    """What reads ``ctx.saved_tensors`` as the function saved them; ``native(ctx)``: as autograd makes them."""

    def read(ctx: Any) -> tuple:
        handles: list[OfFunction] = []
        outer, reading.handles = reading.handles, handles
        try:
            tensors = native(ctx)
        finally:
            reading.handles = outer
        return all_as_saved(tensors, handles) if handles else tensors

    return read


def all_as_saved(tensors: tuple, handles: list[OfFunction]) -> tuple:
    """What ``ctx.saved_tensors`` is, each of ``tensors`` that is one as it was saved."""
    found = 0
    for tensor in tensors:
        found += tensor is not None
    if len(handles) != found:  # somebody else's hooks
        return tensors
    following = iter(handles)
    return tuple([tensor if tensor is None else as_saved(tensor, next(following)) for tensor in tensors])


def as_saved(tensor: torch.Tensor, handle: OfFunction) -> torch.Tensor:
    alias = handle.alias
    if alias.requires_grad and alias.is_leaf:  # then it is what was saved
        return alias
    assert handle.own is not None
    kind, attributes, *read = handle.own
    if read and (same := read[0]()) is not None:
        return same
    if tensor.requires_grad and tensor.is_leaf:  # what was saved only claimed to: of this autograd has made a real leaf
        with torch.no_grad():
            tensor = tensor.view_as(tensor)
    if kind is not None and type(tensor) is not kind:
        with torch.enable_grad():
            tensor = tensor.as_subclass(kind)
    if attributes:
        vars(tensor).update(attributes)
    if tensor.grad_fn is None:  # as long as somebody has it, the next reading finds what was done to it
        handle.own = kind, attributes, weakref.ref(tensor)
    return tensor

"""``layer.recompute()`` on any module: it keeps what it is given, and runs again in backward.

Importing `mindspeed_mem.parallel` gives `torch.nn.Module` this method.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Module = TypeVar("Module", bound=nn.Module)


def recompute(module: Module, active: bool = True) -> Module:
    """Have `module` run again in backward instead of keeping what its operators save; ``active=False``: no longer.

    Its second run draws the same random numbers, and leaves its buffers (running statistics) alone. Returns `module`.
    """
    forward = module.__dict__.get("forward")
    if active and not isinstance(forward, Recomputed):
        module.forward = Recomputed(module)
    elif not active and isinstance(forward, Recomputed):
        module.__dict__.pop("forward")
        if forward.inner != module.forward:  # it had a forward of its own
            module.forward = forward.inner
    return module


class Recomputed:
    """A module's forward that runs again in backward."""

    def __init__(self, module: nn.Module) -> None:
        self.inner: Callable[..., Any] = module.forward
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        return run_again(self._module, self.inner, *args, **kwargs)


def run_again(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `forward`, of `module`, and once more in backward."""

    def contexts() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
        return contextlib.nullcontext(), _buffers_kept(module)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextlib.contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """What is written to buffers inside is undone, and no version tells of it: backward may have saved them."""
    before = [(buffer, buffer.data.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.data.copy_(value)


nn.Module.recompute = recompute  # type: ignore[attr-defined]

"""``layer.recompute()`` on any module: it keeps what it is given, and runs again in backward. ``layer.swap()``.

Importing `mindspeed_mem.parallel` or using `mindspeed_mem.attach` gives `torch.nn.Module` these methods. In a layer of
an attached model both are the engine's, as if the plan named the module; elsewhere `recompute` is torch's checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mindspeed_mem.activation import asked
from mindspeed_mem.activation.rerun.model_buffers import Buffer
from mindspeed_mem.patching import dynamo

Module = TypeVar("Module", bound=nn.Module)


def recompute(module: Module, active: bool = True) -> Module:
    """Recompute `module` in backward instead of keeping what its operators save; ``active=False`` undoes that.

    The second run draws the same random numbers, sees the buffers that the first run saw, and leaves them (running
    statistics) as they are. In an attached model, call it only between two steps.

    Returns `module`.

    Raises:
        ValueError: the attached model's plan cannot be changed ("auto"), or `active` is not a bool.
    """
    if not isinstance(active, bool):
        raise ValueError(f"recompute: active: got {active!r}; allowed: True, or False")
    asked.ask(module, asked.RECOMPUTE, active or None)
    if asked.is_followed(module):
        return module
    forward = module.__dict__.get("forward")
    if active and not isinstance(forward, Recomputed):
        dynamo.keep_out()
        module.forward = Recomputed(module)
    elif not active and isinstance(forward, Recomputed):
        module.__dict__.pop("forward")
        if forward.inner != module.forward:  # it had a forward of its own
            module.forward = forward.inner
    return module


def swap(module: Module, ahead: int | None = 1) -> Module:
    """Swap what `module` produces for backward: it moves to the host, and comes back before backward needs it.

    `module` has to be in a layer of an attached model; elsewhere this does nothing. Call it before or after
    `mindspeed_mem.attach`, whose plan may be None, and between two steps.

    Args:
        module: everything inside it is swapped.
        ahead: the distance in operators: an activation leaves once so many more operators have run, and starts to come
            back so many before it is needed. None: no longer swap the module.

    Returns `module`.

    Raises:
        ValueError: `ahead` is neither None nor a whole number from 1 on, or the attached model's plan cannot be changed
            ("auto").
    """
    if not (ahead is None or (isinstance(ahead, int) and not isinstance(ahead, bool) and ahead > 0)):
        raise ValueError(f"swap: ahead: got {ahead!r}; allowed: a whole number from 1 on, or None")
    asked.ask(module, asked.SWAP, ahead)
    return module


class Recomputed:
    """A module's forward that runs again in backward."""

    def __init__(self, module: nn.Module) -> None:
        self.inner: Callable[..., Any] = module.forward
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        if not torch.is_grad_enabled() or asked.RECOMPUTE not in module.__dict__ or asked.runs_again(module):
            return self.inner(*args, **kwargs)
        return run_again(module, self.inner, *args, **kwargs)


def run_again(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `forward`, of `module`, and once more in backward, from what its buffers held before the first time."""
    changed: list[Buffer] = []

    @contextlib.contextmanager
    def first() -> Iterator[None]:
        found = [Buffer.of(one._buffers, name) for one in module.modules() for name in one._buffers]
        yield
        changed.extend(one for one in found if one.changed())

    @contextlib.contextmanager
    def second() -> Iterator[None]:
        after = [Buffer.of(one.holder, one.name) for one in changed]
        for before in changed:
            before.put()
        try:
            yield
        finally:
            for one in after:
                one.put()

    return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: (first(), second()), **kwargs)


nn.Module.recompute = recompute  # type: ignore[attr-defined]
nn.Module.swap = swap  # type: ignore[attr-defined]

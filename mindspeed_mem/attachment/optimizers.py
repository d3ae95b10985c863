"""When an optimizer of a model begins its step, whoever's loop calls it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


@contextlib.contextmanager
def before_step_of(model: nn.Module | None, call: Callable[[], None]) -> Iterator[None]:
    """Inside, ``call`` runs before each step of an optimizer that has parameters of ``model``; None: of any."""

    def hook(optimizer: Any, *_: Any) -> None:
        if model is None or _trains(optimizer, model):
            call()

    handle = register_optimizer_step_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def before_second_step_of(model: nn.Module, call: Callable[[], None]) -> RemovableHandle:
    """``call`` runs once, before the second such step. It does not keep the model alive."""
    known, steps = weakref.ref(model), 0

    def hook(optimizer: Any, *_: Any) -> None:
        nonlocal steps
        there = known() if steps < 2 else None
        if there is not None and _trains(optimizer, there):
            steps += 1
            if steps == 2:
                call()
        elif there is None and handle not in _done:
            _done.append(handle)

    while _done:
        _done.pop().remove()
    handle = register_optimizer_step_pre_hook(hook)
    return handle


_done: list[RemovableHandle] = []
"""Of hooks that have nothing to do any more. None may be removed while hooks run."""


def _trains(optimizer: Any, model: nn.Module) -> bool:
    mine = {id(one) for one in model.parameters()}
    return any(id(one) in mine for group in optimizer.param_groups for one in group["params"])

"""When an optimizer of a model begins its step, whoever's loop calls it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook


@contextlib.contextmanager
def before_step_of(model: nn.Module, call: Callable[[], None]) -> Iterator[None]:
    """Inside, ``call`` runs before each step of an optimizer that has parameters of ``model``."""

    def hook(optimizer: Any, *_: Any) -> None:
        mine = {id(one) for one in model.parameters()}
        if any(id(one) in mine for group in optimizer.param_groups for one in group["params"]):
            call()

    handle = register_optimizer_step_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()

"""Hooks around an optimizer's state dict, for optimizers that make and take theirs otherwise than torch's base class.

They are called as `torch.optim.Optimizer` does: what a hook returns, if anything, takes the state dict's place.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_STATE = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
STATE_HOOKS = tuple(f"_optimizer_{name}_hooks" for name in _STATE)
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""torch's attributes, which hold hooks by the number of their handle."""


def before_saving(optimizer: torch.optim.Optimizer) -> None:
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)


def after_saving(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state dict to hand out."""
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        found = hook(optimizer, state)
        state = state if found is None else found
    return state


def before_loading(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict to load; `state` itself stays as it is."""
    state = dict(state)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        found = hook(optimizer, state)
        state = state if found is None else found
    return state


def after_loading(optimizer: torch.optim.Optimizer) -> None:
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


def take_over(optimizer: torch.optim.Optimizer, given: torch.optim.Optimizer, names: tuple[str, ...]) -> None:
    """Let `optimizer` call the hooks of `given`, which it stands for now; whoever holds a handle can remove them."""
    vars(optimizer).update({name: vars(given)[name] for name in names if name in vars(given)})


@contextlib.contextmanager
def resting(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, `optimizer` calls none of them: somebody else does, with the whole state."""
    before = {name: vars(optimizer)[name] for name in STATE_HOOKS if name in vars(optimizer)}
    vars(optimizer).update({name: OrderedDict() for name in before})
    try:
        yield
    finally:
        vars(optimizer).update(before)

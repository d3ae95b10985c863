"""Random number states, so that what runs again draws the same numbers. A patch adds Megatron's
trackers by replacing `capture` and `restore`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def capture() -> Any:
    """The states now."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def restore(states: Any) -> None:
    """Go on from what `capture` returned."""
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])


def same(states: Any, others: Any) -> bool:
    """Whether nothing was drawn between the two; False where that cannot be told."""
    if isinstance(states, torch.Tensor) and isinstance(others, torch.Tensor):
        return torch.equal(states, others)
    if isinstance(states, (tuple, list)) and isinstance(others, (tuple, list)):
        return len(states) == len(others) and all(map(same, states, others))
    if isinstance(states, dict) and isinstance(others, dict):
        return states.keys() == others.keys() and all(same(states[key], others[key]) for key in states)
    return states is None and others is None


@contextlib.contextmanager
def as_of(states: Any) -> Iterator[None]:
    """Inside, the generators go on from ``states``; afterwards as if nothing had been drawn."""
    now = capture()
    restore(states)
    try:
        yield
    finally:
        restore(now)

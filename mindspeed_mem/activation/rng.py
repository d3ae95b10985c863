"""Random number states, so that what runs again draws the same numbers. Megatron's own states come from its patches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


def _capture() -> tuple:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def _restore(states: tuple) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])


class _Source:
    capture: Callable[[], Any] = staticmethod(_capture)
    restore: Callable[[Any], None] = staticmethod(_restore)


def use(capture: Callable[[], Any], restore: Callable[[Any], None]) -> None:
    """Take states by ``capture()`` and set them by ``restore(states)`` from now on: host, device, and trackers."""
    _Source.capture, _Source.restore = staticmethod(capture), staticmethod(restore)


def capture() -> Any:
    """The states now."""
    return _Source.capture()


def restore(states: Any) -> None:
    """Go on from what `capture` returned."""
    _Source.restore(states)


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
    now = _Source.capture()
    _Source.restore(states)
    try:
        yield
    finally:
        _Source.restore(now)

"""An allocator in front of torch's own that asks for room inside any operator, where somebody has brought one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from mindspeed_mem.device.base import Backend


class Delegating(Protocol):
    """What brings such allocators (experimental/delegating.py)."""

    def available(self, device: str) -> Path | None: ...

    def install(self, backend: Backend, make_room: Callable[[int], int]) -> Callable[[], None]: ...


_brought: list[Delegating] = []


def bring(delegating: Delegating) -> None:
    """Let engines use these allocators, wherever one is built."""
    _brought[:] = [delegating]


def ask_through_allocator(backend: Backend, make_room: Callable[[int], int]) -> bool:
    """Let the allocator of the backend's device call ``make_room(nbytes)``, which returns the bytes that it has freed,
    before a request fails; returns whether there is one."""
    for delegating in _brought:
        if delegating.available(backend.type) is not None:
            delegating.install(backend, make_room)
            return True
    return False

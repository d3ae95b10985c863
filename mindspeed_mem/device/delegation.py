"""An allocator in front of torch's own that asks for room inside any operator, where somebody has brought one."""

from __future__ import annotations

from collections.abc import Callable

from mindspeed_mem.device.base import Backend

MakeRoom = Callable[[int], int]
INSTALLERS: list[Callable[[Backend, MakeRoom], bool]] = []
"""Of those who bring one: each lets it call ``make_room(nbytes)``, which returns the bytes that it has freed, before a
request on the backend's device fails; returns whether there is one for it."""


def ask_through_allocator(backend: Backend, make_room: MakeRoom) -> bool:
    """Let an allocator ask for room, once for each device; returns whether there is one."""
    return any(install(backend, make_room) for install in INSTALLERS)

"""All that the engine knows of a storage, on the only attribute that it sets on one.

torch keeps a storage's Python object as long as the storage itself lives: what lies here dies with the memory. So
nobody holds a `Marks` but its storage.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

NAME = "_mindspeed_mem"


class Marks:
    """What is known of one storage. Types are those of the modules that set them, which lie above this one.

    Defaults are the class's: most are never set, and there is one for each storage that is saved.
    """

    record: weakref.ref[Any] | None = None
    """The `Record` of what it holds."""
    stays = False
    """It stays on the device for good."""
    static = False
    """It was there before the model ran: parameters, buffers, tables."""
    managed = False
    """Somebody else empties, refills or writes over it."""
    token: Any = None
    """The ledger's `Token`."""
    made_by: Any = None
    """What can make it again, should anybody save it (`MadeBy`)."""
    entry: Any = None
    """The first operator inside a recomputed one that took it (`Entry`)."""
    tape: tuple[weakref.ref[Any], int] | None = None
    """The inline operator that touched it last, and its number there."""
    watch: tuple[object, int] | None = None
    """Who counts it while a forward is watched, and its number there."""

    def keep(self) -> None:
        """It stays on the device for good."""
        self.stays, self.record = True, None


def known(storage: torch.UntypedStorage) -> Marks | None:
    """None: nobody has looked at it."""
    return storage.__dict__.get(NAME)


def of(storage: torch.UntypedStorage) -> Marks:
    """Made where there are none yet."""
    attributes = storage.__dict__
    found = attributes.get(NAME)
    if found is None:
        found = attributes[NAME] = Marks()
    return found


def forget(tensor: torch.Tensor) -> None:
    """Leave nothing on the storage of ``tensor``."""
    if tensor.layout is torch.strided:
        tensor.untyped_storage().__dict__.pop(NAME, None)


def set_by_others(storage: torch.UntypedStorage) -> dict[str, Any] | None:
    """The attributes that a program has set on it; None if there are none."""
    return {name: value for name, value in storage.__dict__.items() if name != NAME} or None


def is_static(storage: torch.UntypedStorage) -> bool:
    marks = known(storage)
    return marks is not None and marks.static


def is_managed(storage: torch.UntypedStorage) -> bool:
    marks = known(storage)
    return marks is not None and marks.managed


def mark_managed(outputs: Any) -> None:
    """These tensors' storages are emptied, refilled or written over by their owner: they are never moved."""
    for tensor in outputs if isinstance(outputs, (list, tuple)) else (outputs,):
        if isinstance(tensor, torch.Tensor):
            marks = of(tensor.untyped_storage())
            marks.keep()
            marks.managed = True

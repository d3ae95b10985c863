"""What the saved-tensor hook keeps: a handle per saved tensor, a record per storage.

A handle holds ``tensor.detach()``, never the tensor: keeping an output would build a cycle through its graph that is
never collected. When the device memory is released, the alias stays with empty data: it still shares the version
counter, so a change in place after saving is found at unpack, as autograd does without hooks.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_mem.activation.ledger import LEDGER

if TYPE_CHECKING:
    from mindspeed_mem.activation.frame import Frame
    from mindspeed_mem.activation.ledger import Token
    from mindspeed_mem.activation.mover import Mover
    from mindspeed_mem.activation.replay import Replay
    from mindspeed_mem.activation.tape import Tape

# States of a record. KEPT: stays on the device. DEVICE: selected, not copied yet. COPYING: copy out under way or done,
# device memory still held. HOST: device memory released. LOADED: copied back (perhaps still in flight).
# DROPPED: nowhere, to be made again by its replay. REMADE: that has happened.
KEPT, DEVICE, COPYING, HOST, LOADED = "kept", "device", "copying", "host", "loaded"
DROPPED, REMADE = "dropped", "remade"

STAYS = -1
"""The distance of a record that the plan may not select: it leaves only if memory runs out."""

KEEP = object()
"""On a storage (as ``_mem``, where a movable one has a weak reference to its record): stays on the device for good."""

_EMPTY: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


class OverwrittenError(RuntimeError):
    """A tensor that backward needs was modified in place meanwhile."""


def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    key = dtype, device
    if key not in _EMPTY:
        _EMPTY[key] = torch.empty(0, dtype=dtype, device=device)
    return _EMPTY[key]


def movable(tensor: torch.Tensor, device_type: str) -> bool:
    """Whether a saved tensor is an ordinary activation on the device: no parameter, subclass or other layout."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device.type != device_type:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor.is_nested:  # a layout alone does not say what they are
        return False
    base = tensor._base  # aten's linear saves ``weight.t()``, an ordinary tensor
    return base is None or type(base) is torch.Tensor


def native(tensor: torch.Tensor) -> Handle:
    """What a hook hands back for a tensor it leaves alone."""
    handle = Handle(tensor)
    if tensor.is_leaf:  # a parameter itself, whose data may be replaced meanwhile; an output would build a cycle
        handle.alias = tensor
    return handle


class Record:
    """One storage that backward needs. Handles hold it; it dies with the last of them."""

    __slots__ = (
        "mover",
        "frame",
        "layer",
        "op",
        "number",
        "last_use",
        "distance",
        "nbytes",
        "state",
        "storage",
        "token",
        "handles",
        "version",
        "base",
        "slab",
        "source",
        "out_event",
        "buffer",
        "in_event",
        "stream",
        "others",
        "attributes",
        "replay",
        "__weakref__",
    )

    def __init__(
        self,
        mover: Mover,
        frame: Frame,
        owner: tuple[int, str, int],
        storage: torch.UntypedStorage,
        token: Token,
        tensor: torch.Tensor,
        replay: Replay | Tape | None = None,
    ):
        self.mover, self.frame = mover, frame
        self.layer, self.op, self.number = owner
        self.last_use, self.distance = self.number, 0
        self.nbytes, self.state = token.nbytes, KEPT
        self.storage, self.token = weakref.ref(storage), token
        self.handles: list[weakref.ref[Handle]] = []
        self.version, self.base = tensor._version, weakref.ref(base_of(tensor))
        self.slab = self.source = self.out_event = self.buffer = self.in_event = None
        self.stream, self.others = frame.home, ()  # where its device memory is ready and freed; who saved it besides
        self.attributes: dict[str, Any] | None = None  # what a program had set on the storage when it left
        self.replay = replay
        if mover.known is not None:
            mover.known.add(self)
        if replay is not None:  # its device memory is left to whoever else holds it
            token.moved = True
            self.token, self.state = None, DROPPED
            self.attributes = _set_by_others(storage)
            mover.dropped[replay.layer, replay.op] += self.nbytes

    def saved_as(self, handle: Handle, tensor: torch.Tensor) -> None:
        """``handle`` is of one more saved tensor, ``tensor``."""
        self.mover.saves(self, tensor, first=not self.handles)
        self.handles.append(weakref.ref(handle))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether what was copied is still what ``tensor``, a view of the same storage, holds now.

        Two tensors may share a storage but not a version counter, so equal versions say nothing unless nobody has
        written at all, or both are views of one tensor.
        """
        version = tensor._version
        return version == self.version and (version == 0 or self.base() is base_of(tensor))

    def used_at(self, number: int) -> None:
        """Backward of operator ``number`` reads it."""
        if number < self.last_use:
            return  # what it is made from is there by then anyway
        self.last_use = number
        if self.state == DROPPED:
            self.replay.used_at(number)

    def drop_for(self, replay: Tape) -> None:
        """It can be made again by ``replay``: let go of the device memory."""
        self.mover.keep(self)  # a copy under way is given up
        if self.state != KEPT:  # it had left already
            return
        self.replay = replay
        self.drop_device()
        self.state = DROPPED
        self.mover.dropped[replay.layer, replay.op] += self.nbytes
        replay.used_at(self.last_use)

    def stay(self) -> None:
        """Not to be made again after all: somebody else holds the storage anyway."""
        storage = self.storage()
        for handle in self.live_handles():
            handle.alias.data = view_of(storage, *handle.layout)
            handle.layout = None
        self.token = storage._mem_token
        self.token.moved = False
        self.state, self.replay = KEPT, None

    def fill(self, tensor: torch.Tensor) -> None:
        """It has been made again, in the storage of ``tensor``."""
        self.buffer, self.state = tensor.detach(), REMADE
        self.mover.saves(self, tensor, first=True)
        self.version, self.base = tensor._version, weakref.ref(base_of(tensor))
        LEDGER.enter_copy(tensor.untyped_storage(), self.layer >= 0)
        self.mark(tensor.untyped_storage())

    def mark(self, storage: torch.UntypedStorage) -> None:
        """``storage`` takes the place of the one that has left, with what a program has set on that."""
        for name, value in (self.attributes or {}).items():
            setattr(storage, name, value)

    def bring_back(self) -> None:
        """See that its bytes are on the device, in `buffer`, for whatever compute does next."""
        if self.replay is None:
            self.mover.await_load(self)
        elif self.state == DROPPED:
            replay = self.replay
            with self.mover.on(replay.stream):
                replay.remake()
            self.mover.second_runs[replay.layer, replay.op] += 1
            if self.replay is None:  # memory ran out later in the second run, and it had to leave
                self.mover.await_load(self)
            else:
                self.mover.await_second_run(self)
        elif self.buffer._version != self.version:
            raise OverwrittenError(f"the output of {self.replay} was overwritten after it had been recomputed")
        else:
            self.mover.await_second_run(self)

    def live_handles(self) -> list[Handle]:
        return [handle for ref in self.handles if (handle := ref()) is not None]

    def whole(self) -> torch.Tensor | None:
        """The storage as uint8 [nbytes], or None when nobody holds it any more."""
        storage = self.storage()
        if storage is None:
            return None
        return view_of(storage, torch.uint8, (self.nbytes,), (1,), 0)

    def drop_device(self) -> None:
        """Let go of the device memory; the handles keep their layouts."""
        self.token.moved = True
        if (storage := self.storage()) is not None:
            self.attributes = _set_by_others(storage)
        for handle in self.live_handles():
            handle.let_go()
        self.token = None
        self.state = HOST

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        if self.state in (COPYING, HOST, LOADED):
            self.mover.retire(self)
        elif self.replay is not None:
            LEDGER.forget_moved(self.nbytes)


class Handle:
    """One saved tensor: what autograd keeps instead of it. ``record`` is None when it stays on the device for good."""

    __slots__ = ("alias", "version", "record", "frame", "number", "layout", "own", "__weakref__")

    def __init__(self, tensor: torch.Tensor, record: Record | None = None, frame: Frame | None = None, number: int = 0):
        self.alias, self.version = tensor.detach(), tensor._version
        self.record, self.frame, self.number = record, frame, number
        self.layout = self.own = None  # own: what a custom function may look for on it, see own_tensors.py
        if frame is not None:
            frame.saved_by(number)

    def __del__(self) -> None:
        frame = self.frame
        if frame is not None:
            self.alias = self.record = None  # what this frees makes room for what is copied back now
            frame.dropped(self.number)

    def let_go(self) -> None:
        alias = self.alias
        self.layout = alias.dtype, alias.size(), alias.stride(), alias.storage_offset()
        alias.data = _empty(alias.dtype, alias.device)

    def changed(self) -> bool:
        """Whether the tensor has been modified in place since it was saved."""
        return self.version is not None and self.alias._version != self.version

    def check_version(self) -> None:
        """Raise as autograd would: a hook switches its own check off."""
        if self.changed():
            found = self.alias._version
            where = f" by {self.record.op} of layer {self.record.layer}" if self.record is not None else ""
            raise OverwrittenError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor produced{where} is at version {found}; expected version {self.version} instead"
            )

    def bring_back(self) -> torch.Tensor:
        """The saved tensor with its own dtype, size, stride and offset.

        What can leave is returned as a tensor of its own: autograd hands on what needs no gradient as it is, and only
        another tensor than `alias` shows who makes room that the running operator works on the memory.
        Raises RuntimeError if it has been modified in place since it was saved.
        """
        self.check_version()
        if self.layout is None:
            return self.alias if self.record is None else self.alias.detach()
        self.record.bring_back()
        dtype, size, stride, offset = self.layout
        return view_of(self.record.buffer.untyped_storage(), dtype, size, stride, offset)


def _set_by_others(storage: torch.UntypedStorage) -> dict[str, Any] | None:
    return {name: value for name, value in vars(storage).items() if not name.startswith("_mem")} or None


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def view_of(storage: torch.UntypedStorage, dtype: torch.dtype, size, stride, offset: int) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)

"""What the saved-tensor hook keeps: a handle per saved tensor, a record per storage.

A handle holds ``tensor.detach()``, never the tensor: keeping an output would build a cycle through its graph that is
never collected. When the device memory is released, the alias stays with empty data: it still shares the version
counter, so a change in place after saving is found at unpack, as autograd does without hooks.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mindspeed_mem.activation.storage import marks
from mindspeed_mem.activation.storage.ledger import LEDGER, Token
from mindspeed_mem.device import fast_tensors

if TYPE_CHECKING:
    from mindspeed_mem.device.base import Event, Stream
    from mindspeed_mem.device.slabs import Slab

# States of a record. KEPT: stays on the device. DEVICE: selected, not copied yet. COPYING: copy out under way or done,
# device memory still held. HOST: device memory released. LOADED: copied back (perhaps still in flight).
# DROPPED: nowhere, to be made again by a second run. REMADE: that has happened.
KEPT, DEVICE, COPYING, HOST, LOADED = "kept", "device", "copying", "host", "loaded"
DROPPED, REMADE = "dropped", "remade"

STAYS = -1
"""The distance of a record that the plan may not select: it leaves only if memory runs out."""

Owner = tuple[int, str, int]
"""Who produced a storage: layer, operator and its number in the micro-batch."""

Layout = tuple[torch.dtype, torch.Size, tuple[int, ...], int | torch.SymInt]
"""How a tensor lies in its storage: dtype, size, stride, offset."""


Own = tuple[type | None, dict[str, Any]] | tuple[type | None, dict[str, Any], weakref.ref[torch.Tensor]]
"""What a custom function may look for on what it saved: its class (None: it is a result of its own) and attributes, and
once it has been read, that very tensor."""


class WayBack(Protocol):
    """What brings a record's bytes back to the device: copies from the host, or a second run of what made it."""

    def bring_back(self, record: Record) -> None:
        """See that its bytes are in `Record.buffer`, for whatever compute does next."""

    def used_at(self, number: int) -> None:
        """Backward of operator ``number`` will ask for it."""

    def keep(self, record: Record) -> None:
        """It stays on the device after all: somebody else holds its memory."""

    def forget(self, record: Record) -> None:
        """Nobody asks for it any more; called on any thread."""


class InFlight(Protocol):
    """What records and handles know of the micro-batch that they belong to (`MicroBatch`)."""

    key: tuple[int | None, int]
    home: Stream
    home_key: Any
    in_backward: int
    moved: dict[int, weakref.ref[Record]]

    def saved_by(self, number: int) -> None: ...

    def dropped(self, number: int) -> None: ...

    def unpacks(self, number: int) -> None: ...


class Remade(Protocol):
    """A storage that can be made again: what second runs, and the mover for their streams, know of it."""

    nbytes: int
    state: str
    stream: Stream
    others: tuple[Stream, ...]

    @property
    def micro_batch(self) -> InFlight: ...

    @property
    def buffer(self) -> torch.Tensor | None: ...


class OfFunction(Protocol):
    """What autograd keeps of a tensor that a custom function saves."""

    alias: torch.Tensor
    own: Own | None


OVERWRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
    "produced{} is at version {}; expected version {} instead"
)


class OverwrittenError(RuntimeError):
    """A tensor that backward needs was modified in place meanwhile."""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor this rank's part, any other tensor itself."""
    return tensor if type(tensor) is torch.Tensor else getattr(tensor, "_local_tensor", tensor)


def part_of(tensor: torch.Tensor, device_type: str) -> torch.Tensor | None:
    """This rank's part of a DTensor that is an ordinary activation; None of anything else.

    The part has no version counter, so only what nobody has written over is one.
    """
    local = local_of(tensor)
    base = tensor if tensor._base is None else tensor._base
    if local is tensor or tensor._version or tensor.is_leaf or isinstance(base, torch.nn.Parameter):
        return None
    return local if fast_tensors.is_plain(local, device_type) else None


def native(tensor: torch.Tensor) -> Handle:
    """What a hook hands back for a tensor it leaves alone."""
    handle = Handle(tensor)
    if tensor.is_leaf:  # a parameter itself, whose data may be replaced meanwhile; an output would build a cycle
        handle.alias = tensor
    return handle


class Record:
    """One storage that backward needs. Handles hold it; it dies with the last of them."""

    __slots__ = (
        "way_back",
        "micro_batch",
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
        "__weakref__",
    )

    def __init__(
        self,
        way_back: WayBack,
        micro_batch: InFlight,
        owner: Owner,
        storage: torch.UntypedStorage,
        token: Token,
        tensor: torch.Tensor,
    ):
        """Of ``storage``, which ``owner`` made and ``tensor`` is a view of."""
        self.way_back, self.micro_batch = way_back, micro_batch
        self.layer, self.op, self.number = owner
        self.last_use, self.distance = self.number, 0
        self.nbytes, self.state = token.nbytes, KEPT
        self.storage = weakref.ref(storage)
        self.token: Token | None = token
        self.handles: list[weakref.ref[Handle]] = []
        base = tensor._base
        self.version, self.base = tensor._version, weakref.ref(tensor if base is None else base)
        self.slab: Slab | None = None
        self.source: torch.Tensor | None = None  # uint8 [nbytes], while it is copied out
        self.buffer: torch.Tensor | None = None  # that it came back into
        self.out_event: Event | None = None
        self.in_event: Event | None = None
        self.stream: Stream = micro_batch.home  # where its device memory is ready and freed
        self.others: tuple[Stream, ...] = ()  # that saved it besides
        self.attributes: dict[str, Any] | None = None  # what a program had set on the storage when it left

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
            self.way_back.used_at(number)

    def stay(self, way_back: WayBack) -> None:
        """Its device memory was left to whoever else holds the storage, and still is there: it is kept after all."""
        storage = self.storage()
        assert storage is not None
        for handle in self.live_handles():
            handle.put_back(storage)
        self.token = marks.of(storage).token
        self.token.moved = False
        self.state, self.way_back = KEPT, way_back

    def fill(self, tensor: torch.Tensor) -> None:
        """It has been made again, in the storage of ``tensor``."""
        self.buffer, self.state = tensor.detach(), REMADE
        self.version, self.base = tensor._version, weakref.ref(base_of(tensor))
        LEDGER.enter_copy(tensor.untyped_storage(), self.layer >= 0, (self.layer, self.op))
        self.mark(tensor.untyped_storage())

    def mark(self, storage: torch.UntypedStorage) -> None:
        """``storage`` takes the place of the one that has left, with what a program has set on that."""
        for name, value in self.attributes.items() if self.attributes else ():
            setattr(storage, name, value)

    def live_handles(self) -> list[Handle]:
        return [handle for ref in self.handles if (handle := ref()) is not None]

    def whole(self) -> torch.Tensor | None:
        """The storage as uint8 [nbytes]; None when nobody holds it any more, or who manages it has emptied it."""
        storage = self.storage()
        return whole(storage) if storage is not None and storage.nbytes() == self.nbytes else None

    def leave(self, state: str, way_back: WayBack) -> None:
        """Let go of the device memory, from where ``way_back`` will bring it; the handles keep their layouts."""
        assert self.token is not None
        self.token.moved = True
        if (storage := self.storage()) is not None and len(storage.__dict__) > 1:
            self.attributes = marks.set_by_others(storage)
        for ref in self.handles:
            if (handle := ref()) is not None:
                handle.let_go()
        self.token = None
        self.state, self.way_back = state, way_back

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.way_back.forget(self)


class Handle:
    """One saved tensor: what autograd keeps instead of it. ``record`` is None when it stays on the device for good."""

    __slots__ = ("alias", "version", "record", "micro_batch", "number", "layout", "own", "__weakref__")

    def __init__(
        self, tensor: torch.Tensor, record: Record | None = None, micro_batch: InFlight | None = None, number: int = 0
    ):
        self.alias = tensor.detach()
        try:
            self.version: int | None = tensor._version  # None: it need not be what it was
        except RuntimeError:  # of inference mode
            self.version = None
        self.record, self.micro_batch, self.number = record, micro_batch, number
        self.layout: Layout | None = None  # while it has left
        self.own: Own | None = None
        if micro_batch is not None:
            micro_batch.saved_by(number)

    def __del__(self) -> None:
        micro_batch = self.micro_batch
        if micro_batch is not None:
            del self.alias, self.record  # what this frees makes room for what is copied back now
            micro_batch.dropped(self.number)

    def let_go(self) -> None:
        alias = self.alias
        self.layout = alias.dtype, alias.size(), alias.stride(), alias.storage_offset()
        alias.data = fast_tensors.empty(alias.dtype, alias.device)

    def put_back(self, storage: torch.UntypedStorage) -> None:
        """Its memory has been there all the time."""
        assert self.layout is not None
        self.alias.data = fast_tensors.view_of(storage, *self.layout)
        self.layout = None

    def changed(self) -> bool:
        """Whether the tensor has been modified in place since it was saved."""
        return self.version is not None and self.alias._version != self.version

    def check_version(self) -> None:
        """Raise as autograd would: a hook switches its own check off."""
        if self.changed():
            found = self.alias._version
            record = self.record
            where = f" by {record.op} of layer {record.layer}" if record is not None and record.layer >= 0 else ""
            raise OverwrittenError(OVERWRITTEN.format(where, found, self.version))

    def bring_back(self) -> torch.Tensor:
        """The saved tensor with its own dtype, size, stride and offset.

        What can leave is returned as a tensor of its own: autograd hands on what needs no gradient as it is, and only
        another tensor than `alias` shows who makes room that the running operator works on the memory.
        Raises RuntimeError if it has been modified in place since it was saved.
        """
        alias = self.alias
        if self.version is not None and alias._version != self.version:
            self.check_version()
        if self.layout is None:
            return alias if self.record is None else alias.detach()
        record, layout = self.record, self.layout
        assert record is not None
        record.way_back.bring_back(record)
        assert record.buffer is not None
        return fast_tensors.view_of(record.buffer.untyped_storage(), *layout)


class Part:
    """One saved DTensor: a handle of this rank's part, and what makes a DTensor of it."""

    __slots__ = ("handle", "like")

    def __init__(self, handle: Handle, tensor: Any):
        self.handle = handle
        with torch._C.DisableTorchFunction():
            self.like: Any = tensor.detach()  # shares the version counter
        self.like._local_tensor = handle.alias  # and no memory that leaves

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """The DTensor of which ``local`` is this rank's part."""
        if self.like._version:
            raise OverwrittenError(OVERWRITTEN.format("", self.like._version, 0))
        return type(self.like)(local, self.like._spec, requires_grad=False)


def key_of(record: Record) -> tuple[int, int, int]:
    """Model chunk, number of the operator that made it, bytes: the same in every pass of the chunk."""
    return record.micro_batch.key[1], record.number, record.nbytes


def version_of(tensor: torch.Tensor) -> int:
    """How often it has been written to; 0 of a tensor of inference mode, which does not count that."""
    return 0 if tensor.is_inference() else tensor._version


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def layout_of(tensor: torch.Tensor) -> Layout:
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()


def take_hold(storage: torch.UntypedStorage | None) -> torch.UntypedStorage | None:
    """Of what a weak reference gave. Older torches (2.6) leave it to the tensors alone otherwise: its memory may go
    while its object is there, and who counts those that hold it misses one."""
    if storage is not None and (hold := getattr(storage, "_fix_weakref", None)) is not None:
        hold()
    return storage


def whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of it as uint8 [nbytes]."""
    return fast_tensors.view_of(storage, torch.uint8, (storage.nbytes(),), (1,), 0)

"""What every device offers to the rest of the package: streams, events, copies, host buffers, memory figures."""

from __future__ import annotations

import abc
import re
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch

AnyStream = TypeVar("AnyStream", bound="Stream")
AnyEvent = TypeVar("AnyEvent", bound="Event")
_WANTED = re.compile(r"tried to allocate (\d+(?:\.\d+)?) ?(bytes|[KMGT]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class DeviceError(ValueError):
    """A device was asked for that cannot be had; the message says what is there and what to do."""


class Stream:
    """An ordered queue of device work. Two are equal when they stand for the same native stream.

    `side` is False for the stream that the model computes on, True for one made by `Backend.new_stream`.
    """

    __slots__ = ("native", "name", "side", "key")

    def __init__(self, native: Any, name: str, side: bool, key: object = None) -> None:
        self.native, self.name, self.side = native, name, side  # of torch.cuda, of torch_npu, or none
        self.key = key  # an accelerator's: what `Backend.stream_key` says where it is current

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.native is other.native or self.native == other.native)

    __hash__ = None  # type: ignore[assignment]  # the hash of torch_npu's streams waits for all that the host has queued

    def __repr__(self) -> str:
        return f"Stream({self.name!r})"


def is_host_device(device: torch.device | str | None) -> bool:
    """Whether tensors on `device` are host memory; None is torch's default, the host."""
    return device is None or torch.device(device).type == "cpu"


class Event:
    """A point in a stream: it has happened once all work submitted before it is done."""

    __slots__ = ("__weakref__",)


class Backend(abc.ABC, Generic[AnyStream, AnyEvent]):
    """One device type, with its kinds of streams and events.

    Tensors given to `copy` are one-dimensional uint8; sizes are in bytes, times in seconds.
    """

    type: str
    """Its name, as `get_backend` knows it."""

    is_host: bool = False
    """Whether it is the host itself: tensors and random generator are the host's, and Megatron has to be helped."""

    collectives: str = "gloo"
    """torch.distributed's backend for its tensors."""

    sums_float64: bool = False
    """Whether its collectives take float64."""

    fuses_adam: bool = False
    """Whether torch's Adam has a fused kernel for it."""

    runs_mindspeed: bool = False
    """Whether Megatron gets to it by MindSpeed."""

    copies_block: bool = False
    """Whether computation stands still while anything is copied: `copy` returns when it is done."""

    one_stream: bool = False
    """Whether all computation is on one stream: `stream_key` never changes."""

    @property
    def tensor_type(self) -> str:
        """The type of its tensors' `torch.device`."""
        return self.type

    # ---- streams and events

    @abc.abstractmethod
    def current_stream(self) -> AnyStream:
        """The stream that work of this thread goes to now; read live, so do not keep it."""

    def stream_key(self) -> object:
        """Tells the current stream from others, cheaper than `current_stream`: equal as long as the stream is."""
        return self.current_stream()

    def is_capturing(self) -> bool:
        """Whether what runs on the current stream is noted as a graph, to run later; False where asking would wait."""
        return False

    @abc.abstractmethod
    def new_stream(self, name: str) -> AnyStream:
        """A side stream; `name` is for messages and traces."""

    @abc.abstractmethod
    def record(self, stream: AnyStream) -> AnyEvent:
        """An event after all work submitted to `stream` so far."""

    @abc.abstractmethod
    def wait(self, stream: AnyStream, event: AnyEvent, reason: str) -> None:
        """Let later work of `stream` start only when `event` has happened; the host goes on.

        `reason` is a short constant label; the simulated device can leave out all waits of one reason. Where `stream`
        is no side stream, the time it stands still counts in `stall_seconds`.
        """

    def on_stream(self, stream: AnyStream) -> AbstractContextManager:
        """Inside, `stream` is this thread's current one: a collective started there waits for it, and for no other."""
        return nullcontext()

    def copies_on(self, stream: AnyStream) -> AbstractContextManager:
        """Around copies on `stream`, which are cheaper inside. Nothing is computed or allocated there."""
        return nullcontext()

    def used_on(self, tensor: torch.Tensor, stream: AnyStream, reason: str) -> None:
        """Let the allocator know that `stream`, not the one it was allocated on, uses the memory of `tensor`, too.

        Once freed, it is handed out again only when all that `stream` has been given by then is done. `reason` as for
        `wait`.
        """
        return None

    @abc.abstractmethod
    def done(self, event: AnyEvent) -> bool:
        """Whether `event` has happened, as far as the host can tell without waiting."""

    @abc.abstractmethod
    def synchronize(self, event: AnyEvent | None = None) -> None:
        """Let the host wait for `event`, or for everything on the device."""

    def timestamp(self, stream: AnyStream | None = None) -> Any:
        """The moment when all work submitted so far to `stream` (None: the current one) is done, for `seconds_between`.

        The host does not wait.
        """
        return time.perf_counter()

    def seconds_between(self, begin: Any, end: Any) -> float:
        """Seconds from one `timestamp` to a later one; the host may wait until both have happened."""
        return end - begin

    def begin_range(self, name: str) -> Any:
        """A range begins for the device's own profiler, where there is one; returns what `end_range` takes."""
        return None

    def end_range(self, begun: Any) -> None:
        """It ends, on whichever thread."""
        return None

    # ---- memory

    @abc.abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] on the device, uninitialised, allocated on the current stream through the dispatcher.

        A side stream may write to it only after waiting for the current stream as it is when this returns: the memory
        may have belonged to a tensor that work in flight still uses. Raises the device's out-of-memory error.
        """

    @abc.abstractmethod
    def host_empty(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] on the host, uninitialised, pinned where that exists; `host_bytes` tells what it takes.

        It must outlive every copy that uses it: nothing else keeps it from being unmapped.
        """

    def host_bytes(self, nbytes: int) -> int:
        """What a host buffer of `nbytes` takes: more where pinned memory comes in certain sizes."""
        return nbytes

    def free_host(self) -> None:
        """Return to the system what an allocator of host buffers keeps of those that are gone."""
        return None

    @abc.abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: AnyStream) -> None:
        """Copy uint8[n] to uint8[n] on `stream`, in either direction, without waiting.

        Neither version counter changes, the GIL is released meanwhile, and both tensors must be kept until the copy
        is done. Raises ValueError when the sizes differ.
        """

    @abc.abstractmethod
    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in this device's memory."""

    @abc.abstractmethod
    def allocated(self) -> int | None:
        """Bytes of device memory in tensors now; None where nobody counts."""

    @abc.abstractmethod
    def peak(self) -> int | None:
        """The most `allocated` has been since `reset_peak`; None where nobody counts."""

    @abc.abstractmethod
    def reset_peak(self) -> None:
        """Let `peak` start again from `allocated`."""

    @abc.abstractmethod
    def limit(self) -> int | None:
        """Bytes of memory that this process may use: what the device has, or less; None where nothing limits it."""

    @abc.abstractmethod
    def limit_memory(self, nbytes: int | None) -> None:
        """Let this process use no more than `nbytes` of device memory from now on; None: as much as there is.

        Beyond it an allocation raises the device's out-of-memory error, and `limit` and `room` answer accordingly. To
        be called before the model is built; called again it replaces the limit. Raises DeviceError for a number that
        is not above 0 or is more than the device has.
        """

    @abc.abstractmethod
    def is_out_of_memory(self, exc: BaseException) -> bool:
        """Whether `exc` says that an allocation on this device did not fit."""

    def bytes_wanted(self, exc: BaseException) -> int:
        """How many bytes that allocation had asked for; 0 where the message does not say."""
        found = _WANTED.search(str(exc))
        return int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0

    def is_from_driver(self, exc: BaseException) -> bool:
        """Whether `exc`, which says that memory has run out, comes from elsewhere than torch's allocator."""
        return False

    def give_back(self) -> int:
        """Return to the driver what torch's allocator keeps without using it; returns the bytes.

        What does not ask that allocator (handles of cuBLAS, communicators of NCCL) can have only what the driver has.
        """
        return 0

    def keep_reserve(self) -> None:
        """Keep torch's allocator from taking all memory, for what asks the driver itself: `limit` answers accordingly.

        Nothing where a limit is in force that somebody else has set. Called again, it counts anew what is there.
        """
        return None

    def lift_reserve(self) -> None:
        """Undo `keep_reserve`."""
        return None

    def nominal_limit(self) -> int | None:
        """`limit` without the reserve of `keep_reserve`: the same in each run of a job on such a device."""
        return self.limit()

    def allocation_retries(self) -> int:
        """How often, so far, the allocator had to give back all that it kept before a request could be met, or failed.

        That costs a stand-still, and says that memory is short whatever `allocated` says: it is in pieces. 0 on devices
        whose allocator keeps nothing.
        """
        return 0

    def against_pieces(self) -> str | None:
        """A setting with which the allocator would keep its memory in one piece; None where it does, or cannot."""
        return None

    def room(self) -> int | None:
        """Bytes of device memory that can still be had; None where nobody knows."""
        allocated, limit = self.allocated(), self.limit()
        return None if allocated is None or limit is None else limit - allocated

    def use_device_of_rank(self) -> None:
        """Make the device of this node's rank (LOCAL_RANK) the current one, unless another than the first one is."""
        return None

    def peak_held(self) -> int | None:
        """The most that the allocator has held since `reset_peak`, in tensors or not; `peak` where it keeps nothing."""
        return self.peak()

    def index(self) -> int | None:
        """The number of the current device; None where the host is the device."""
        return None

    def pci_address(self) -> str | None:
        """Where the current device sits on the PCI bus, such as "0000:3b:00.0"; None if unknown or nowhere."""
        return None

    def foreign_allocator(self) -> str | None:
        """What has taken the place of torch's own allocator on this device; None if nothing has."""
        return None

    def on_host(self) -> AbstractContextManager:
        """Inside, torch's host tensors do not count as device memory, on a device where they otherwise would."""
        return nullcontext()

    # ---- the rest

    @abc.abstractmethod
    def rng_state(self, index: int | None = None) -> torch.Tensor:
        """State of the default random generator (uint8, on the host) of the device of this number, or the current."""

    @abc.abstractmethod
    def set_rng_state(self, state: torch.Tensor, index: int | None = None) -> None:
        """Put back what `rng_state` returned."""

    def generator(self, index: int | None = None) -> torch.Generator | None:
        """That generator itself, where it is not the host's; its seed and its offset are all its state."""
        return None

    @abc.abstractmethod
    def stall_seconds(self) -> float:
        """Seconds that computation has stood still for copies so far; stands still in progress are left out.

        Where reading a time makes the host wait, only this does, and the latest ones stand for those before.
        """

    def describe(self) -> dict[str, object]:
        """A few plain values for a report: type, device name, memory, versions."""
        return {"type": self.type, "torch": torch.__version__, "memory_bytes": self.limit()}


def check_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Refuse what `Backend.copy` cannot do; a silent broadcast or conversion would corrupt an activation."""
    if target.dtype is torch.uint8 is source.dtype and target.dim() == 1 and target.shape == source.shape:
        return
    for name, tensor in (("target", target), ("source", source)):
        if tensor.dtype != torch.uint8 or tensor.dim() != 1:
            raise ValueError(
                f"copy {name}: got {tensor.dtype} of shape {tuple(tensor.shape)}; "
                "give a one-dimensional torch.uint8 tensor (a view of the storage's bytes)"
            )
    if target.numel() != source.numel():
        raise ValueError(f"copy: target has {target.numel()} bytes, source {source.numel()}; they must be equal")


def check_limit(nbytes: int | None, available: int, where: str) -> None:
    """Refuse what `Backend.limit_memory` cannot do on a device (`where`) that has `available` bytes."""
    if nbytes is None or 0 < nbytes <= available:
        return
    raise DeviceError(
        f"limit of device memory: got {nbytes} bytes; {where} has {available} bytes: give 1 to {available}, or no limit"
    )

"""What CUDA and NPU have in common: torch's device module of the one or the other does the work."""

from __future__ import annotations

import abc
import collections
import logging
import os
import re
import threading
import warnings
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mindspeed_mem import reserve
from mindspeed_mem.device import numa
from mindspeed_mem.device.base import Backend, Event, Stream, check_copy, check_limit

logger = logging.getLogger(__name__)

_HAIR = 1e-3  # bytes by which a limit, read back as a share of the memory, may fall short of a whole number
_PENDING_STALLS = 256  # event pairs kept before those that have happened are added up


class NativeEvent(Event):
    """A recorded device event. When nobody refers to it any more, the native event goes back to its pool.

    Safe while a stream still waits for it where such a wait means the point recorded before, not a later one, as CUDA's
    does. Where it does not, `AcceleratorBackend.reuses_events` is False and the pool keeps nothing.
    """

    __slots__ = ("native", "happened", "awaited", "_pool")

    def __init__(self, native: Any, pool: collections.deque[Any]) -> None:
        self.native, self._pool = native, pool
        self.happened = False  # as far as the host has asked
        self.awaited: object = False  # `Stream.key` of the last one that waits for it: it need not do so again

    def __del__(self) -> None:
        self._pool.append(self.native)


class AcceleratorBackend(Backend[Stream, NativeEvent]):
    """A device with real streams. `module` is torch.cuda or torch.npu, `type` its device type."""

    driver_full: re.Pattern[str]
    """What libraries, and older torch_npu itself, say if there is no memory left: RuntimeErrors of no certain type."""
    perhaps_full: re.Pattern[str]
    """What they say for this reason or another."""
    allocator_variables: tuple[str, ...] = ("PYTORCH_ALLOC_CONF",)
    """Of the environment, with settings of torch's allocators: the first that is set is read."""
    reuses_events = True
    reading_waits = False
    """Whether the host waits for its own queue when it asks for the time between two events that have happened."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._events: dict[object, collections.deque[Any]] = {}  # native events ready for use, by device and kind
        self._stalls: collections.deque[tuple[NativeEvent, NativeEvent]] = collections.deque()
        self._stalled = 0.0
        self._current_streams: dict[Hashable, Stream] = {}
        self._unread = 0  # stalls too many to keep: those kept stand for them
        self._lock = threading.Lock()
        self._told_unpinned = self._is_near = False
        self._fractions: dict[int, float] = {}  # of a device's memory that this process may use, if we have set it
        self._asked: dict[int, int | None] = {}  # the limit that was asked for, by device
        self._reserving: dict[int, int] = {}  # the one that leaves just the reserve

    @property
    def device(self) -> torch.device:
        """The current device, with its index."""
        return torch.device(self.type, self._module.current_device())

    # ---- streams and events

    def current_stream(self) -> Stream:
        key = self.stream_key()
        found = self._current_streams.get(key)
        if found is None:
            found = Stream(self._module.current_stream(), f"{self.type} current", side=False, key=key)
            self._current_streams[key] = found
        return found

    current_stream_slowly = current_stream  # where the other is in C++

    @abc.abstractmethod
    def stream_key(self) -> Hashable:
        """The stream's number, device and type: what torch makes its stream objects of, without making one."""

    def new_stream(self, name: str) -> Stream:
        native = self._module.Stream()
        with self._module.stream(native):
            return Stream(native, name, side=True, key=self.stream_key())

    def record(self, stream: Stream) -> NativeEvent:
        return self._record(stream.native, timing=False)

    def _record(self, stream: Any, timing: bool) -> NativeEvent:
        key = stream.device, timing  # an event belongs to the device it was first recorded on
        pool = self._events.get(key)
        if pool is None:
            pool = self._events.setdefault(key, collections.deque(maxlen=None if self.reuses_events else 0))
        try:
            native = pool.pop()
        except IndexError:
            native = self._module.Event(enable_timing=timing)
        native.record(stream)
        return NativeEvent(native, pool)

    def wait(self, stream: Stream, event: NativeEvent, reason: str) -> None:
        if event.happened or event.awaited == stream.key:
            return
        if stream.side:
            stream.native.wait_event(event.native)
        elif not self.done(event):  # what has happened is waited for by nobody
            begin = self._record(stream.native, timing=True)
            stream.native.wait_event(event.native)
            self._stalls.append((begin, self._record(stream.native, timing=True)))
            if len(self._stalls) > _PENDING_STALLS:
                self._add_up(asked=False)
        event.awaited = stream.key

    def on_stream(self, stream: Stream) -> AbstractContextManager:
        return self._module.stream(stream.native)

    def used_on(self, tensor: torch.Tensor, stream: Stream, reason: str) -> None:
        tensor.record_stream(stream.native)

    def done(self, event: NativeEvent) -> bool:
        if not event.happened:
            event.happened = event.native.query()
        return event.happened

    def synchronize(self, event: NativeEvent | None = None) -> None:
        if event is None:
            self._module.synchronize()
        else:
            event.native.synchronize()

    def stall_seconds(self) -> float:
        self._add_up(asked=True)
        return self._stalled

    def timestamp(self, stream: Stream | None = None) -> NativeEvent:
        return self._record(self._module.current_stream() if stream is None else stream.native, timing=True)

    def seconds_between(self, begin: NativeEvent, end: NativeEvent) -> float:
        begin.native.synchronize()  # the two may be of different streams
        end.native.synchronize()
        return begin.native.elapsed_time(end.native) / 1000.0

    def _add_up(self, asked: bool) -> None:
        if not self._lock.acquire(blocking=False):
            return  # somebody is at it: perhaps this very thread, whose garbage collector ended a wait's owner
        try:
            if self.reading_waits and not asked:
                self._stalls.popleft()
                self._unread += 1
                return
            seconds, read = 0.0, 0
            while self._stalls and self._stalls[0][1].native.query():
                begin, end = self._stalls.popleft()
                seconds += begin.native.elapsed_time(end.native) / 1000.0
                read += 1
            if read:
                self._stalled += seconds * (1 + self._unread / read)
                self._unread = 0
        finally:
            self._lock.release()

    # ---- memory

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def host_empty(self, nbytes: int) -> torch.Tensor:
        if not self._is_near:
            self._is_near = True
            logger.info(numa.bind(self.index(), self.pci_address()))
        with _disable_current_modes():  # the guard's would take a full host for a full device
            return self._pinned(nbytes)

    def _pinned(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            if not self._told_unpinned:
                self._told_unpinned = True
                warnings.warn(
                    f"{self.type}: host memory cannot be pinned ({error}); copies will be slow and will not overlap "
                    "with computation. Raise the locked-memory limit (ulimit -l) or lower the host budget.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        check_copy(target, source)
        with nullcontext() if stream.key == self.stream_key() else self._module.stream(stream.native):
            target.data.copy_(source, non_blocking=True)  # .data: a version counter of its own

    def copies_on(self, stream: Stream) -> AbstractContextManager:
        return self._module.stream(stream.native)

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.type

    def allocated(self) -> int | None:
        return self._module.memory_allocated()

    def peak(self) -> int | None:
        return self._module.max_memory_allocated()

    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats()

    def limit(self) -> int:
        index = self._module.current_device()
        read = getattr(self._module, "get_per_process_memory_fraction", None)  # others may set it, too
        fraction = self._fractions.get(index, 1.0) if read is None else read(index)
        return int(min(fraction, 1.0) * self._total() + _HAIR)

    def limit_memory(self, nbytes: int | None) -> None:
        index = self._module.current_device()
        check_limit(nbytes, self._total(), f"{self.type} {index}")
        self._asked[index] = nbytes
        self._reserving.pop(index, None)
        self._enforce(index, nbytes)

    def _enforce(self, index: int, nbytes: int | None) -> None:
        total = self._total()
        # The half: the allocator rounds down what it makes of the fraction.
        self._fractions[index] = fraction = 1.0 if nbytes is None else min((nbytes + 0.5) / total, 1.0)
        if nbytes is not None and self._module.memory_reserved() > nbytes:
            self._module.empty_cache()  # what the allocator keeps already, no limit takes away from it
        self._module.set_per_process_memory_fraction(fraction, index)

    def keep_reserve(self) -> None:
        index, total, limit = self._module.current_device(), self._total(), self.limit()
        asked = self._asked.get(index) is not None or (limit < total and limit != self._reserving.get(index))
        if asked or self.foreign_allocator() is not None:
            return
        available = self._module.mem_get_info()[0] + self._module.memory_reserved()
        limit = min(available, total) - self._reserve()
        if limit > 0:
            self._enforce(index, limit)
            self._reserving[index] = self.limit()  # as it is read back, rounded

    def lift_reserve(self) -> None:
        index = self._module.current_device()
        if self._reserving.pop(index, None) is not None:
            self._enforce(index, self._asked.get(index))

    def nominal_limit(self) -> int | None:
        limit = self.limit()
        return self._total() if limit == self._reserving.get(self._module.current_device()) else limit

    def _reserve(self) -> int:
        # At a full device libraries fail, and what torch's allocator only keeps is none of theirs.
        return reserve.contexts(self._total())

    def allocation_retries(self) -> int:
        stats = getattr(self._module, "memory_stats_as_nested_dict", None) or self._module.memory_stats
        return stats().get("num_alloc_retries", 0)

    def against_pieces(self) -> str | None:
        name, settings = self.allocator_settings()
        if "expandable_segments:True" in settings.split(",") or self.foreign_allocator() is not None:
            return None
        return f"{name}={settings and settings + ','}expandable_segments:True"

    def allocator_settings(self) -> tuple[str, str]:
        """Of torch's allocators: the variable of the environment that they are read from, and what is in it."""
        for name in self.allocator_variables:
            if name in os.environ:
                return name, "".join(os.environ[name].split())
        return self.allocator_variables[0], ""

    def room(self) -> int | None:
        # What torch may still ask the driver for, and what it keeps without using it.
        free, reserved = self._module.mem_get_info()[0], self._module.memory_reserved()
        return max(min(free, self.limit() - reserved), 0) + reserved - self._module.memory_allocated()

    def peak_held(self) -> int | None:
        return self._module.max_memory_reserved()

    def give_back(self) -> int:
        kept = self._module.memory_reserved()
        self._module.empty_cache()
        return kept - self._module.memory_reserved()

    def use_device_of_rank(self) -> None:
        rank = os.environ.get("LOCAL_RANK", "")  # a process that sees one device only takes that
        if rank.isdigit() and 0 < int(rank) < self._module.device_count() and self._module.current_device() == 0:
            self._module.set_device(int(rank))

    def index(self) -> int | None:
        return self._module.current_device()

    def pci_address(self) -> str | None:
        found = self._module.get_device_properties(self._module.current_device())
        place = [getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
        numbers = [number for number in place if isinstance(number, int)]
        if len(numbers) < len(place):
            return None  # older torch, and torch_npu, do not tell
        return "{:04x}:{:02x}:{:02x}.0".format(*numbers)

    def _total(self) -> int:
        return self._module.get_device_properties(self._module.current_device()).total_memory

    def foreign_allocator(self) -> str | None:
        uncached = f"PYTORCH_NO_{self.type.upper()}_MEMORY_CACHING"  # then torch counts and limits nothing
        if os.environ.get(uncached, "0") != "0":
            return uncached
        name = getattr(getattr(self._module, "memory", None), "get_allocator_backend", lambda: "native")()
        return "a pluggable allocator" if name == "pluggable" else None

    def is_from_driver(self, exc: BaseException) -> bool:
        # Older torch_npu's allocator raises a plain RuntimeError, too, but says what it was asked for.
        return not isinstance(exc, torch.OutOfMemoryError) and not self.bytes_wanted(exc)

    def is_out_of_memory(self, exc: BaseException) -> bool:
        if isinstance(exc, torch.OutOfMemoryError) or not isinstance(exc, RuntimeError):
            return isinstance(exc, torch.OutOfMemoryError)
        text = str(exc)
        if self.driver_full.search(text) is not None:
            return True
        return self.perhaps_full.search(text) is not None and self._module.mem_get_info()[0] < self._reserve()

    # ---- the rest

    def rng_state(self, index: int | None = None) -> torch.Tensor:
        return self._module.get_rng_state(self._module.current_device() if index is None else index)

    def set_rng_state(self, state: torch.Tensor, index: int | None = None) -> None:
        number = self._module.current_device() if index is None else index
        generator = self.generator(number)
        if generator is None or not _set_unseen(generator, state):
            self._module.set_rng_state(state, number)

    def generator(self, index: int | None = None) -> torch.Generator | None:
        generators = getattr(self._module, "default_generators", ())  # empty until the device is used
        number = self._module.current_device() if index is None else index
        return generators[number] if number < len(generators) else None

    def describe(self) -> dict[str, object]:
        return super().describe() | {
            "device": self._module.get_device_name(self._module.current_device()),
            "count": self._module.device_count(),
        }


def _set_unseen(generator: torch.Generator, state: torch.Tensor) -> bool:
    """Whether ``generator`` could be given ``state`` through another one of the same state.

    Set by itself it also tells torch's cuDNN cells (LSTM, GRU, RNN) to draw a new seed for their dropout, which a
    program that only goes on does not (CUDAGeneratorImpl::reset_rnn_state; that flag is each generator's own).
    """
    kind = generator.device.type
    with _disable_current_modes():
        before = None if kind in _SHARED else generator.get_state()
        try:
            generator.graphsafe_get_state().set_state(state)
        except (AttributeError, NotImplementedError, RuntimeError):  # torch before 2.5, devices without it
            return False
        if before is not None:
            if not torch.equal(generator.get_state(), state):
                return False
            if not torch.equal(before, state):
                _SHARED.add(kind)
    return True


_SHARED: set[str] = set()
"""Types of devices whose generators have been seen to share their state so: looking takes several times as long."""

"""A device for tests, whose copies run as late as they may and whose races are found, the same way every time.

Tensors are ordinary CPU tensors; operators run at once, on whatever compute stream is current. A copy on a side stream
runs when computation or the host waits for it, and not before; until then its target is full of 0xFF (NaN in floating
point). Independently of that, every operator under `tracker()` and every copy is checked against the others by vector
clocks. Memory belongs to the stream that it was allocated on, whose next allocation may get what has been freed.

What is not modelled: operators inside which side streams are used, and `.item()` as a synchronisation (so that nothing
can come to rely on it).
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mindspeed_mem.device.base import Event, Stream, check_copy
from mindspeed_mem.device.cpu import HostBackend
from mindspeed_mem.device.formulas import FormulaKeepingMode
from mindspeed_mem.device.ledger import DeviceLedger, storages
from mindspeed_mem.device.op_rules import written_arguments
from mindspeed_mem.device.races import (
    COMPUTE,
    HOST,
    Access,
    Clock,
    RaceError,
    covers,
    join,
    touches_data,
    whole,
)

__all__ = ["RaceError", "SimulatedBackend"]


def why_absent() -> str | None:
    """Nothing: it is always there."""
    return None


class SimulatedStream(Stream):
    """A queue of copies that have not run; `done` of the `submitted` have."""

    __slots__ = ("clock", "seconds", "queue", "submitted", "done", "freed")

    def __init__(self, name: str, side: bool) -> None:
        super().__init__(object(), name, side)
        self.clock: Clock = {name: 0}
        self.seconds = 0.0
        self.queue: collections.deque[Callable[[], None]] = collections.deque()
        self.submitted = self.done = 0
        self.freed: list[tuple[int, Clock]] = []  # memory to be handed out again: its bytes, who may still use it

    def push(self, work: Callable[[], None]) -> None:
        """Put `work` at the end of the queue."""
        self.queue.append(work)
        self.submitted += 1

    def run_until(self, position: int) -> None:
        """Run what is queued up to and including `position`."""
        while self.done < position and self.queue:
            self.done += 1
            self.queue.popleft()()


class SimulatedEvent(Event):
    """Where a stream was, and what it was ordered after, when the event was recorded."""

    __slots__ = ("stream", "position", "clock", "seconds")

    def __init__(self, stream: SimulatedStream) -> None:
        self.stream, self.position = stream, stream.submitted
        self.clock, self.seconds = dict(stream.clock), stream.seconds


class SimulatedBackend(HostBackend[SimulatedStream, SimulatedEvent]):
    """Make a fresh one for every test.

    `check=False` leaves out the happens-before check, so that only late copies and poison show. Time is virtual: a
    copy takes `latency` + bytes / `bandwidth` seconds, an operator `op_seconds`.

    `leave_out` is the set of `reason`s whose waits are dropped, `reasons` counts all waits asked for by reason.
    `faults` lists the races and the frees of memory that a stream may still use; `check` raises if there are any.
    """

    type = "simulated"

    def __init__(
        self, *, check: bool = True, bandwidth: float = 10e9, latency: float = 1e-5, op_seconds: float = 1e-5
    ) -> None:
        super().__init__()
        self.attach_ledger(DeviceLedger())
        self.leave_out: set[str] = set()
        self.reasons: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []
        self.bytes_copied = 0
        self._check, self._bandwidth, self._latency, self._op_seconds = check, bandwidth, latency, op_seconds
        self._compute = SimulatedStream(COMPUTE, side=False)
        self._current = self._compute
        self._streams = {COMPUTE: self._compute}
        self._host: Clock = {}  # what the host has seen done
        self._stalled = 0.0
        self._accesses: weakref.WeakKeyDictionary[torch.UntypedStorage, Access] = weakref.WeakKeyDictionary()

    def tracker(self) -> FormulaKeepingMode:
        """A context manager in which every operator counts as work of the current stream, and is checked."""
        return _Tracker(self)

    def check(self) -> None:
        """Raise RaceError when there are `faults`."""
        for stream in self._streams.values():
            self._hand_out(stream)
        if self.faults:
            raise RaceError(f"{len(self.faults)} faults: " + "; ".join(self.faults))

    # ---- streams and events

    def current_stream(self) -> SimulatedStream:
        return self._current

    def stream_key(self) -> object:
        return self._current

    def new_stream(self, name: str, side: bool = True) -> SimulatedStream:
        """Not ``side``: for operators, as a model may have for a branch that it computes beside; see `on_stream`."""
        unique = name if name not in self._streams and name != HOST else f"{name}#{len(self._streams)}"
        stream = self._streams[unique] = SimulatedStream(unique, side)
        return stream

    def record(self, stream: SimulatedStream) -> SimulatedEvent:
        join(stream.clock, self._host)
        return SimulatedEvent(stream)

    def wait(self, stream: SimulatedStream, event: SimulatedEvent, reason: str) -> None:
        self.reasons[reason] += 1
        if reason in self.leave_out:
            return
        join(stream.clock, event.clock)
        if stream.side:
            stream.seconds = max(stream.seconds, event.seconds)
            stream.push(lambda: event.stream.run_until(event.position))
        else:
            self._stand_still(stream, event.seconds)
            event.stream.run_until(event.position)

    def on_stream(self, stream: SimulatedStream) -> AbstractContextManager:
        if not stream.side:
            return self._switched_to(stream)
        # Collectives are the host's here.
        self.synchronize(self.record(stream))
        return nullcontext()

    @contextmanager
    def _switched_to(self, stream: SimulatedStream) -> Iterator[None]:
        self._current, before = stream, self._current
        try:
            yield
        finally:
            self._current = before

    def used_on(self, tensor: torch.Tensor, stream: SimulatedStream, reason: str) -> None:
        self.reasons[reason] += 1
        if reason not in self.leave_out:
            self._known(tensor.untyped_storage()).used_on.append(stream)

    def done(self, event: SimulatedEvent) -> bool:
        # As late as may be: a copy may have run, but the host has not been told.
        return covers(self._host, event.clock)

    def synchronize(self, event: SimulatedEvent | None = None) -> None:
        for waited in [event] if event is not None else [self.record(stream) for stream in self._streams.values()]:
            join(self._host, waited.clock)
            self._stand_still(self._compute, waited.seconds)
            waited.stream.run_until(waited.position)

    def stall_seconds(self) -> float:
        return self._stalled

    def timestamp(self, stream: SimulatedStream | None = None) -> float:
        return (self._current if stream is None else stream).seconds

    def _stand_still(self, stream: SimulatedStream, until: float) -> None:
        self._stalled += max(0.0, until - stream.seconds)
        stream.seconds = max(stream.seconds, until)

    # ---- memory

    def empty(self, nbytes: int) -> torch.Tensor:
        buffer = super().empty(nbytes)
        self._known(buffer.untyped_storage(), fresh=True)
        return buffer

    def host_empty(self, nbytes: int) -> torch.Tensor:
        buffer = super().host_empty(nbytes)
        self._add(buffer.untyped_storage(), Access(nbytes, owner=None, allocated={}))
        return buffer

    def owns(self, tensor: torch.Tensor) -> bool:
        access = self._accesses.get(tensor.untyped_storage()) if super().owns(tensor) else None
        return super().owns(tensor) and not (access is not None and access.on_host)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: SimulatedStream) -> None:
        check_copy(target, source)
        if target.numel() == 0:
            return
        ends = [self._known(t.untyped_storage()) for t in (target, source)]
        join(stream.clock, self._host)
        stream.clock[stream.name] += 1
        self._touch(stream.name, stream.clock, f"copy of {source.numel()} bytes", [ends[1]], [ends[0]])
        stream.seconds += self._latency + source.numel() / self._bandwidth
        self.bytes_copied += source.numel()
        with torch.no_grad(), _disable_current_modes():
            if not stream.side:
                target.data.copy_(source.data)
                return
            # Copies ordered before this one may still have to read what the poison would destroy.
            for earlier, position in ends[0].copies:
                earlier.run_until(position)
            target.data.fill_(0xFF)
            stream.push(self._deferred(target, source, stream))
        for access in ends:
            access.copies = [(s, p) for s, p in access.copies if s.done < p] + [(stream, stream.submitted)]

    def _deferred(self, target: torch.Tensor, source: torch.Tensor, stream: SimulatedStream) -> Callable[[], None]:
        ends = [(weakref.ref(t.untyped_storage()), int(t.storage_offset())) for t in (target, source)]
        nbytes, name = target.numel(), stream.name

        def run() -> None:
            with torch.no_grad(), _disable_current_modes():
                alive = []
                for (ref, offset), end in zip(ends, ("target", "source"), strict=True):
                    storage = ref()
                    if storage is None or storage.nbytes() == 0:
                        raise RaceError(f"copy of {nbytes} bytes on stream {name}: its {end} was freed before it ran")
                    alive.append(whole(storage, offset, nbytes))
                alive[0].copy_(alive[1])

        return run

    # ---- who touches what

    def _operator(self, name: str, reads: list[torch.UntypedStorage], writes: list[torch.UntypedStorage]) -> None:
        """One operator of the current stream; what it does to host buffers the host does, at once."""
        current = self._current
        join(current.clock, self._host)
        current.clock[current.name] += 1
        current.seconds += self._op_seconds
        touched = [[self._known(s) for s in some if s.nbytes()] for some in (reads, writes)]
        for stream, clock, on_host in ((current.name, current.clock, False), (HOST, self._host, True)):
            self._touch(stream, clock, name, *([a for a in some if a.on_host == on_host] for some in touched))

    def _touch(self, name: str, clock: Clock, what: str, reads: list[Access], writes: list[Access]) -> None:
        if not self._check:
            return
        try:
            for access in reads:
                access.read(name, clock, what)
            for access in writes:
                access.write(name, clock, what)
        except RaceError as error:
            self.faults.append(str(error))
            raise

    def _known(self, storage: torch.UntypedStorage, fresh: bool = False) -> Access:
        access = self._accesses.get(storage)
        if access is None:
            # Memory from before anybody looked carries no demand; a fresh block may be a recycled one.
            if fresh:
                self._hand_out(self._current)
            owner = self._current if fresh else self._compute
            access = Access(storage.nbytes(), owner, allocated=dict(owner.clock) if fresh else {})
            if isinstance(self.ledger, DeviceLedger):
                self.ledger.see(storage)
            self._add(storage, access)
        return access

    def _add(self, storage: torch.UntypedStorage, access: Access) -> None:
        self._accesses[storage] = access
        weakref.finalize(storage, self._freed, access).atexit = False

    def _freed(self, access: Access) -> None:
        """Freed device memory is its stream's to hand out again; freed host memory is unmapped at once."""
        if not self._check:
            return
        known = dict(self._host)
        owner = access.owner
        if owner is None:
            self._freed_in_use("host buffer", access.nbytes, access.unordered(known))
            return
        for stream in access.used_on:  # the allocator waits for what these have been given so far
            join(known, stream.clock)
        if users := access.unordered(known):
            owner.freed.append((access.nbytes, users))

    def _hand_out(self, stream: SimulatedStream) -> None:
        """What has been freed may be memory of a new tensor of `stream` from now on."""
        freed, stream.freed = stream.freed, []
        join(stream.clock, self._host)
        for nbytes, users in freed:
            left = {name: count for name, count in users.items() if stream.clock.get(name, 0) < count}
            self._freed_in_use("device memory", nbytes, left)

    def _freed_in_use(self, where: str, nbytes: int, users: Clock) -> None:
        if users:
            names = ", ".join(sorted(users))
            self.faults.append(f"{where} of {nbytes} bytes freed while stream {names} may still use it")


class _Tracker(FormulaKeepingMode):
    def __init__(self, backend: SimulatedBackend) -> None:
        super().__init__()
        self._backend = backend

    def operator(self, op: Any, args: tuple, kwargs: dict) -> Any:
        backend, looks = self._backend, touches_data(op)
        inputs = list({id(s): s for s in storages((args, kwargs))}.values())
        if looks:
            backend._operator(str(op), inputs, list(storages(written_arguments(op, args, kwargs))))
        result = op(*args, **kwargs)
        if op is torch.ops.aten.equal.default:  # the host has waited for the answer
            join(backend._host, backend._current.clock)
        known = {id(s) for s in inputs}
        for storage in storages(result):
            if id(storage) not in known and storage not in backend._accesses and storage.nbytes():
                access = backend._known(storage, fresh=True)
                if looks:
                    backend._touch(backend._current.name, backend._current.clock, str(op), [], [access])
        return result

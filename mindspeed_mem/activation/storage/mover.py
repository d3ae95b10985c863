"""Copies between device and host, and the order they need.

| later work | waits for | because |
|---|---|---|
| a copy out | compute so far | the activation must be written |
| a copy out | the slab's last copy | a recycled host buffer may still be read by a copy in |
| compute, when a copy is too late | the copy out | the released memory is handed to whoever allocates next on compute |
| a copy in | compute so far | its device buffer may have a previous user on compute |
| compute, at unpack | the copy in | the bytes must be there |
| compute, when a record dies early | its copies | both ends are freed while a copy may run |

A copy in need not wait for the copy out: the release did (compute), and the copy in waits for compute.
The host thread never waits.

Compute does not stand still at the release point for a copy that is late: the memory stays until the copy is done. Only
when late copies hold more than `LateCopies.window`, compute waits for the oldest of them.

Compute is the stream that is current when an operator runs, and a model may have several. A micro-batch's home is the
one it began on; `Record.stream` is where the record's device memory was ready first, and what waits before it is freed.
Memory is handed out again by the stream it was allocated on, which nobody can ask for. So with several streams:

| later work | waits for | because |
|---|---|---|
| a copy out | the streams that saved the record | another one may be current when it starts |
| a copy in | the copy out | another stream waited for that than the copy in waits for |
| all streams, in a second run | its inputs | what ordered them before may be no part of the operator |
| the stream of a second run | all others, at its end | what joins them may be none either, or not be reached |
| an unpack | the second run | it asks on another stream |

| the allocator is told | of the stream | because |
|---|---|---|
| when a tensor is saved | that saves it | its memory, of another stream, need not stay until backward |
| at unpack | that reads | what came back was allocated on another |
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING

from mindspeed_mem.activation.storage.late_copies import LateCopies
from mindspeed_mem.activation.storage.ledger import LEDGER
from mindspeed_mem.activation.storage.records import COPYING, DEVICE, HOST, KEPT, LOADED, Record, Remade, key_of
from mindspeed_mem.activation.storage.staying import Staying

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from mindspeed_mem.activation.storage.auto_distance import AutoDistances
    from mindspeed_mem.device import Backend
    from mindspeed_mem.device.base import Event, Stream
    from mindspeed_mem.device.slabs import HostSlabs, Slab

OUT_AFTER_COMPUTE = "copy out after compute"
OUT_AFTER_SLAB = "copy out after the slab's last copy"
RELEASE_AFTER_OUT = "release after copy out"
IN_AFTER_COMPUTE = "copy in after compute"
COMPUTE_AFTER_IN = "compute after copy in"
RETIRE_AFTER_COPIES = "retire after copies"
OUT_AFTER_SAVED = "copy out after the streams that saved"
IN_AFTER_OUT = "copy in after copy out"
SECOND_RUN_AFTER_INPUTS = "second run after its inputs"
AFTER_SECOND_RUN = "after second run"
UNPACK_AFTER_SECOND_RUN = "unpack after second run"
SAVED_BESIDE = "saved on another stream"
READ_BESIDE = "read on another stream"
WAITS = (OUT_AFTER_COMPUTE, OUT_AFTER_SLAB, RELEASE_AFTER_OUT, IN_AFTER_COMPUTE, COMPUTE_AFTER_IN, RETIRE_AFTER_COPIES)
BESIDE = (
    OUT_AFTER_SAVED,
    IN_AFTER_OUT,
    SECOND_RUN_AFTER_INPUTS,
    AFTER_SECOND_RUN,
    UNPACK_AFTER_SECOND_RUN,
    SAVED_BESIDE,
    READ_BESIDE,
)
"""What only models with several compute streams need."""


class Untimed:
    """How copies and second runs are made; a trace puts itself in this place."""

    def copy(
        self, backend: Backend, record: Record, target: torch.Tensor, source: torch.Tensor, stream: Stream
    ) -> None:
        """One copy of ``record``, as `Backend.copy`."""
        backend.copy(target, source, stream)

    def wait(self, backend: Backend, record: Record, stream: Stream, event: Event, reason: str) -> None:
        """``stream``, compute's, waits for a copy of ``record``, as `Backend.wait`."""
        backend.wait(stream, event, reason)

    def second_run(self, layer: int, op: str) -> AbstractContextManager:
        """Entered around a second run."""
        return nullcontext()


UNTIMED = Untimed()
_HERE = nullcontext()


class Mover:
    """Moves records on two side streams of one backend, through recycled host slabs."""

    __slots__ = (
        "backend",
        "slabs",
        "several",
        "_streams",
        "moved",
        "dropped",
        "second_runs",
        "bytes_out",
        "bytes_in",
        "copies_out",
        "copies_in",
        "late",
        "staying",
        "evicted_bytes",
        "evictions",
        "known",
        "auto",
        "timing",
        "_lock",
        "_compute",
        "__weakref__",
    )

    def __init__(self, backend: Backend, slabs: HostSlabs):
        self.backend, self.slabs = backend, slabs
        self.several: list[Stream] = []  # compute's, once something is saved on another than its micro-batch's home
        self._streams: tuple[Stream, Stream] | None = None
        self.moved: Counter[tuple[int, str]] = Counter()
        self.dropped: Counter[tuple[int, str]] = Counter()  # bytes not kept, by the operator that makes them again
        self.second_runs: Counter[tuple[int, str]] = Counter()
        self.bytes_out = self.bytes_in = self.copies_out = self.copies_in = 0
        self.late = LateCopies()
        self.staying = Staying()
        self.evicted_bytes = self.evictions = 0  # of what left because memory had run out
        self.known: weakref.WeakSet[Record] | None = None  # all records alive, where somebody wants to know them
        self.auto: AutoDistances | None = None  # while the plan leaves distances to it
        self.timing = UNTIMED
        self._lock = threading.RLock()  # backward may unpack in another thread than forward packs
        # While copies are being started and their stream is the current one: where the garbage collector comes in
        # between and more copies start, these are of that stream.
        self._compute: Stream | None = None

    def _begin(self) -> tuple[Stream, Stream, Stream]:
        """Compute's stream and the two for copies, made at the first copy: only then the device is surely chosen."""
        if self._streams is None:
            self._streams = self.backend.new_stream("copy out"), self.backend.new_stream("copy in")
        return self.backend.current_stream(), *self._streams

    def saves(self, record: Remade, tensor: torch.Tensor, first: bool) -> None:
        """The current stream saves ``tensor``, of the storage of ``record``; ``first``: nobody did before."""
        if not self.several:
            if self.backend.stream_key() == record.micro_batch.home_key:
                return
            self.several.append(record.micro_batch.home)
        current = self.backend.current_stream()
        if current not in self.several:
            self.several.append(current)
        if first:
            record.stream, record.others = current, ()
        elif current != record.stream and current not in record.others:
            record.others += (current,)
        self.backend.used_on(tensor, current, SAVED_BESIDE)  # of no account where it was allocated on this stream

    @contextmanager
    def _copies_on(self, stream: Stream, compute: Stream) -> Iterator[None]:
        """Around copies that are started, where there are several streams."""
        before, self._compute = self._compute, compute
        try:
            with self.backend.copies_on(stream):
                yield
        finally:
            self._compute = before

    def copy_out(self, records: Iterable[Record]) -> None:
        """Start copying out; what finds no room on the host stays on the device, with one warning."""
        with self._lock, _HERE if self._compute is None else self.backend.on_stream(self._compute):
            compute, out_stream, _ = self._begin()
            with _HERE if self.backend.one_stream else self._copies_on(out_stream, compute):
                self._send_all(records, compute, out_stream)

    def _send_all(self, records: Iterable[Record], compute: Stream, out_stream: Stream) -> None:
        ready: list[Stream] = []
        sent: list[Record] = []  # kept alive: until there is an event, nobody may give their slabs back
        try:
            for record in records:
                source = record.whole()
                if source is None:
                    record.state = KEPT  # emptied by whoever manages it (an output that will be recomputed)
                    continue
                slab = self.slabs.take(record.nbytes)
                if slab is None:
                    self.staying.no_room(record, self.slabs.limit_bytes)
                    continue
                try:
                    self._wait_for_bytes(record, compute, out_stream, ready)
                    self._send(record, source, slab, out_stream)
                except BaseException:
                    self.slabs.give(slab, slab.ready)
                    record.state = KEPT
                    raise
                sent.append(record)
        finally:
            if sent:  # one event: each costs the host time, and one operator's copies end together
                event = self.backend.record(out_stream)
                for record in sent:
                    record.out_event = event

    def _wait_for_bytes(self, record: Record, compute: Stream, out_stream: Stream, ready: list[Stream]) -> None:
        """A copy out of ``record`` may start; ``ready`` are the streams waited for already."""
        if not ready:
            ready.append(compute)
            self.backend.wait(out_stream, self.backend.record(compute), OUT_AFTER_COMPUTE)
        if record.stream is compute and not record.others:
            return
        for stream in (record.stream, *record.others):
            if stream not in ready:
                ready.append(stream)
                self.backend.wait(out_stream, self.backend.record(stream), OUT_AFTER_SAVED)

    def _send(self, record: Record, source: torch.Tensor, slab: Slab, out_stream: Stream) -> None:
        """Copy ``source``, the record's bytes, to ``slab``; the stream has waited for compute. The caller makes the
        record's event."""
        if slab.ready is not None:
            self.backend.wait(out_stream, slab.ready, OUT_AFTER_SLAB)
        if self.timing is UNTIMED:
            self.backend.copy(slab.buffer, source, out_stream)
        else:
            self.timing.copy(self.backend, record, slab.buffer, source, out_stream)
        record.slab, record.source, record.state = slab, source, COPYING
        self.bytes_out += record.nbytes
        self.copies_out += 1

    def release(self, record: Record, copied: bool = False) -> bool:
        """Drop the device memory of a record whose copy was started, and is known to be done if ``copied``; False when
        it must stay."""
        with self._lock:
            if record.state != COPYING:
                return False
            storage = record.storage()
            if storage is None or storage.nbytes() != record.nbytes:
                self.cancel(record)
                return False
            del storage
            assert record.out_event is not None
            if not copied:
                self.timing.wait(self.backend, record, record.stream, record.out_event, RELEASE_AFTER_OUT)
            if self.late.nbytes:
                self.late.drop(record)
            record.source = None
            record.leave(HOST, self)
            self.moved[record.layer, record.op] += record.nbytes
            return True

    def release_when_copied(self, record: Record) -> None:
        """The release point of a record is there: see `release_late`."""
        with self._lock:
            if record.state == COPYING:
                assert record.out_event is not None
                if not self.late.nbytes and self.backend.done(record.out_event):
                    self.release(record, copied=True)
                else:
                    self.late.add(record)

    def release_late(self) -> None:
        """Release what has been copied meanwhile, and so many of the oldest that the others fit into the window."""
        if not self.late.nbytes:
            return
        with self._lock:
            done: Event | None = None  # that of the last one
            while (record := self.late.oldest()) is not None:
                event = record.out_event
                assert event is not None
                if event is done or self.backend.done(event):
                    done = event
                elif not self.late.too_much:
                    return
                if not self.release(record, copied=event is done):
                    self.late.drop(record)

    def cancel(self, record: Record) -> None:
        """Keep a record on the device after all."""
        with self._lock:
            if record.state == COPYING:
                self.late.drop(record)
                assert record.out_event is not None
                self.timing.wait(self.backend, record, record.stream, record.out_event, RETIRE_AFTER_COPIES)
                self._give_back(record, record.out_event)
                record.source, record.state = None, KEPT

    def keep(self, record: Record) -> None:
        """Keep a record on the device after all, even if it has been released: somebody still holds its storage."""
        with self._lock:
            self.cancel(record)
            if record.state == HOST and (source := record.whole()) is not None:
                record.buffer, record.in_event, record.state = source, record.out_event, LOADED
                self._give_back(record, record.out_event)
            elif record.state == DEVICE:
                record.state = KEPT

    def load(self, records: Iterable[Record]) -> None:
        """Start copying back what is on the host; idempotent. What is being copied out yet stays where it is."""
        with self._lock, _HERE if self._compute is None else self.backend.on_stream(self._compute):
            wanted = []
            for record in records:
                if record.state == HOST:
                    wanted.append(record)
                elif self.late.nbytes:
                    self.late.drop(record)
            if not wanted:
                return
            compute, _, in_stream = self._begin()
            try:
                for record in wanted:
                    record.buffer = self.backend.empty(record.nbytes)
                    LEDGER.enter_copy(record.buffer.untyped_storage(), record.layer >= 0, (record.layer, record.op))
                    if record.attributes:
                        record.mark(record.buffer.untyped_storage())
                # after the allocations: the buffers' previous users are on compute
                self.backend.wait(in_stream, self.backend.record(compute), IN_AFTER_COMPUTE)
                with _HERE if self.backend.one_stream else self._copies_on(in_stream, compute):
                    for _, together in itertools.groupby(wanted, attrgetter("layer", "op")):
                        self._fetch(together, compute, in_stream)
            except BaseException:  # there was no memory, or a copy failed
                for record in wanted:
                    if record.state == HOST:
                        record.buffer = None
                raise

    load_slowly = load  # where the other is in C++

    def _fetch(self, records: Iterable[Record], compute: Stream, in_stream: Stream) -> None:
        """Copy back what one operator made, into buffers that are there; the stream has waited for compute."""
        sent: list[Record] = []
        try:
            for record in records:
                assert record.slab is not None and record.buffer is not None and record.out_event is not None
                if record.stream is not compute and record.stream != compute:
                    self.backend.wait(in_stream, record.out_event, IN_AFTER_OUT)
                if self.timing is UNTIMED:
                    self.backend.copy(record.buffer, record.slab.buffer, in_stream)
                else:
                    self.timing.copy(self.backend, record, record.buffer, record.slab.buffer, in_stream)
                record.stream, record.others, record.state = compute, (), LOADED
                sent.append(record)
        finally:
            event = self.backend.record(in_stream) if sent else None
            for record in sent:
                record.in_event = event
                self._give_back(record, event)
                self.bytes_in += record.nbytes
                self.copies_in += 1

    def bring_back(self, record: Record) -> None:
        """Compute waits for the record's copy in, starting it when nobody has."""
        if record.state == HOST:
            self.load((record,))
            self.staying.for_weights.discard(key_of(record))  # others need it, too
        assert record.in_event is not None and record.buffer is not None
        compute = record.stream if self.backend.one_stream else self.backend.current_stream()
        auto = self.auto
        timed = auto if auto is not None and not auto.settled and auto.measures(record) else None
        begin = self.backend.timestamp(compute) if timed is not None else None
        self.timing.wait(self.backend, record, compute, record.in_event, COMPUTE_AFTER_IN)
        if timed is not None:
            timed.waited(record, begin, self.backend.timestamp(compute))
        if compute is not record.stream and compute != record.stream:
            self.backend.used_on(record.buffer, compute, READ_BESIDE)

    def begin_again(self, inputs: Iterable[torch.Tensor]) -> None:
        """An operator is about to run again on ``inputs``, from the current stream."""
        for stream, current in self._others():
            self.backend.wait(stream, self.backend.record(current), SECOND_RUN_AFTER_INPUTS)
            for tensor in inputs:
                self.backend.used_on(tensor, stream, READ_BESIDE)

    def end_again(self) -> None:
        """It has run, or has been stopped."""
        for stream, current in self._others():
            self.backend.wait(current, self.backend.record(stream), AFTER_SECOND_RUN)

    def _others(self) -> list[tuple[Stream, Stream]]:
        """Compute's other streams, each with the current one."""
        if not self.several:
            return []
        current = self.backend.current_stream()
        return [(stream, current) for stream in self.several if stream != current]

    def on(self, stream: Stream) -> AbstractContextManager:
        """Inside, ``stream`` is the current one: an operator runs again where it ran before."""
        return nullcontext() if self.backend.current_stream() == stream else self.backend.on_stream(stream)

    def await_second_run(self, record: Remade) -> None:
        """The current stream waits for what has made the record again."""
        if self.several and (current := self.backend.current_stream()) != record.stream:
            self.backend.wait(current, self.backend.record(record.stream), UNPACK_AFTER_SECOND_RUN)
            assert record.buffer is not None
            self.backend.used_on(record.buffer, current, READ_BESIDE)

    def used_at(self, number: int) -> None:
        """Copies start when the micro-batch says so."""

    def forget(self, record: Record) -> None:
        """The last handle of a record is gone. If it has moved, its slab goes back, and compute waits for its copies.

        This may run on any thread, wherever the garbage collector does, and whatever stream is current there.
        """
        if record.state not in (COPYING, HOST, LOADED):
            return
        with self._lock:
            if self.late.nbytes:
                self.late.drop(record)
            if record.state == LOADED:
                memory, event = record.buffer, record.in_event
            else:
                memory, event = record.source, record.out_event
                if event is not None:  # else nobody can tell when its copy is done: the slab stays where it is
                    self._give_back(record, event)
            if record.state != COPYING:
                LEDGER.forget_moved(record.nbytes)
            if memory is not None and event is not None and not self.backend.done(event):
                self.timing.wait(self.backend, record, record.stream, event, RETIRE_AFTER_COPIES)

    def _give_back(self, record: Record, event: Event | None) -> None:
        assert record.slab is not None
        self.slabs.give(record.slab, event)
        record.slab = None

"""--memory-trace: what this rank does in a few training steps, as events with times, for Perfetto and chrome://tracing.

Between the steps that are traced nothing is looked at. In one that is, operators are timed as for a profile, copies,
second runs and gathers by what their makers tell; times are the device's where it keeps some, and read when the step
has ended, which is when the host waits for the device.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_mem import passes, ranks
from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation.observe.stopwatch import COPIES, Moments, Stopwatch
from mindspeed_mem.activation.passes import first_of
from mindspeed_mem.activation.storage.ledger import LEDGER, Token, logged
from mindspeed_mem.activation.storage.mover import UNTIMED, Untimed
from mindspeed_mem.passes import BACKWARD, FORWARD, WEIGHT, Listener, Precedence, ScheduleCall
from mindspeed_mem.plan.layers import as_ranges, called
from mindspeed_mem.report import memory_file, trace_file
from mindspeed_mem.report.hidden import Hidden, hidden
from mindspeed_mem.schedule.weight_gradients import WEIGHT_GRADIENTS
from mindspeed_mem.zero.buffers import runtime
from mindspeed_mem.zero.core.gathering import no_notes

if TYPE_CHECKING:
    from mindspeed_mem.activation.engine import Engine
    from mindspeed_mem.activation.observe.observed_ops import Node
    from mindspeed_mem.activation.storage.records import Record
    from mindspeed_mem.device import Backend
    from mindspeed_mem.device.base import Event as Point
    from mindspeed_mem.device.base import Stream
    from mindspeed_mem.zero.core.chunk import Chunk

logger = logging.getLogger(__name__)

COMPUTE, OUT, IN, AGAIN, STALL = "compute", "copy out", "copy in", "recompute", "stall"
_TRACKS = (COMPUTE, OUT, IN, AGAIN, STALL)
Event = dict[str, Any]


class Trace(Listener):
    """Follows training calls and writes those that are wanted.

    Args:
        file: the rank goes into its name, as `trace_file.file_of_rank` says.
        first, last: the training calls of this process that are traced, counted from 1. One that is profiled for a plan
            is not, and moves the rest on.
        when_settled: as many calls again, once a plan has been settled on after those.
        asked_by: the flag for which that is done, for messages.
    """

    precedence = Precedence.TRACE

    def __init__(
        self, file: Path, first: int, last: int, when_settled: bool = False, asked_by: str = "--memory-trace"
    ) -> None:
        self._asked_by = asked_by
        self._file, self._steps, self._when_settled = file, range(first, last + 1), when_settled
        self._call = 0
        self._traced: list[int] = []  # the calls that are in the file
        self._one_before: float | None = None  # seconds of the last call that was not traced before those
        self._origin: int | None = None  # the beginning of the first step traced, in nanoseconds since 1970
        self._now: _Step | None = None
        self._took: list[float] = []  # seconds from call to call, of those traced
        self._writing = 0.0
        self._events = 0
        self._hidden = Hidden()  # of all steps traced
        self._began: tuple[float, float, bool] | None = None  # of the last training call, and whether it was traced

    # ---- calls
    def begin_call(self, call: ScheduleCall) -> None:
        engine = engines.current()
        if call.forward_only or engine is None or not (self._call < self._steps.stop or self._when_settled):
            return
        self._call += 1
        if self._when_settled and engine.adaptation is not None and engine.adaptation.has_settled:
            self._when_settled = False
            if self._call >= self._steps.stop:
                self._steps = range(self._call, self._call + len(self._steps))
        now = time.perf_counter()
        if self._began is not None:
            began, writing, traced = self._began
            took = now - began - (self._writing - writing)
            if traced:
                self._took.append(took)
            elif not self._took:
                self._one_before = took
        wanted = self._call in self._steps
        if wanted and engine.observation.profiler is not None:
            begun = self._call > self._steps.start
            self._steps, wanted = range(self._steps.start + (not begun), self._steps.stop + 1), False
        self._began = now, self._writing, wanted
        if wanted:
            self._now = _Step(engine, call)
        elif self._call == self._steps.stop and self._traced:
            self._tell()

    def end_call(self, call: ScheduleCall, completed: bool) -> None:
        step, self._now = self._now, None
        if step is None or call.forward_only:
            self._now = step
            return
        step.end()
        if not completed:
            return
        begin = time.perf_counter()
        try:
            self._write(step)
        except OSError as error:
            logger.warning(
                "%s: nothing more is traced: %s: %s", self._asked_by, error.filename or self._file, error.strerror
            )
            passes.LISTENERS.remove(self)
        self._writing += time.perf_counter() - begin

    def _write(self, step: _Step) -> None:
        file, rank = trace_file.file_of_rank(self._file, ranks.number()), ranks.number()
        origin, events = step.events(rank, self._call, self._origin)
        if self._traced:
            trace_file.extend(file, events)
        else:
            self._origin = origin
            file.parent.mkdir(parents=True, exist_ok=True)
            about: dict[str, Any] = {"rank": rank, "origin_ns": origin, "stage": step.stage, "stages": step.stages}
            about |= {"device": step.backend.type, "copies_block": step.backend.copies_block}
            stacks = step.in_force.stacks.items()
            about["stacks"] = {name: [of.start, of.stop] for name, of in stacks if of is not None}
            trace_file.begin(file, about, [*_names(rank, step.stage), *events])
        self._hidden = Hidden(*map(sum, zip(self._hidden, step.hidden, strict=True)))
        memory_file.write(memory_file.beside(file), step.allocations.events)
        self._traced.append(self._call)
        self._events += len(events)

    def _tell(self) -> None:
        """Once: what there is, and what it cost."""
        file = trace_file.file_of_rank(self._file, ranks.number())
        took = f"a traced step took {1e3 * mean(self._took):.1f} ms" if self._took else "the last step was traced"
        beside = "" if self._one_before is None else f", the one before {1e3 * self._one_before:.1f} ms"
        logger.info(
            "%s: steps %s are in %s (%d events), the last of them for torch's memory viewer in %s; %s%s; "
            "%swriting took %.1f ms in all",
            self._asked_by,
            as_ranges(self._traced),
            file,
            self._events,
            memory_file.beside(file).name,
            took,
            beside,
            f"{words}; " if (words := self._hidden.words()) else "",
            1e3 * self._writing,
        )

    def close(self) -> None:
        """No more calls come."""
        if self._call < self._steps.start:
            logger.warning(
                "%s: no step was traced: %d training steps have run, and the first to be traced is %d "
                "(--memory-trace-steps)%s",
                self._asked_by,
                self._call,
                self._steps.start,
                "; those that are profiled for a plan do not count" * (self._call > 0),
            )
        elif self._call < self._steps.stop and self._traced:
            self._tell()

    # ---- passes
    def begin_forward(self, micro_batch: int | None, model_chunk: int) -> None:
        if self._now is not None:
            self._now.begin_pass(FORWARD, (micro_batch, model_chunk))

    def end_forward(self, output: Any) -> None:
        if self._now is not None:
            self._now.end_forward(first_of(output))

    def begin_backward(self, output: Any) -> None:
        if self._now is not None:
            self._now.begin_backward(first_of(output))

    def end_backward(self) -> None:
        if self._now is not None:
            self._now.watch.end()


class _Step(Untimed):
    """One step while it runs, and what was seen of it."""

    def __init__(self, engine: Engine, call: ScheduleCall) -> None:
        self.backend, self.stage, self.stages = engine.backend, call.stage, call.stages
        self.in_force = engine.in_force
        self._engine, self._mover = engine, engine.mover
        self._gathering = None if (chunks := runtime.current()) is None else chunks.gathering
        self._spans: list[tuple[str, str, Any, Any, Event]] = []  # track, name, begin, end, more
        self._stalls: list[tuple[str, Any, Any, Event]] = []  # name, begin, end, more
        self._gathers: list[tuple[Chunk, Any, Any]] = []
        self._coming: dict[Chunk, Any] = {}
        self._samples: list[tuple[Any, dict[str, dict[str, int]]]] = []
        self._marks: list[tuple[Any, str, int]] = []
        self._keys: dict[int, tuple[tuple[int | None, int], weakref.ref[torch.Tensor]]] = {}  # by output
        self._counts = self._counted()
        self.hidden = Hidden()
        """How much of its copying was, in microseconds; known with its events."""
        self._begin = self.backend.timestamp()
        self.allocations = memory_file.Allocations(self._name)
        engine.look_everywhere(True)
        self.watch = engine.observation.stopwatch = Stopwatch(
            self.backend, engine.in_force.num_layers, self._boundary, reads=False
        )
        self._mover.timing = self
        WEIGHT_GRADIENTS.around.append(self._weights)
        LEDGER.token = logged(self.allocations)
        if engine.survival is not None:
            engine.survival.mover.copying = self.watch.copying
        if self._gathering is not None:
            self._gathering.notes = self._notes
        self._range: Any = None  # of the operator that runs, for the device's own profiler
        self._sample()

    def end(self) -> None:
        """Leave nothing on anybody."""
        self._sample()
        self._end = self.backend.timestamp()
        self.backend.end_range(self._range)
        self._engine.observation.stopwatch = None
        self._mover.timing, LEDGER.token = UNTIMED, Token
        WEIGHT_GRADIENTS.around.remove(self._weights)
        self.allocations.close()
        if self._engine.survival is not None:
            self._engine.survival.mover.copying = contextlib.nullcontext
        if self._gathering is not None:
            self._gathering.notes = no_notes
        self._engine.look_everywhere(False)

    def _name(self, layer: int, op: str) -> str:
        """Of what runs now or has run: before the first forward nobody knows the stacks."""
        if layer < 0:
            return "outside the layers"
        known = self.in_force
        where = called(layer, known.stacks) if layer < known.num_layers else "after the layers"
        return f"{where} {op}" if op else where

    # ---- what it is told
    def begin_pass(self, direction: str, key: tuple[int | None, int]) -> None:
        self.watch.begin(direction, key)
        self.allocations.during = _of(direction, key[0])

    def end_forward(self, output: Any) -> None:
        key = self.watch.forward
        self.watch.end()
        if key is not None and isinstance(output, torch.Tensor):
            self._keys[id(output)] = key, weakref.ref(output)

    def begin_backward(self, output: Any) -> None:
        found = self._keys.pop(id(output), None)
        if found is not None and found[1]() is output:
            self.begin_pass(BACKWARD, found[0])

    def _boundary(self, ran: Node, runs: Node) -> None:
        self._sample()
        self.backend.end_range(self._range)
        self._range = self.backend.begin_range(self._name(*runs)) if runs[0] >= 0 else None

    def copy(
        self, backend: Backend, record: Record, target: torch.Tensor, source: torch.Tensor, stream: Stream
    ) -> None:
        begin = backend.timestamp(stream)
        super().copy(backend, record, target, source, stream)
        end = backend.timestamp(stream)
        more = {"layer": record.layer, "op": record.op, "bytes": record.nbytes}
        self._spans.append((stream.name, self._name(record.layer, record.op), begin, end, more))

    def wait(self, backend: Backend, record: Record, stream: Stream, event: Point, reason: str) -> None:
        if backend.done(event):
            super().wait(backend, record, stream, event, reason)
            return
        begin = backend.timestamp(stream)
        super().wait(backend, record, stream, event, reason)
        more = {"layer": record.layer, "op": record.op, "reason": reason}
        self._stalls.append((self._name(record.layer, record.op), begin, backend.timestamp(stream), more))

    @contextlib.contextmanager
    def second_run(self, layer: int, op: str) -> Iterator[None]:
        begin = self.backend.timestamp()
        try:
            yield
        finally:
            more = {"layer": layer, "op": op}
            self._spans.append((AGAIN, self._name(layer, op), begin, self.backend.timestamp(), more))

    @contextlib.contextmanager
    def _weights(self, key: Any) -> Iterator[None]:
        """Around a pass that computes gradients of weights which backward has put off."""
        begin = self.backend.timestamp()
        try:
            yield
        finally:
            micro_batch, chunk = key if isinstance(key, tuple) else (None, 0)
            more = {} if micro_batch is None else {"micro-batch": micro_batch, "model chunk": chunk}
            self._spans.append((COMPUTE, _of(WEIGHT, micro_batch), begin, self.backend.timestamp(), more))

    def _notes(self, chunk: Chunk, arrived: bool) -> None:
        if not arrived:
            self._coming[chunk] = self.backend.timestamp()
        elif (begin := self._coming.pop(chunk, None)) is not None:
            self._gathers.append((chunk, begin, self.backend.timestamp()))

    def _sample(self) -> None:
        """Bytes as they are now, where they have changed, and what has happened for lack of memory."""
        now, counts = self.backend.timestamp(), self._counted()
        for (name, count), before in zip(counts.items(), self._counts.values(), strict=True):
            if count > before:
                self._marks.append((now, name, count - before))
        self._counts = counts
        device, allocated = {"activations": LEDGER.held.now}, self.backend.allocated()
        if self._gathering is not None:
            device["gathered chunks"] = self._gathering.live_bytes
        if allocated is not None:
            device["allocated"] = allocated
        found = {"device bytes": device, "host bytes": {"activations": self._mover.slabs.bytes_in_use}}
        found["device bytes without the plan"] = {"activations": LEDGER.without.now}
        if not self._samples or self._samples[-1][1] != found:
            self._samples.append((now, found))

    def _counted(self) -> dict[str, int]:
        survival = self._engine.survival
        retries = 0 if survival is None else survival.guard.retries
        return {"evicted": self._mover.evictions, "operator ran again for lack of memory": retries}

    # ---- what comes of it
    def events(self, rank: int, number: int, origin: int | None) -> tuple[int, list[Event]]:
        """Events of step `number`, with times since `origin` (nanoseconds since 1970; None: when the step began), which
        comes first. The host waits."""
        end, base = self._end, self._begin
        self.backend.synchronize()
        began = time.time_ns() - round(1e9 * self.backend.seconds_between(base, self.backend.timestamp()))

        origin = began if origin is None else origin
        later = (began - origin) / 1e3

        def at(moment: Any) -> float:
            return round(later + 1e6 * self.backend.seconds_between(base, moment), 3)

        def span(track: str, name: str, begin: float, end: float, more: Event) -> Event:
            place = {"ph": "X", "pid": rank, "tid": _TRACKS.index(track), "cat": track}
            return {"name": name, **place, "ts": begin, "dur": round(end - begin, 3), "args": more}

        spans = [(track, name, at(begin), at(end), more) for track, name, begin, end, more in self._spans]
        stalls = [(name, at(begin), at(end), more) for name, begin, end, more in self._stalls]
        passes = [(at(one.moments[0][0]), at(one.moments[-1][0])) for one in self.watch.unread]
        passes += [(begin, end) for track, _, begin, end, _ in spans if track == COMPUTE]
        copies = [(begin, end) for track, _, begin, end, _ in spans if track in (OUT, IN)]
        waits = [(begin, end) for _, begin, end, _ in stalls]
        self.hidden = hidden(copies, passes, waits, self.backend.copies_block)
        shares = {"copying ms": {name: us / 1e3 for name, us in self.hidden._asdict().items()}} if copies else {}
        events = [span(COMPUTE, f"step {number}", at(base), at(end), {"step": number, **shares})]
        for one in self.watch.unread:
            events += _of_pass(one, at, span, self._name)
        events += [span(*one) for one in spans]
        events += [span(STALL, name, begin, end, more) for name, begin, end, more in stalls if end > begin]
        for count, (chunk, begin, end) in enumerate(self._gathers):
            same = {"name": "gather", "cat": "chunks", "pid": rank, "id": f"{number}.{count}"}
            more = {"chunk": chunk.index, "bytes": chunk.nbytes}
            events += [{**same, "ph": "b", "ts": at(begin), "args": more}, {**same, "ph": "e", "ts": at(end)}]
        for moment, name, times in self._marks:
            place = {"ph": "i", "s": "p", "pid": rank, "tid": _TRACKS.index(COMPUTE)}
            events.append({"name": name, **place, "ts": at(moment), "args": {"times": times}})
        for moment, found in self._samples:
            ts = at(moment)
            events += [{"name": name, "ph": "C", "pid": rank, "ts": ts, "args": args} for name, args in found.items()]
        return origin, events


def _of_pass(
    one: Moments, at: Callable[[Any], float], span: Callable[..., Event], name_of: Callable[[int, str], str]
) -> list[Event]:
    """The pass, inside it the layers, inside those the operators."""
    direction, (micro_batch, chunk) = one.direction, one.key
    moments = [(at(moment), node) for moment, node in one.moments]
    intervals = [(begin, end, node) for (begin, node), (end, _) in itertools.pairwise(moments)]
    key = {"micro-batch": micro_batch, "model chunk": chunk}
    events = [span(COMPUTE, _of(direction, micro_batch), moments[0][0], moments[-1][0], key)]
    for layer, group in itertools.groupby(intervals, lambda interval: interval[2][0]):
        inside = list(group)
        if layer == COPIES[0]:
            events += [
                span(COMPUTE, "moves activations for lack of memory", begin, end, {}) for begin, end, _ in inside
            ]
        elif layer >= 0:
            name = f"{name_of(layer, '')}, {direction}"
            events.append(span(COMPUTE, name, inside[0][0], inside[-1][1], {"layer": layer}))
            for begin, end, (_, op) in inside:
                if op:
                    events.append(span(COMPUTE, op, begin, end, {"layer": layer, "op": op, **key}))
    return events


def _of(direction: str, micro_batch: int | None) -> str:
    return direction if micro_batch is None else f"{direction} {micro_batch}"


def _names(rank: int, stage: int) -> Iterator[Event]:
    """What the rank and its tracks are called, and their order."""
    of_rank = {"ph": "M", "pid": rank}
    yield {**of_rank, "name": "process_name", "args": {"name": f"rank {rank}, stage {stage}"}}
    yield {**of_rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for number, track in enumerate(_TRACKS):
        yield {**of_rank, "tid": number, "name": "thread_name", "args": {"name": track}}
        yield {**of_rank, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}


_running: list[Trace] = []


def start(file: Path, first: int, last: int, when_settled: bool = False, asked_by: str = "--memory-trace") -> Trace:
    """Trace these training steps from now on, as `Trace` says, and no others."""
    stop()
    atexit.register(stop)
    trace = Trace(file, first, last, when_settled, asked_by)
    _running.append(trace)
    passes.LISTENERS.append(trace)
    return trace


def stop() -> None:
    """Trace nothing any more, and say so where nothing has been."""
    for trace in _running:
        trace.close()
        with contextlib.suppress(ValueError):
            passes.LISTENERS.remove(trace)
    _running.clear()
    atexit.unregister(stop)

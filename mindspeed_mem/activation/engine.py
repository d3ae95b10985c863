"""The engine: executes a memory plan on the activations that operators save for backward.

Regions say which operator of which layer runs; a saved-tensor hook (saved.py) turns what autograd keeps into handles on
records, one per storage; frames say when each record leaves and comes back; the mover copies. Operators that the plan
recomputes run as a `Replay` (modules and functions) or under a `Tape` (inline code).
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from mindspeed_mem.activation import regions, replay, rng
from mindspeed_mem.activation.auto_distance import AutoDistances
from mindspeed_mem.activation.census import Census
from mindspeed_mem.activation.figures import figures
from mindspeed_mem.activation.frame import Frame
from mindspeed_mem.activation.ledger import LEDGER
from mindspeed_mem.activation.mover import Mover
from mindspeed_mem.activation.order import BACKWARD, FORWARD, Pass, RecordedOrder
from mindspeed_mem.activation.pinned import PinnedWatch
from mindspeed_mem.activation.planned import PlannedRegions
from mindspeed_mem.activation.records import KEEP
from mindspeed_mem.activation.replay import Replay
from mindspeed_mem.activation.residency import Residency
from mindspeed_mem.activation.tape import Tape
from mindspeed_mem.device.slabs import HostSlabs
from mindspeed_mem.plan import MemoryConfig

if TYPE_CHECKING:
    from mindspeed_mem.device import Backend

logger = logging.getLogger(__name__)


class Engine(PlannedRegions):
    """One per process. With ``watch_only`` it moves nothing: every operator through handles, counted by `census`."""

    def __init__(self, config: MemoryConfig, backend: Backend, host_limit_bytes: int | None, watch_only: bool = False):
        super().__init__(backend.tensor_type, watch_only)
        self.config, self.backend = config, backend
        rng.follow(backend)
        self.mover = Mover(backend, HostSlabs(backend, host_limit_bytes))
        self.auto = AutoDistances(backend, lambda layer: self.plan.operators_in(layer))
        self.stalled_before = backend.stall_seconds()
        self.order, self.pinned, self.residency = RecordedOrder(), PinnedWatch(), Residency()
        self.census = Census(self.running, self._device_type) if watch_only else None
        self._scheduled = False  # a schedule says when micro-batches begin and end
        self._stage: int | None = None  # of a pipeline that trains
        self._at_once: set[tuple[int, int]] = set()  # micro-batch and chunk of forwards with their backward next
        self._departed = False
        self.models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # for which all ranks have made the plan
        self._frames: weakref.WeakValueDictionary[tuple[int | None, int], Frame] = weakref.WeakValueDictionary()
        self._of_output: dict[int, tuple[tuple[int | None, int], Any]] = {}
        self._operators_of_chunk: dict[int, int] = {}

    # ---- regions
    def run(self, original: Callable, module: Any, args: tuple, kwargs: dict) -> Any:
        """Run a tagged module's forward as an operator."""
        layer, path = module.__dict__[regions.TAG]
        if replay.running():
            replay.enters(path, args, kwargs)
            return original(module, *args, **kwargs)
        if self._stack:
            return self._run_operator(layer, path, original, module, args, kwargs)
        if path or self._idle or not regions.may_save():
            if not path and self.recomputes and torch.is_grad_enabled():
                self._under_another_checkpoint(layer)  # before its backward, or again in it
            return original(module, *args, **kwargs)
        if self.plan is None or (not self.agreed and self._built != regions.built()):
            self.resolve()
            layer = module.__dict__[regions.TAG][0]  # it may count on now
        self._enter_layer(layer, args, kwargs)
        if self._covered is not None and layer not in self._covered:
            result = self._run_operator(layer, path, original, module, args, kwargs)
            self._sign_at(result)
            return result
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        try:
            hooks.__enter__()
        except RuntimeError:  # somebody has disabled hooks here: run natively
            return self._run_operator(layer, path, original, module, args, kwargs)
        self._hooked = True
        try:
            result = self._run_operator(layer, path, original, module, args, kwargs)
            self._keep_output(result)
            return result
        finally:
            self._hooked = False
            hooks.__exit__()

    def _run_operator(self, layer: int, path: str, original: Callable, module: Any, args: tuple, kwargs: dict) -> Any:
        if type(tape := self._region) is Tape:  # a module inside marked code
            self._suspend()
            try:
                return self._run_operator(layer, path, original, module, args, kwargs)
            finally:
                self._resume(tape)
        if type(self._region) is Replay:
            self._region.enters(path, args, kwargs)
        return self._run_call(layer, path, functools.partial(original, module), args, kwargs)

    def run_inline(self, name: str, call: Callable, args: tuple, kwargs: dict, state: Any = None) -> Any:
        """Run a function as operator ``name`` of the running module; ``state`` as for `Replay`."""
        if replay.running():
            replay.enters(name, args, kwargs)
        if not self._stack or replay.running():
            return call(*args, **kwargs)
        layer, parent, _ = self._stack[-1]
        if type(self._region) is Replay:
            self._region.enters(name, args, kwargs)
        return self._run_call(layer, regions.inline_path(parent, name), call, args, kwargs, state)

    def _run_call(self, layer: int, path: str, call: Callable, args: tuple, kwargs: dict, state: Any = None) -> Any:
        stack = self._stack
        depth = len(stack)
        begin = functools.partial(self._start, layer, path, False)
        again = self._to_recompute(layer, path) and not self._starts_from_managed(layer, path, args, kwargs)
        of = self.trials.operator(layer, path, call, state) if again else None
        again = again and not of.refused()
        if self._counting:
            call = functools.partial(self.census.watch.run, (layer, path), state, call)
        if depth and stack[-1][:2] == (layer, path) and not again:
            return call(*args, **kwargs)  # a subclass calling super, or a marker of the same name
        try:
            if again:
                result = self._replayed(layer, path, call, args, kwargs, begin, of, state)
            else:
                begin()
                result = call(*args, **kwargs)
        except BaseException:
            self._cut_tape(depth)
            del stack[depth:]
            raise
        self._stop(depth)
        return result

    def _sign_at(self, result: Any) -> None:
        """A layer that runs natively still tells when its backward starts, for what is to be back by then."""
        output = _first(result)
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        if node is not None and self._covered:
            frame, number = self._frame, self._frame.count
            node.register_prehook(lambda _: frame.unpacks(number))

    def running(self) -> tuple[int, str] | None:
        """The operator that runs now, as (layer, path)."""
        return self._stack[-1][:2] if self._stack else None

    def mark_start(self, name: str) -> None:
        """Inline operator ``name`` starts inside the running module."""
        if self._stack and not replay.running():
            layer, parent, _ = self._stack[-1]
            path = regions.inline_path(parent, name)
            self._start(layer, path, True)
            if self.recomputes:
                self._start_tape(layer, path)

    def mark_stop(self, name: str) -> None:
        stack = self._stack
        if (
            stack
            and stack[-1][2]
            and not replay.running()
            and stack[-1][1].rpartition(".")[2] == regions.inline_path("", name)
        ):
            self._stop(len(stack) - 1)

    def _start(self, layer: int, path: str, marker: bool) -> None:
        frame = self._frame
        frame.count += 1
        self._stack.append((layer, path, marker))
        frame.switch(layer, path, frame.count)
        if self.stopwatch is not None:
            self.stopwatch.switch(layer, path)
        if frame.ahead is not None:
            frame.forward_reaches(self._operators_of_chunk.get(frame.key[1], 0))

    def _stop(self, depth: int) -> None:
        """The region above ``depth`` ends: what it produced is complete, and some releases are due."""
        frame = self._frame
        self._stop_tape(depth)
        del self._stack[depth:]
        layer, path, _ = self._stack[-1] if self._stack else OUTSIDE_REGION
        frame.switch(layer, path, frame.count)
        if self.stopwatch is not None:
            self.stopwatch.switch(layer, path)
        frame.copy_fresh()
        frame.release_due(frame.count)

    def _enter_layer(self, layer: int, args: tuple, kwargs: dict) -> None:
        frame = self._frame
        if frame is None or (not self._scheduled and layer <= frame.last_layer):
            frame = self._new_frame((None, 0))
        frame.last_layer = layer
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                if type(tensor) is torch.Tensor and tensor.grad_fn is None:
                    # masks, tables, what a stage received: others hold them, so moving them would free nothing
                    storage = tensor.untyped_storage()
                    storage._mem = KEEP
                    if tensor.requires_grad:
                        LEDGER.enter(storage, owned=False)

    def _new_frame(self, key: tuple[int | None, int]) -> Frame:
        if not self._scheduled:
            self.auto.next_call()
            if self._frame is not None:
                self._frame.finish_forward()
        self._frame = self._frames[key] = Frame(self.mover, key)
        return self._frame

    # ---- passes of a schedule
    def begin_schedule(
        self,
        key: tuple,
        passes: Sequence[Pass] | None = None,
        stage: int | None = None,
        gather: Callable[[Any], list] | None = None,
    ) -> None:
        """A schedule call begins.

        Args:
            key: what its order depends on.
            passes: its order on this rank, where that is known beforehand.
            stage: this rank's stage of a pipeline that trains; None: there is no pipeline, or nothing is trained.
            gather: collects an object from all ranks, in a pipeline.
        """
        self._abandon()
        self.auto.next_call()
        self._scheduled, self._stage = True, stage
        self.order.begin(key, passes)
        self._at_once = {one[1:] for one, after in pairwise(passes or ()) if after == (BACKWARD, *one[1:])}
        if stage is not None and self._pp_aware and self.residency.begin(key):
            for line in self.residency.compare(gather):
                logger.info(line)

    def end_schedule(self, completed: bool) -> None:
        departed = self.order.end(completed)
        if departed and not self._departed:
            self._departed = True
            logger.warning("the schedule left its known order (%s): what runs next is taken from records", departed)
        if completed and any(self._operators_of_chunk.values()):
            self._say_what_never_ran()
        if completed and self._stage is not None and self._pp_aware:
            peak = self.backend.peak()
            self.residency.end(self._stage, LEDGER.held.highest if peak is None else peak)
        self._abandon()
        self._scheduled = False

    def _abandon(self) -> None:
        self._cut_tape(0)
        self._stack.clear()
        self._frame = None
        self._of_output.clear()

    def begin_forward(self, micro_batch: int | None, chunk: int) -> None:
        """The forward of one micro-batch through one model chunk begins on this rank."""
        frame = self._new_frame((micro_batch, chunk))
        if self._stage is not None and self._pp_aware:
            staying = sum(other.stays for other in self._frames.values())
            frame.stays = self.residency.stays(staying, (micro_batch, chunk) in self._at_once, bool(self._at_once))
        frame.ahead = self._backward_after((FORWARD, micro_batch, chunk))
        self._counting = self.census is not None and self.census.wants(chunk)
        if self.profiler is not None:
            self.profiler.begin_pass(FORWARD, frame.key)

    def end_forward(self, output: Any) -> None:
        """It has ended, the loss included; ``output`` is what the schedule will hand to `begin_backward`."""
        frame, self._frame = self._frame, None
        if frame is None:
            return
        if self.profiler is not None:
            self.profiler.end_pass()
        frame.ahead = None
        frame.finish_forward()
        self._operators_of_chunk[frame.key[1]] = frame.count
        if isinstance(_first(output), torch.Tensor):
            self._of_output[id(_first(output))] = frame.key, weakref.ref(_first(output))
        moved = [record for ref in frame.moved if (record := ref()) is not None]
        self.pinned.check(moved, output)
        away = LEDGER.without.now - LEDGER.held.now
        self.residency.passed(sum(record.nbytes for record in moved), away, len(self._frames))
        if self._counting:
            self.census.finish(frame.key[1])
        if self.recomputes:
            self._judge(frame)
        self.notes.flush()

    def begin_backward(self, output: Any) -> None:
        """The backward of the pass that returned ``output`` begins."""
        key, ref = self._of_output.pop(id(_first(output)), (None, None))
        if ref is None or ref() is not _first(output):
            return
        self._frame = frame = self._frames.get(key)
        ahead = self._backward_after((BACKWARD, *key))
        if frame is not None:
            if self.profiler is not None:
                self.profiler.begin_pass(BACKWARD, key)
            frame.ahead = ahead
            frame.begin_backward()

    def end_backward(self) -> None:
        if self.profiler is not None:
            self.profiler.end_pass()
        self._frame = None

    def _backward_after(self, now: tuple) -> Frame | None:
        """The frame whose backward follows this pass, if its forward is complete."""
        coming = self.order.advance(now)
        if coming is None or coming[0] != BACKWARD:
            return None
        frame = self._frames.get(coming[1:])
        return frame if frame is not None and frame.forward_done else None

    # ---- figures
    def report(self) -> dict[str, Any]:
        """Bytes, counts and seconds of this rank so far, plain data."""
        return figures(self)


OUTSIDE_REGION = (-1, "", False)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, (list, tuple)) else output


_engine: Engine | None = None


def start(
    config: MemoryConfig,
    backend: Backend,
    host_limit_bytes: int | None = None,
    watch_only: bool = False,
    kind: type[Engine] = Engine,
) -> Engine:
    """Make this process's engine, replacing an earlier one (whose handles stay valid)."""
    engine = kind(config, backend, host_limit_bytes, watch_only)
    LEDGER.forget()
    use(engine)
    return engine


def use(engine: Engine | None) -> Engine | None:
    """Make ``engine`` this process's engine from now on; return the earlier one. Not in the middle of a step."""
    global _engine
    _engine, earlier = engine, _engine
    return earlier


def current() -> Engine | None:
    return _engine


def stop() -> None:
    """No engine from now on; handles that autograd still holds stay valid."""
    earlier = use(None)
    if earlier is not None:
        earlier.backend.lift_reserve()

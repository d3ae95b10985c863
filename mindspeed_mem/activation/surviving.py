"""An engine whose steps do not die for lack of device memory as long as the host has room (--survive-oom).

Every saved tensor is a handle on a record, also outside the layers, and any of them can be moved to the host while an
operator waits. The guard that notices a lack of memory runs only in steps in which memory may become tight.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation import own_tensors
from mindspeed_mem.activation.arguments import tensors_in
from mindspeed_mem.activation.census import Census
from mindspeed_mem.activation.engine import Engine
from mindspeed_mem.activation.eviction import EvictingMover
from mindspeed_mem.activation.frame import OUTSIDE
from mindspeed_mem.activation.ledger import LEDGER
from mindspeed_mem.activation.order import BACKWARD
from mindspeed_mem.activation.records import DROPPED, HOST, KEEP, LOADED, Handle, Record, movable, native
from mindspeed_mem.activation.saved import storage_mark
from mindspeed_mem.activation.tightness import Tightness
from mindspeed_mem.device import delegation, onednn
from mindspeed_mem.device.op_guard import OpGuard
from mindspeed_mem.device.op_rules import storage_of

if TYPE_CHECKING:
    from mindspeed_mem.activation.frame import Frame
    from mindspeed_mem.device import Backend
    from mindspeed_mem.plan import MemoryConfig

logger = logging.getLogger(__name__)

_AT_ONCE = 100  # at least this part of the device's memory is freed at a time: each lack costs an attempt
_NAMED = 5  # operators in a message


class NoRoomError(torch.OutOfMemoryError):
    """Device memory does not suffice even with everything on the host that can be there. The message says what was
    needed, what holds the memory, and what to try."""


class SurvivingEngine(Engine):
    """One per process, like any engine."""

    _again = "--recompute-layers all; "
    """What to recompute, as advice; empty where that is found out."""

    def __init__(
        self, config: MemoryConfig, backend: Backend, host_limit_bytes: int | None = None, watch_only: bool = False
    ):
        super().__init__(config, backend, host_limit_bytes, watch_only)
        self.mover = EvictingMover(backend, self.mover.slabs, self._turn)
        self.guard = OpGuard(backend, self._make_room, self.no_room)
        self.everything = False
        """Move whatever is saved, whatever the plan says: the second attempt at a step."""
        self.forwards = 0
        """How many forwards of micro-batches have begun."""
        self._all_records = True
        _ask_before_failing(backend)
        self._guarding = self._tight = False
        self.tightness = Tightness(backend)
        self.guarded_steps = 0

    def resolve(self, gather: Callable[[Any], list] | None = None, partners: Collection[int] = ()) -> None:
        super().resolve(gather, partners)
        self.backend.keep_reserve()  # by now the device is chosen, and the model there
        self._covered, self._idle = None, False
        self.tightness.varies = any("experts" in path.split(".") for _, path in self._modules)

    def adopt(self, config: MemoryConfig, *args: Any, **kwargs: Any) -> None:
        super().adopt(config, *args, **kwargs)
        self.tightness.forget(planned=config.swap.swap)

    # ---- when it is profiled
    def start_census(self) -> None:
        """Count what operators keep, from the next forward on."""
        self.census = Census(self.running, self._device_type)

    def stop_census(self) -> Census | None:
        """Count no more; returns what has been counted."""
        census, self.census, self._counting = self.census, None, False
        return census

    # ---- when memory runs out
    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Around what may lack memory: a step's forwards and backwards, or its optimizer."""
        if self._guarding:  # by somebody further out
            yield
            return
        guard = self.guard if self.tightness.begins() or self.everything else self._unguarded()
        self._guarding, before = True, self.guard.lacks
        self._tight = guard is self.guard
        self.guarded_steps += self._tight
        try:
            with guard:
                yield
        finally:
            self._guarding = self._tight = False
            self.tightness.ends(self.guard.lacks > before)

    def run_fused(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        """Run a function that may be compiled: what that allocates, in forward and in backward, no guard sees. While
        memory is tight it finds room for about as much as it is given."""
        if not self._tight:
            return super().run_fused(call, args, kwargs)
        given = {storage_of(one): one.nbytes for one in tensors_in((args, kwargs)) if self.backend.owns(one)}
        nbytes = sum(given.values())

        def with_room(*args: Any, **kwargs: Any) -> Any:  # where nobody records what an operator consists of
            self.guard.room_for(nbytes, args, kwargs)
            return call(*args, **kwargs)

        result = super().run_fused(with_room, args, kwargs)
        for leaf in tensors_in(result):
            if leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(functools.partial(self._room_in_backward, nbytes))
        return result

    def _room_in_backward(self, nbytes: int, gradients: tuple) -> None:
        if self._tight:
            self.guard.room_for(2 * nbytes, gradients)  # what it was given may have to come back first

    def _unguarded(self) -> contextlib.AbstractContextManager:
        return onednn.noticed(getattr(self.backend, "ledger", None))

    def _make_room(self, nbytes: int, pinned: set[int]) -> int | None:
        limit = self.backend.limit()
        return self.mover.make_room(max(nbytes, limit // _AT_ONCE if limit else 0), pinned)

    def no_room(self, op: str, nbytes: int, why: str) -> NoRoomError:
        """What to raise when ``nbytes`` (0: unknown) are needed in ``op``; ``why`` nothing more was tried, if that is
        not for lack of what could leave."""
        holders = self.mover.on_device()
        allocated, limit, slabs = self.backend.allocated(), self.backend.limit(), self.mover.slabs
        where = self.running()
        lines = [
            f"{nbytes or 'an unknown number of'} bytes of device memory are needed in {op}"
            + (f" ({_name(*where)})" if where is not None else "")
            + (f", which {why}" if why else ", and no activation that could leave is left"),
            f"in use: {allocated} of {limit} bytes; {holders.total()} of them are activations that backward needs",
            f"on the host: {slabs.bytes_in_use} bytes of activations"
            + (f", budget {slabs.limit_bytes} bytes" if slabs.limit_bytes is not None else "")
            + (": it is full" if self.mover.host_full else ""),
        ]
        named = [f"{_name(*who)} {n} bytes" for who, n in holders.most_common(_NAMED)]
        lines.append("largest activations on the device: " + ("; ".join(named) or "none"))
        more = "raise --swap-host-memory-gib; " if self.mover.host_full else ""
        lines.append(
            f"try: {more}a smaller --micro-batch-size or --seq-length; {self._again}more ranks for the same "
            "model (--tensor-model-parallel-size, --pipeline-model-parallel-size, --use-distributed-optimizer, "
            "--chunk-zero-stage 3)"
        )
        return NoRoomError("\n  ".join(lines))

    def _turn(self, frame: Frame) -> float:
        """How many passes come before this frame's backward."""
        if frame is self._frame:
            return -1
        ahead = self.order.ahead().get((BACKWARD, *frame.key))
        if ahead is not None:
            return ahead
        frames = [id(one) for one in self._frames.values()]  # the older, the sooner
        return frames.index(id(frame)) if id(frame) in frames else 0

    def _distance(self, layer: int, op: str, saver_layer: int, saver: str) -> int | None:
        distance = super()._distance(layer, op, saver_layer, saver)
        return 1 if distance is None and self.everything else distance

    # ---- what is saved outside the layers: embedding, loss
    @contextlib.contextmanager
    def holding_all(self) -> Iterator[None]:
        """Around the forward of a micro-batch, loss included; layers have their own hooks inside."""
        self.forwards += 1
        hooks = saved_tensors_hooks(self._pack_outside, self._unpack)
        try:
            hooks.__enter__()
        except RuntimeError:  # somebody has disabled hooks here
            yield
            return
        try:
            yield
        finally:
            hooks.__exit__()

    def _pack_outside(self, tensor: torch.Tensor) -> Any:
        by_function = own_tensors.saved_by_function()
        if self._stack and self._frame is not None:
            return self._pack(tensor, by_function)
        handle = self._keep_outside(tensor, by_function)
        return own_tensors.own(handle, tensor) if by_function else handle

    def _keep_outside(self, tensor: torch.Tensor, by_function: bool) -> Handle:
        frame = self._frame
        if frame is None or not movable(tensor, self._device_type):
            return native(tensor)
        storage = tensor.untyped_storage()
        record = None
        if by_function and own_tensors.stays_itself(tensor):
            self._pin(tensor, storage)
        if storage_mark(storage) is not KEEP and storage.nbytes() and not getattr(storage, "_mem_static", False):
            record = self._record_of(tensor, storage)
            if record is None:
                token = LEDGER.enter(storage, owned=False)
                record = Record(self.mover, frame, (*OUTSIDE[:2], frame.count), storage, token, tensor)
                storage._mem = weakref.ref(record)
        handle = Handle(tensor, record)
        if record is not None:
            record.saved_as(handle, tensor)
            record.used_at(frame.count)
            if record.state in (HOST, LOADED, DROPPED):
                handle.let_go()
        if self.stopwatch is not None:
            self.stopwatch.saved(handle)
        return handle


_asks: set[str] = set()  # the devices whose allocator asks for room before it fails


def _ask_before_failing(backend: Backend) -> None:
    """Where the delegating allocator was built, let it ask the engine of the moment: once for each device."""
    if backend.type in _asks or not delegation.ask_through_allocator(backend, _room_in_allocator):
        return
    _asks.add(backend.type)
    logger.info("device memory is asked for by the delegating allocator (python -m mindspeed_mem build-allocator)")


def _room_in_allocator(nbytes: int) -> int:
    engine = engines.current()
    return engine._make_room(nbytes, set()) or 0 if isinstance(engine, SurvivingEngine) else 0


def _name(layer: int, op: str) -> str:
    return f"{op or 'the layer'} of layer {layer}" if layer >= 0 else "outside the layers"

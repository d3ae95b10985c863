"""The saved-tensor hook: what becomes of each tensor that an operator keeps for backward.

It stays, or its record is selected to leave, or, when a recomputed operator made it, its record is without device
memory from the start.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_mem.activation import own_tensors
from mindspeed_mem.activation.frame import OUTSIDE, Frame
from mindspeed_mem.activation.ledger import LEDGER
from mindspeed_mem.activation.notes import Notes
from mindspeed_mem.activation.records import DROPPED, HOST, KEEP, KEPT, LOADED, STAYS, Handle, Record, movable, native
from mindspeed_mem.activation.replay import Replay
from mindspeed_mem.activation.tape import Tape
from mindspeed_mem.plan.checks import AUTO

if TYPE_CHECKING:
    from mindspeed_mem.activation.auto_distance import AutoDistances
    from mindspeed_mem.activation.census import Census
    from mindspeed_mem.activation.mover import Mover
    from mindspeed_mem.activation.profiler import Profiler
    from mindspeed_mem.activation.stopwatch import Stopwatch
    from mindspeed_mem.plan import MemoryConfig, MemoryPlan, Swap
    from mindspeed_mem.plan.checks import Distance


class SavedTensors:
    """What the engine does with saved tensors and with the inputs of recomputed operators."""

    config: MemoryConfig
    auto: AutoDistances
    mover: Mover
    census: Census | None
    plan: MemoryPlan | None
    num_layers: int

    def __init__(self, device_type: str, counting: bool):
        self._device_type = device_type
        self._counting = counting  # the census is open
        self._by_producer_only = True  # no entry moves what an operator saves: who produced a storage decides at once
        self._all_records = False  # also for what the plan never selects: it may have to leave when memory runs out
        self._stack: list[tuple[int, str, bool]] = []  # (layer, operator, is a marker) now running, innermost last
        self._frame: Frame | None = None
        self._region: Replay | Tape | None = None  # the recomputed operator that runs now
        self.notes = Notes()
        self.profiler: Profiler | None = None
        self.stopwatch: Stopwatch | None = None  # while a profiler measures

    def _pack(self, tensor: torch.Tensor, by_function: bool | None = None) -> Any:
        if by_function is None:
            by_function = own_tensors.saved_by_function()
        region = self._region
        if type(region) is not Tape:
            kept = self._keep(tensor, region, by_function)
            if self.stopwatch is not None:
                self.stopwatch.saved(kept)
        else:
            region.paused = True
            try:
                kept = self._keep(tensor, None, by_function)
            finally:
                region.paused = False
        return own_tensors.own(kept, tensor) if by_function else kept

    def _keep(self, tensor: torch.Tensor, region: Replay | None, by_function: bool) -> Handle:
        if not movable(tensor, self._device_type):
            if region is not None:
                region.saves(None, tensor)
            return native(tensor)
        frame = self._frame
        number = frame.count
        storage = tensor.untyped_storage()
        record = None
        if by_function and own_tensors.stays_itself(tensor):
            self._pin(tensor, storage)
        if storage_mark(storage) is not KEEP or self._counting:
            record = self._record_of(tensor, storage)
            if record is None:
                record = self._new_record(tensor, storage)
            elif self._counting:
                owner = record.layer, record.op, record.number
                self.census.add(owner, (*self._stack[-1][:2], number), tensor, storage)
        if region is not None:
            region.saves(record, tensor)
        handle = Handle(tensor, record, frame, number)
        if self._counting:
            self.census.holds(storage, handle)
        if record is None:
            return handle
        record.saved_as(handle, tensor)
        record.used_at(number)
        if record.state in (HOST, LOADED, DROPPED):
            handle.let_go()
        elif record.state == KEPT and record.distance != STAYS:
            distance = self._distance(record.layer, record.op, *self._stack[-1][:2])
            if distance is not None:  # a tape may turn out to start from it: then it stays
                frame.select(record, distance, at_once=type(self._region) is not Tape)
        return handle

    def _record_of(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Record | None:
        """The record of a storage seen before, unless its content has changed since."""
        mark = storage_mark(storage)
        record = mark() if mark is not None and mark is not KEEP else None
        if record is not None and record.state == DROPPED and record.holds(tensor) and not self._made_near(record):
            self._stays(record)
        if record is not None and record.state != KEPT and not record.holds(tensor):
            self.mover.cancel(record)  # what was copied stays with the earlier handles
            record = record if record.state == KEPT else None
        if record is None and mark is not KEEP:
            made_by = getattr(storage, "_mem_made_by", None)
            if made_by is not None and made_by.holds(tensor):
                replay = made_by.replay
                owner = replay.layer, replay.op, replay.number
                record = Record(self.mover, self._frame, owner, storage, LEDGER.enter(storage, True), tensor, replay)
                replay.makes(made_by.slot, record)
                storage._mem = weakref.ref(record)
        return record

    def _pin(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        """A custom function saves a leaf that needs a gradient: autograd keeps it until backward, its storage stays."""
        mark = storage_mark(storage)
        record = mark() if mark is not None and mark is not KEEP else None
        if record is not None and record.state == DROPPED:
            self._stays(record)
        elif record is not None:
            self.mover.keep(record)
        storage._mem = KEEP
        LEDGER.enter(storage, owned=False)
        planned = self.plan is not None and (self.config.swap.swap or self.config.recompute.active)
        name = own_tensors.made_by_function(tensor) if planned and self._stack else None
        if name is not None:
            self.notes.add(
                f"what the plan says of {storage.nbytes()} bytes that {name} saves has no effect",
                self._stack[-1][0],
                "they are a tensor of its own that needs a gradient, which autograd does not let go of. Save what it "
                "was given instead, and detach that in backward",
            )

    def _stays(self, record: Record) -> None:
        """It was to be made again, but somebody holds its memory."""
        self.mover.dropped[record.layer, record.replay.op] -= record.nbytes
        record.stay()

    def _made_near(self, record: Record) -> bool:
        """Whether a recomputed operator of this layer and micro-batch made it: running others again would cost more
        than the memory, which somebody holds (tables are held for all layers, and layers' outputs for the next)."""
        layer = self._stack[-1][0] if self._stack else self._about_to_run[0]
        return record.frame is self._frame and record.layer == layer

    def _new_record(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Record | None:
        """Look at a storage for the first time; None when nothing in the plan can ever select it."""
        keep = storage_mark(storage) is KEEP
        frame, (layer, op, _), region = self._frame, self._stack[-1], self._region
        # An expert without tokens saves empty tensors: they, too, make its rank repeat the collectives.
        if getattr(storage, "_mem_static", False) or not (storage.nbytes() or type(region) is Replay):
            storage._mem = KEEP
            return None
        owner = OUTSIDE if keep else frame.owner_of(tensor)
        token = LEDGER.enter(storage, 0 <= owner[0] < self.num_layers)
        if self._counting:
            self.census.add(owner, (layer, op, frame.count), tensor, storage)
        made_here = region is not None and not keep and region.made(storage, owner)
        if keep or not (
            self._all_records
            or made_here
            or not self._by_producer_only
            or self._distance(*owner[:2], layer, op) is not None
        ):
            storage._mem = KEEP
            return None
        replay = region if made_here and type(region) is Replay else None
        if replay is not None and replay.kept is not None:  # it may turn out not to repeat itself
            record = Record(self.mover, frame, owner, storage, token, tensor)
            record.distance = STAYS
            replay.kept.add(record)
        else:
            record = Record(self.mover, frame, owner, storage, token, tensor, replay)
        storage._mem = weakref.ref(record)
        return record

    def _hold(self, tensor: torch.Tensor) -> Handle:
        """Keep an input of a recomputed operator for its second run."""
        if not movable(tensor, self._device_type):
            return native(tensor)
        storage = tensor.untyped_storage()
        if storage_mark(storage) is KEEP or getattr(storage, "_mem_static", False):
            return Handle(tensor)
        record, frame = self._record_of(tensor, storage), self._frame
        if record is None and not storage.nbytes():
            return Handle(tensor)
        if record is None or record.replay is None:
            owner = frame.owner_of(tensor) if record is None else (record.layer, record.op, record.number)
            if not self.plan.swap_recompute_inputs or frame.stays:
                return self._hold_here(tensor, storage, record, owner)
            if record is None:
                token = LEDGER.enter(storage, 0 <= owner[0] < self.num_layers)
                record = Record(self.mover, frame, owner, storage, token, tensor)
                storage._mem = weakref.ref(record)
        handle = Handle(tensor, record)
        record.saved_as(handle, tensor)
        if record.replay is not None:
            handle.version = None  # made again, it is as it was, whatever has been written over it meanwhile
        if record.state in (HOST, LOADED, DROPPED):
            handle.let_go()
        elif record.state == KEPT:
            distance = self._distance(record.layer, record.op, *OUTSIDE[:2])
            if distance is None:
                distance = self._ahead(self.config.swap.default_prefetch, record.layer, record.op)
            frame.select(record, distance)
        return handle

    def _hold_here(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, record: Record | None, owner: tuple[int, str, int]
    ) -> Handle:
        """Hold an input on the device, whatever its producer's entry says."""
        swap = self._decision(*owner[:2])
        if swap is not None and swap.activations != "saved" and not self.plan.swap_recompute_inputs:
            layer, op = self._about_to_run
            consumer = f"{op or 'the layer'} of layer {layer}" if layer != owner[0] else op or "the layer"
            self.notes.add(
                f"{swap.entry} has no effect on the output of {owner[1] or 'the layer'}",
                owner[0],
                f"{consumer} is recomputed from it (swap_config.swap_recompute_inputs: True swaps it)",
            )
        token = LEDGER.enter(storage, 0 <= owner[0] < self.num_layers)
        if record is not None:
            self.mover.keep(record)
        if not self._all_records:
            storage._mem = KEEP
            return Handle(tensor)
        if record is None:
            record = Record(self.mover, self._frame, owner, storage, token, tensor)
            storage._mem = weakref.ref(record)
        record.distance = STAYS
        handle = Handle(tensor, record)
        record.saved_as(handle, tensor)
        return handle

    _about_to_run: tuple[int, str] = (-1, "")
    """The recomputed operator whose inputs are being held."""

    def _distance(self, layer: int, op: str, saver_layer: int, saver: str) -> int | None:
        """How far ahead a storage is moved: by its producer's entry, else by that of the operator saving it now."""
        if self._frame.stays:
            return None
        swap = self._decision(layer, op)
        if swap is not None and swap.activations != "saved":
            return self._ahead(swap.distance, layer, op)
        if self._by_producer_only:
            return None
        swap = self._decision(saver_layer, saver)
        if swap is None or swap.activations == "produced":
            return None
        return self._ahead(swap.distance, layer, op)

    def _ahead(self, distance: Distance, layer: int, op: str) -> int:
        """A configured distance as a number; what is left to us goes by the operator that produced the storage."""
        if distance != AUTO:
            return distance
        self.mover.auto = self.auto
        return self.auto(layer, op)

    def _decision(self, layer: int, op: str) -> Swap | None:
        return self.plan.decision(layer, op) if 0 <= layer < self.num_layers else None

    def _unpack(self, kept: Any) -> torch.Tensor:
        if type(kept) is not Handle:
            return kept
        if self.stopwatch is not None:
            self.stopwatch.unpacks(kept)
        if not self._stack:
            if kept.frame is not None:
                kept.frame.unpacks(kept.number)
        elif type(self._region) is Replay:  # no backward, but gradients that a forward computes
            self._region.why_not = "it computes gradients within its forward"
        tensor = kept.bring_back()
        if kept.own is not None:
            own_tensors.unpacked(kept)
        return tensor


def storage_mark(storage: torch.UntypedStorage) -> Any:
    """KEEP, a weak reference to a record, or None where nobody has looked at the storage."""
    return getattr(storage, "_mem", None)

"""The saved-tensor hook: what becomes of each tensor that an operator keeps for backward.

It stays, or its record is selected to leave, or, when a recomputed operator made it, its record is without device
memory from the start.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

from mindspeed_mem.activation import hot_path
from mindspeed_mem.activation.course import Save
from mindspeed_mem.activation.no_effect_log import NoEffectLog
from mindspeed_mem.activation.observe.observation import Observation
from mindspeed_mem.activation.plan_in_force import PlanInForce
from mindspeed_mem.activation.position import Position
from mindspeed_mem.activation.rerun.dropped import Slot
from mindspeed_mem.activation.rerun.module_rerun import ModuleRerun
from mindspeed_mem.activation.rerun.second_run import MadeBy
from mindspeed_mem.activation.rerun.tape import Tape
from mindspeed_mem.activation.storage import for_weights, marks, own_tensors
from mindspeed_mem.activation.storage.for_weights import OnHost, ReadsForWeights
from mindspeed_mem.activation.storage.ledger import LEDGER, Token
from mindspeed_mem.activation.storage.micro_batch import NO_OWNER, MicroBatch
from mindspeed_mem.activation.storage.mover import Mover
from mindspeed_mem.activation.storage.records import (
    COPYING,
    DEVICE,
    DROPPED,
    HOST,
    KEPT,
    LOADED,
    OVERWRITTEN,
    STAYS,
    Handle,
    OverwrittenError,
    Owner,
    Part,
    Record,
    native,
    part_of,
)
from mindspeed_mem.device import fast_tensors

_AWAY = (HOST, LOADED, DROPPED)
_LEAVING = (DEVICE, COPYING, HOST)


class SavedTensors:
    """Turns saved tensors, and inputs of recomputed operators, into handles.

    Args:
        every_record: what the plan never selects gets a record, too: it may have to leave when memory runs out.
    """

    def __init__(
        self,
        position: Position,
        in_force: PlanInForce,
        mover: Mover,
        observation: Observation,
        no_effect: NoEffectLog,
        every_record: bool,
    ):
        self._position, self._in_force, self._mover = position, in_force, mover
        self._observation, self._no_effect = observation, no_effect
        self.every_record = every_record
        self._device_type = mover.backend.tensor_type
        # these very objects: whoever finds hooks in force can tell whose they are
        if hot_path.native is None:
            self.hooks = self.pack, self.unpack
        else:
            self.hooks = hot_path.native.hooks(self, position, mover, observation, self._device_type)
        self._reads: ReadsForWeights | None = None

    # ---- the hooks
    def pack(self, tensor: torch.Tensor, by_function: bool | None = None) -> Any:
        """What autograd keeps instead of ``tensor``, which the operator that runs saves."""
        if by_function is None:
            by_function = sys._getframe(1).f_code is own_tensors.APPLY
        position = self._position
        rerun, micro_batch = position.rerun, position.micro_batch
        if rerun is None:
            course = position.course
            if course is not None and micro_batch is not None:
                number = micro_batch.count
                if number != course.at:
                    course.at, course.index = number, 0
                index, saves = course.index, course.saves.get(number, ())
                course.index = index + 1
                save = saves[index] if index < len(saves) else True
                if save is False:
                    if by_function:
                        return own_tensors.own(native(tensor), tensor)
                    # as `native`, without a handle
                    return tensor if tensor.is_leaf else tensor.detach(), tensor._version
                if save is not True:
                    handle = self._keep_as_known(tensor, save, micro_batch, by_function)
                    if handle is not None:
                        return own_tensors.own(handle, tensor) if by_function else handle
        elif type(rerun) is ModuleRerun and rerun.saved.program is not None:
            assert micro_batch is not None
            slot = rerun.saved.drops(rerun, tensor, micro_batch, by_function)
            if slot is not None:
                return own_tensors.own(slot, tensor) if by_function else slot
        return self.pack_slowly(tensor, by_function)

    def pack_slowly(self, tensor: torch.Tensor, by_function: bool) -> Any:
        """The same where nothing is known of it."""
        rerun = self._position.rerun
        if type(rerun) is not Tape:
            kept = self._keep(tensor, rerun if type(rerun) is ModuleRerun else None, by_function)
            if self._observation.stopwatch is not None:
                self._observation.stopwatch.saved(kept.handle if isinstance(kept, Part) else kept)
        else:
            rerun.paused = True
            try:
                kept = self._keep(tensor, None, by_function)
            finally:
                rerun.paused = False
        return own_tensors.own(kept, tensor) if by_function and not isinstance(kept, Part) else kept

    def pack_outside(self, tensor: torch.Tensor) -> Any:
        """The same of what may be saved outside the layers: embedding, loss. It leaves only if memory runs out."""
        by_function = sys._getframe(1).f_code is own_tensors.APPLY
        position = self._position
        if position.stack and position.micro_batch is not None:
            return self.pack(tensor, by_function)
        handle = self._keep_outside(tensor, by_function)
        return own_tensors.own(handle, tensor) if by_function else handle

    def unpack(self, kept: Any) -> torch.Tensor:
        if type(kept) is tuple:
            tensor, version = kept
            if tensor._version != version:
                raise OverwrittenError(OVERWRITTEN.format("", tensor._version, version))
            return tensor
        if type(kept) is Slot:
            position, saver = self._position, kept.saver
            if not position.stack:
                if saver.number < saver.micro_batch.in_backward:
                    saver.micro_batch.unpacks(saver.number)
            elif type(position.rerun) is ModuleRerun:
                position.rerun.why_not = "it computes gradients within its forward"
            tensor = kept.bring_back()
            if kept.own is not None:
                own_tensors.unpacked(kept)
            return tensor
        if type(kept) is Part:
            return kept.whole(self.unpack(kept.handle))
        if type(kept) is not Handle:
            return kept
        if self._observation.stopwatch is not None:
            self._observation.stopwatch.unpacks(kept)
        position = self._position
        if not position.stack:
            if kept.micro_batch is not None and kept.number < kept.micro_batch.in_backward:
                kept.micro_batch.unpacks(kept.number)
        elif type(position.rerun) is ModuleRerun:  # no backward, but gradients that a forward computes
            position.rerun.why_not = "it computes gradients within its forward"
        reads = self._reads
        tensor = kept.bring_back() if reads is None else reads.brought(kept)
        if kept.own is not None:
            own_tensors.unpacked(kept)
        return tensor

    def for_weights(self, ctx: Any) -> tuple[tuple, OnHost | None, Handle | None]:
        """``ctx.saved_tensors`` of a linear layer that puts the gradient of its weight off, input first.

        What the input's gradient does not need, and is on the host, stays there: there is a stand-in without memory for
        it, and what brings it back. Last comes the input's handle, if it has one.
        """
        outer, self._reads = self._reads, ReadsForWeights(self._mover)
        try:
            tensors = ctx.saved_tensors
            self._reads.over()
            return tensors, self._reads.later, self._reads.first
        finally:
            self._reads = outer

    def output_gradient(self, gradient: torch.Tensor) -> OnHost | None:
        """What brings the gradient of a layer's output back for the gradient of its weight, which is put off; None: it
        stays. The backward of the layer has used it."""
        micro_batch = self._position.micro_batch
        if not self._in_force.output_gradients or micro_batch is None:
            return None
        return for_weights.to_host(self._mover, micro_batch, gradient)

    def may_drop(self) -> bool:
        """Whether records may be left out of what only recomputed operators need: nobody counts them or moves them."""
        observed = self._observation
        return not self.every_record and observed.counting is None and observed.stopwatch is None

    # ---- saved tensors
    def _keep(self, tensor: torch.Tensor, rerun: ModuleRerun | None, by_function: bool) -> Any:
        if fast_tensors.is_plain(tensor, self._device_type):
            return self._keep_plain(tensor, tensor, rerun, by_function)
        local = None if by_function else part_of(tensor, self._device_type)
        if local is None:
            if rerun is not None:
                rerun.saves(None, tensor)
            if self._position.watch is not None and self._position.micro_batch is not None:
                again = self._position.rerun is not None
                self._position.watch.saves(self._position.micro_batch.count, None, again, again)
            return native(tensor)
        return Part(self._keep_plain(local, tensor, rerun, by_function), tensor)

    def _keep_as_known(
        self, tensor: torch.Tensor, save: Save, micro_batch: MicroBatch, by_function: bool
    ) -> Handle | None:
        """Keep a tensor of which the course knows what becomes of it; None if it is not as expected."""
        mover = self._mover
        backend = mover.backend
        if mover.several or not (backend.one_stream or backend.stream_key() == micro_batch.home_key):
            return None
        if not fast_tensors.is_plain(tensor, self._device_type):
            return None
        storage, number = tensor.untyped_storage(), micro_batch.count
        attributes = storage.__dict__
        found: marks.Marks | None = attributes.get(marks.NAME)
        if found is None:
            nbytes = save.nbytes
            if storage.nbytes() != nbytes:
                return None
            if by_function and (own_tensors.stays_itself(tensor) or own_tensors.told_to_stay(tensor)):
                return None
            found = attributes[marks.NAME] = marks.Marks()
            found.token = token = LEDGER.token(LEDGER, nbytes, save.owned, False, save.made_by)
            record = Record(mover, micro_batch, save.owner, storage, token, tensor)
            record.distance, record.state = save.distance, DEVICE
            found.record = ref = weakref.ref(record)
            handle = Handle(tensor, record, micro_batch, number)
            record.handles.append(weakref.ref(handle))
            if number > record.last_use:
                record.last_use = number
            micro_batch.fresh.append(ref)
            if record.number < number:
                micro_batch.copy_fresh()
            return handle
        known: Record | None = None if found.record is None else found.record()
        if known is None or known.micro_batch is not micro_batch or known.way_back is not mover:
            return None
        if known.state not in _LEAVING or not known.holds(tensor) or (by_function and own_tensors.stays_itself(tensor)):
            return None
        handle = Handle(tensor, known, micro_batch, number)
        known.handles.append(weakref.ref(handle))
        if number > known.last_use:
            known.last_use = number
        if known.state == HOST:
            handle.let_go()
        return handle

    def _keep_plain(
        self, tensor: torch.Tensor, saved: torch.Tensor, rerun: ModuleRerun | None, by_function: bool
    ) -> Any:
        """Keep ``tensor``: what autograd saves, or its part on this rank."""
        position, census = self._position, self._observation.counting
        micro_batch = position.micro_batch
        assert micro_batch is not None
        number = micro_batch.count
        storage = tensor.untyped_storage()
        found = marks.of(storage)
        record = None
        if by_function:
            if own_tensors.stays_itself(tensor):
                self._pin(tensor, storage, found)
            elif own_tensors.told_to_stay(tensor):
                found.keep()
        if not found.stays or census is not None:
            if found.record is not None or found.made_by is not None:
                record = self._record_of(tensor, storage, found)
            if record is None:
                record = self._new_record(tensor, saved, storage, found)
            elif census is not None:
                census.add((record.layer, record.op, record.number), (*position.stack[-1][:2], number), tensor, storage)
        if rerun is not None:
            rerun.saves(record, tensor)
        watch = position.watch
        if watch is not None and (record is None or position.rerun is not None or record.way_back is not self._mover):
            watch.saves(number, found.token, record is not None, position.rerun is not None)
            watch = None
        if record is None and self._in_force.watch_only and not by_function and self.may_drop() and saved is tensor:
            return tensor if tensor.is_leaf else tensor.detach(), tensor._version  # nothing moves: nobody waits for it
        handle = Handle(tensor, record, micro_batch, number)
        if census is not None:
            census.holds(storage, handle)
        if record is None:
            return handle
        self._attach(handle, record, tensor)
        state = record.state
        if number > record.last_use or (state == DROPPED and number == record.last_use):
            record.used_at(number)
        if state == KEPT:
            if record.distance != STAYS:
                layer, op, _ = position.stack[-1]
                distance = self._distance(record.layer, record.op, layer, op)
                if distance is not None:  # a tape may turn out to start from it: then it stays
                    micro_batch.select(record, distance, at_once=type(position.rerun) is not Tape)
        elif state in _AWAY:
            handle.let_go()
        if watch is not None:
            small = record.distance == STAYS and record.nbytes < self._mover.staying.smallest
            known = record.state in _LEAVING or (record.state == KEPT and small)
            watch.saves(number, found.token, True, False, record if known else None)
        return handle

    def _keep_outside(self, tensor: torch.Tensor, by_function: bool) -> Handle:
        micro_batch = self._position.micro_batch
        if micro_batch is None or not fast_tensors.is_plain(tensor, self._device_type):
            return native(tensor)
        storage = tensor.untyped_storage()
        found = marks.of(storage)
        record = None
        if by_function and own_tensors.stays_itself(tensor):
            self._pin(tensor, storage, found)
        elif by_function and own_tensors.told_to_stay(tensor):
            found.keep()
        if not found.stays and storage.nbytes() and not found.static:
            record = self._record_of(tensor, storage, found)
            if record is None:
                record = self._make((*NO_OWNER[:2], micro_batch.count), storage, tensor, found)
        handle = Handle(tensor, record)
        if record is not None:
            self._attach(handle, record, tensor)
            record.used_at(micro_batch.count)
            if record.state in _AWAY:
                handle.let_go()
        if self._observation.stopwatch is not None:
            self._observation.stopwatch.saved(handle)
        return handle

    def _attach(self, handle: Handle, record: Record, tensor: torch.Tensor) -> None:
        """``handle`` is of ``tensor``, one more of the storage of ``record``."""
        mover = self._mover
        backend = mover.backend
        if mover.several or not (backend.one_stream or backend.stream_key() == record.micro_batch.home_key):
            mover.saves(record, tensor, first=not record.handles)
        record.handles.append(weakref.ref(handle))

    def _pin(self, tensor: torch.Tensor, storage: torch.UntypedStorage, found: marks.Marks) -> None:
        """A custom function saves a leaf that needs a gradient: autograd keeps it until backward, its storage stays."""
        record = found.record() if found.record is not None else None
        if record is not None:
            record.way_back.keep(record)
        found.keep()
        LEDGER.enter(storage, owned=False)
        config, stack = self._in_force.config, self._position.stack
        planned = self._in_force.plan is not None and (config.swap.swap or config.recompute.active)
        name = own_tensors.made_by_function(tensor) if planned and stack else None
        if name is not None:
            self._no_effect.add(
                f"what the plan says of {storage.nbytes()} bytes that {name} saves has no effect",
                stack[-1][0],
                "they are a tensor of its own that needs a gradient, which autograd does not let go of. Save what it "
                "was given instead, and detach that in backward",
            )

    # ---- inputs of second runs
    def hold(self, tensor: torch.Tensor) -> Handle:
        """Keep an input of a recomputed operator for its second run."""
        handle = self._hold(tensor)
        watch = self._position.watch
        if watch is not None and tensor.layout is torch.strided:
            found = marks.known(tensor.untyped_storage())
            if found is not None:
                watch.holds(found.token)
        return handle

    hold_slowly = hold  # where the other is in C++

    def _hold(self, tensor: torch.Tensor) -> Handle:
        if not fast_tensors.is_plain(tensor, self._device_type):
            return native(tensor)
        storage = tensor.untyped_storage()
        found = marks.of(storage)
        if found.stays or found.static:
            return Handle(tensor)
        record, micro_batch = self._record_of(tensor, storage, found), self._position.micro_batch
        if record is None and not storage.nbytes():
            return Handle(tensor)
        plan = self._in_force.plan
        assert micro_batch is not None and plan is not None
        if record is None or record.way_back is self._mover:
            owner = micro_batch.owner_of(tensor) if record is None else (record.layer, record.op, record.number)
            if not plan.swap_recompute_inputs or micro_batch.stays:
                return self._hold_here(tensor, found, record, owner)
            if record is None:
                record = self._make(owner, storage, tensor, found)
        handle = Handle(tensor, record)
        self._attach(handle, record, tensor)
        if record.way_back is not self._mover:
            handle.version = None  # made again, it is as it was, whatever has been written over it meanwhile
        if record.state in _AWAY:
            handle.let_go()
        elif record.state == KEPT:
            distance = self._distance(record.layer, record.op, *NO_OWNER[:2])
            if distance is None:
                distance = self._in_force.ahead(self._in_force.config.swap.default_prefetch, record.layer, record.op)
            micro_batch.select(record, distance)
        return handle

    def _hold_here(self, tensor: torch.Tensor, found: marks.Marks, record: Record | None, owner: Owner) -> Handle:
        """Hold an input on the device, whatever its producer's entry says."""
        swap, plan = self._in_force.decision(*owner[:2]), self._in_force.plan
        if swap is not None and swap.activations != "saved" and plan is not None and not plan.swap_recompute_inputs:
            layer, op = self._position.about_to_run
            consumer = f"{op or 'the layer'} of layer {layer}" if layer != owner[0] else op or "the layer"
            self._no_effect.add(
                f"{swap.entry} has no effect on the output of {owner[1] or 'the layer'}",
                owner[0],
                f"{consumer} is recomputed from it (swap_config.swap_recompute_inputs: True swaps it)",
            )
        storage = tensor.untyped_storage()
        self._enter(storage, owner, found)
        if record is not None:
            record.way_back.keep(record)
        if not self.every_record:
            found.keep()
            return Handle(tensor)
        if record is None:
            record = self._make(owner, storage, tensor, found)
        record.distance = STAYS
        handle = Handle(tensor, record)
        self._attach(handle, record, tensor)
        return handle

    # ---- records
    def _record_of(self, tensor: torch.Tensor, storage: torch.UntypedStorage, found: marks.Marks) -> Record | None:
        """The record of a storage seen before, unless its content has changed since."""
        record: Record | None = found.record() if found.record is not None else None
        if record is not None and record.state == DROPPED and record.holds(tensor) and not self._made_near(record):
            record.way_back.keep(record)
        rerun = self._position.rerun
        untried = rerun.untried if type(rerun) is ModuleRerun else None
        tried = untried is not None and record in untried.kept  # a second run may end with what was saved earlier
        if record is not None and (tried or record.state != KEPT) and not record.holds(tensor):
            self._mover.cancel(record)  # what was copied stays with the earlier handles
            record = record if record.state == KEPT and not tried else None
        if record is None and not found.stays:
            made_by: MadeBy | None = found.made_by
            if made_by is not None and made_by.holds(tensor):
                rerun = made_by.rerun
                owner = rerun.layer, rerun.op, rerun.number
                record = self._make(owner, storage, tensor, found)
                rerun.take(record)
                rerun.makes(made_by.slot, record)
        return record

    def _made_near(self, record: Record) -> bool:
        """Whether a recomputed operator of this layer and micro-batch made it: running others again would cost more
        than the memory, which somebody holds (tables are held for all layers, and layers' outputs for the next)."""
        position = self._position
        layer = position.stack[-1][0] if position.stack else position.about_to_run[0]
        return record.micro_batch is position.micro_batch and record.layer == layer

    def _new_record(
        self, tensor: torch.Tensor, saved: torch.Tensor, storage: torch.UntypedStorage, found: marks.Marks
    ) -> Record | None:
        """Look at a storage for the first time; None when nothing in the plan can ever select it."""
        position, stays = self._position, found.stays
        micro_batch, (layer, op, _), rerun = position.micro_batch, position.stack[-1], position.rerun
        assert micro_batch is not None
        # An expert without tokens saves empty tensors: they, too, make its rank repeat the collectives.
        if found.static or not (storage.nbytes() or type(rerun) is ModuleRerun):
            found.keep()
            return None
        owner = NO_OWNER if stays else micro_batch.owner_of(saved)
        if self._observation.counting is not None:
            self._observation.counting.add(owner, (layer, op, micro_batch.count), tensor, storage)
        made_here = rerun is not None and not stays and rerun.made(storage, owner)
        if stays or not (
            self.every_record
            or made_here
            or not self._in_force.by_producer_only
            or self._distance(*owner[:2], layer, op) is not None
        ):
            self._enter(storage, owner, found)
            found.keep()
            return None
        record = self._make(owner, storage, tensor, found)
        if made_here and type(rerun) is ModuleRerun:
            if rerun.untried is None:
                rerun.take(record)
            else:  # it may turn out not to repeat itself
                record.distance = STAYS
                rerun.untried.kept.add(record)
        return record

    def _make(self, owner: Owner, storage: torch.UntypedStorage, tensor: torch.Tensor, found: marks.Marks) -> Record:
        micro_batch = self._position.micro_batch
        assert micro_batch is not None
        record = Record(self._mover, micro_batch, owner, storage, self._enter(storage, owner, found), tensor)
        if self._mover.known is not None:
            self._mover.known.add(record)
        found.record = weakref.ref(record)
        return record

    def _enter(self, storage: torch.UntypedStorage, owner: Owner, found: marks.Marks) -> Token:
        return LEDGER.enter(storage, 0 <= owner[0] < self._in_force.num_layers, found, owner[:2])

    def _distance(self, layer: int, op: str, saver_layer: int, saver: str) -> int | None:
        """How far ahead a storage is moved; None: it stays."""
        micro_batch, in_force = self._position.micro_batch, self._in_force
        found = None
        if micro_batch is not None and not micro_batch.stays:
            produced = in_force.of_produced
            if (layer, op) in produced:
                found = produced[layer, op]
            else:
                found = in_force.distance(layer, op, saver_layer, saver)
        return 1 if found is None and in_force.everything else found

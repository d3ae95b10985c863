"""Which of the engine's methods its hot path in C++ takes the place of, and back."""

from __future__ import annotations

import heapq
from types import ModuleType

from mindspeed_mem.activation import hot_path, regions
from mindspeed_mem.activation.course import Course
from mindspeed_mem.activation.observe.observation import Observation
from mindspeed_mem.activation.position import NO_OPERATOR, Position
from mindspeed_mem.activation.rerun import arguments, dropped, module_rerun
from mindspeed_mem.activation.storage import ledger, marks, micro_batch, mover, own_tensors, records
from mindspeed_mem.device import cpu, fast_tensors, slabs

_in_python: dict[tuple[type | ModuleType, str], object] = {}


def use(module: ModuleType | None) -> None:
    """From now on it is that of ``module``; None: Python's. For engines that are made afterwards."""
    for (cls, name), method in _in_python.items():
        setattr(cls, name, method)
    _in_python.clear()
    hot_path.native = module
    if module is None:
        return
    classes = {
        "Position": Position,
        "Course": Course,
        "Observation": Observation,
        "MicroBatch": micro_batch.MicroBatch,
        "Record": records.Record,
        "Handle": records.Handle,
        "Token": ledger.Token,
        "Counter": ledger.Counter,
        "Unseen": ledger.Unseen,
        "Marks": marks.Marks,
        "Mover": mover.Mover,
        "Slab": slabs.Slab,
        "CpuBackend": cpu.CpuBackend,
        "ModuleRerun": module_rerun.ModuleRerun,
        "Made": dropped.Made,
        "Saver": dropped.Saver,
        "SavedSlot": dropped.Slot,
        "Saves": dropped.Saves,
    }
    others = {
        "DEVICE": records.DEVICE,
        "COPYING": records.COPYING,
        "HOST": records.HOST,
        "LOADED": records.LOADED,
        "KEPT": records.KEPT,
        "DROPPED": records.DROPPED,
        "REMADE": records.REMADE,
        "LEDGER": ledger.LEDGER,
        "APPLY": own_tensors.APPLY,
        "UNTIMED": mover.UNTIMED,
        "DONE": cpu.DONE,
        "NOTHING": dropped.NOTHING,
        "NO_OPERATOR": NO_OPERATOR,
        "own": own_tensors.own,
        "native": records.native,
        "told_to_stay": own_tensors.told_to_stay,
        "unpacked": own_tensors.unpacked,
        "Slot": arguments.Slot,
        "heappush": heapq.heappush,
        "heappop": heapq.heappop,
        "inline_path": regions.inline_path,
        "last_of": regions.last_of,
        "set_by_others": marks.set_by_others,
        "empty": fast_tensors.empty,
        "enough": module_rerun.Enough,
    }
    replaced = module.connect(classes, others) | {(marks, "of"): module.marks_of}
    for (cls, name), method in replaced.items():
        _in_python[cls, name] = vars(cls)[name]
        setattr(cls, name, method)


use(hot_path.EXTENSION.wanted())

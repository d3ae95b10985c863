"""Which of the engine's methods its hot path in C++ takes the place of, and back."""

from __future__ import annotations

import contextlib
import functools
import heapq
from types import ModuleType

import torch

from mindspeed_mem.activation import course, hot_path, operator_runs, regions, saved_tensors, second_runs
from mindspeed_mem.activation.observe.observation import Observation
from mindspeed_mem.activation.position import NO_OPERATOR, Position
from mindspeed_mem.activation.rerun import arguments, dropped, module_rerun, rng, second_run, settings, tape, trial
from mindspeed_mem.activation.storage import late_copies, ledger, marks, micro_batch, mover, own_tensors, records
from mindspeed_mem.activation.survive import eviction
from mindspeed_mem.device import accelerator, base, cpu, fast_tensors, slabs

_in_python: dict[tuple[type | ModuleType, str], object] = {}


def use(module: ModuleType | None) -> None:
    """From now on it is that of ``module``; None: Python's. For engines that are made afterwards."""
    for (cls, name), method in _in_python.items():
        setattr(cls, name, method)
    _in_python.clear()
    if hot_path.native is not None:
        hot_path.native.use(None)
    hot_path.native = module
    if module is None:
        return
    classes = {
        "Position": Position,
        "Course": course.Course,
        "Observation": Observation,
        "MicroBatch": micro_batch.MicroBatch,
        "Record": records.Record,
        "Handle": records.Handle,
        "Token": ledger.Token,
        "Counter": ledger.Counter,
        "Unseen": ledger.Unseen,
        "Marks": marks.Marks,
        "Mover": mover.Mover,
        "LateCopies": late_copies.LateCopies,
        "EvictingMover": eviction.EvictingMover,
        "Slab": slabs.Slab,
        "CpuBackend": cpu.CpuBackend,
        "AcceleratorBackend": accelerator.AcceleratorBackend,
        "Backend": base.Backend,
        "Stream": base.Stream,
        "NativeEvent": accelerator.NativeEvent,
        "Rerun": second_run.Rerun,
        "ModuleRerun": module_rerun.ModuleRerun,
        "MadeBy": second_run.MadeBy,
        "Made": dropped.Made,
        "Saver": dropped.Saver,
        "SavedSlot": dropped.Slot,
        "Saves": dropped.Saves,
        "TriedOperator": trial.TriedOperator,
        "Tape": tape.Tape,
        "SavedTensors": saved_tensors.SavedTensors,
        "SecondRuns": second_runs.SecondRuns,
        "OperatorRuns": operator_runs.OperatorRuns,
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
        "NO_OWNER": micro_batch.NO_OWNER,
        "PASSED_ON": micro_batch.PASSED_ON,
        "own": own_tensors.own,
        "native": records.native,
        "says_when": operator_runs.says_when,
        "told_to_stay": own_tensors.told_to_stay,
        "as_saved": own_tensors.as_saved,
        "reading": own_tensors.reading,
        "Slot": arguments.Slot,
        "heappush": heapq.heappush,
        "heappop": heapq.heappop,
        "inline_path": regions.inline_path,
        "MARKERS": regions.MARKERS,
        "UNKNOWN": course.UNKNOWN,
        "under_checkpoint": regions._under_checkpoint,
        "top_hooks": getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None),  # since torch 2.7
        "compiler": torch.compiler,
        "under_way": module_rerun.under_way,
        "TAG": regions.TAG,
        "set_by_others": marks.set_by_others,
        "empty": fast_tensors.empty,
        "second_runs": second_run,
        "nullcontext": contextlib.nullcontext,
        "OUT_AFTER_COMPUTE": mover.OUT_AFTER_COMPUTE,
        "OUT_AFTER_SLAB": mover.OUT_AFTER_SLAB,
        "RELEASE_AFTER_OUT": mover.RELEASE_AFTER_OUT,
        "IN_AFTER_COMPUTE": mover.IN_AFTER_COMPUTE,
        "COMPUTE_AFTER_IN": mover.COMPUTE_AFTER_IN,
        "RETIRE_AFTER_COPIES": mover.RETIRE_AFTER_COPIES,
        "enough": module_rerun.Enough,
        "facts_of": tape.facts_of,
        "as_it_drew": tape._as_it_drew,
        "Ref": tape.Ref,
        "Step": tape.Step,
        "Entry": dropped._Entry,
        "partial": functools.partial,
        "random": rng,
        "torch": torch,
        "autocast_kinds": module_rerun._autocast_kinds,
        "PLAIN": settings.PLAIN,
        "UNKNOWN_SETTING": settings.UNKNOWN,
        "ABSENT": settings.ABSENT,
        "settings_as_of": settings.as_of,
    }
    replaced = module.connect(classes, others)
    replaced |= {
        (marks, "of"): module.marks_of,
        (tape, "_run"): module.tape_runs,
        (rng, "host_state"): module.host_state,
        (own_tensors, "all_as_saved"): module.all_as_saved,
        (regions, "may_save"): module.may_save,
        (regions, "hooks_are_ours_alone"): module.hooks_are_ours_alone,
    }
    for (cls, name), method in replaced.items():
        _in_python[cls, name] = vars(cls)[name]
        setattr(cls, name, method)


use(hot_path.EXTENSION.wanted())

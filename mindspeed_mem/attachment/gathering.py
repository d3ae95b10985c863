"""Weights that FSDP2 (`fully_shard`) has split are gathered for second runs.

FSDP2 gathers them when a gradient reaches what their module has returned. Backward may ask before that for what an
operator in the module has made: whoever comes next has saved it.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch import nn

from mindspeed_mem.activation.storage.records import local_of

_units: dict[int, tuple[weakref.ref[nn.Module], weakref.ref[nn.Module] | None]] = {}
"""By identity, modules that were asked for, and what gathers their weights. (A dictionary of weak keys runs Python,
which dynamo compiles where it is at work.)"""


def for_second_run(module: nn.Module, model: nn.Module | None) -> None:
    """Gather what ``module`` of ``model`` reads, if it is not there. FSDP2 lets it go after the module's backward."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or model is None or all(local_of(one) is one for one in module.parameters()):
        return
    key = id(module)
    if key not in _units:
        of = _unit_of(module, model, None, fsdp.FSDPModule)
        known = weakref.ref(module, lambda _: _units.pop(key, None))
        _units[key] = known, None if of is None else weakref.ref(of)
    reference = _units[key][1]
    unit: Any = reference() if reference is not None else None
    if unit is not None:
        unit.unshard()


def _unit_of(module: nn.Module, below: nn.Module, unit: nn.Module | None, kind: type) -> nn.Module | None:
    """The innermost module of FSDP2's that has ``module`` in it, or is it."""
    if isinstance(below, kind):
        unit = below
    if below is module:
        return unit
    return next((found for one in below.children() if (found := _unit_of(module, one, unit, kind)) is not None), None)

"""Weights that FSDP2 (`fully_shard`) has split are gathered for second runs.

FSDP2 gathers them when a gradient reaches what their module has returned. Backward may ask before that for what an
operator in the module has made: whoever comes next has saved it.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch import nn

_units: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module] | None] = weakref.WeakKeyDictionary()
"""Modules that were asked for, and what gathers their weights."""


def is_split(module: nn.Module) -> bool:
    """Whether ranks have parts of its weights. (What torch compiles may ask this, without a break in its graph.)"""
    return any(hasattr(one, "_local_tensor") for one in module.parameters())


def for_second_run(module: nn.Module, model: nn.Module | None) -> None:
    """Gather what ``module`` of ``model`` reads, if it is not there. FSDP2 lets it go after the module's backward."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or model is None or not is_split(module):
        return
    if module not in _units:
        of = _unit_of(module, model, None, fsdp.FSDPModule)
        _units[module] = weakref.ref(of) if of is not None else None
    reference = _units[module]
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

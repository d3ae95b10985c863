"""Weights that FSDP2 (`fully_shard`) has split are gathered for second runs.

FSDP2 gathers them when a gradient reaches what their module has returned. Backward may ask before that for what an
operator in the module has made: whoever comes next has saved it. Nothing in compiled code asks by itself: what that
reads is gathered before it runs.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from mindspeed_mem.activation import compiled_calls
from mindspeed_mem.activation.storage.records import local_of

_units: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()
"""Modules that were asked for, and what gathers their weights."""


def for_second_run(module: nn.Module, model: nn.Module | None) -> None:
    """Gather what ``module`` of ``model`` reads, if it is not there. FSDP2 lets it go after the module's backward."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or model is None or all(local_of(one) is one for one in module.parameters()):
        return
    if module not in _units:
        of = _unit_of(module, model, None, fsdp.FSDPModule)
        units = dict.fromkeys(([] if of is None else [of]) + list(_in_compiled(module, fsdp.FSDPModule, False)))
        _units[module] = [weakref.ref(one) for one in units]
    for reference in _units[module]:
        unit: Any = reference()
        if unit is not None:
            unit.unshard()


def _in_compiled(module: nn.Module, kind: type, inside: bool) -> Iterator[nn.Module]:
    """Those of FSDP2's in it that run in compiled code, however deep."""
    inside = inside or compiled_calls.is_compiled(module)
    if inside and isinstance(module, kind):
        yield module
    for one in module.children():
        yield from _in_compiled(one, kind, inside)


def _unit_of(module: nn.Module, below: nn.Module, unit: nn.Module | None, kind: type) -> nn.Module | None:
    """The innermost module of FSDP2's that has ``module`` in it, or is it."""
    if isinstance(below, kind):
        unit = below
    if below is module:
        return unit
    return next((found for one in below.children() if (found := _unit_of(module, one, unit, kind)) is not None), None)

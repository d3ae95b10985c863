"""Weights that FSDP2 (`fully_shard`) or DeepSpeed's ZeRO-3 has split are gathered for second runs.

Both gather them when a gradient reaches what their module has returned. Backward may ask before that for what an
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
from mindspeed_mem.activation.storage.micro_batch import PASSED_ON
from mindspeed_mem.activation.storage.records import local_of

_EXTERNAL = "ds_external_parameters"
"""On a module under ZeRO-3: tells which parameters of other modules it reads."""
_ON_THEIR_WAY = "ds_inflight_param_registry"
"""On a model under ZeRO-3: parameters that are being gathered, and what to wait for."""

# ZeRO-3's hooks put an alias in the place of each tensor that a module takes or returns.
PASSED_ON.extend(("PreBackwardFunctionForModuleBackward", "PostBackwardFunctionModuleBackward"))

_units: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()
"""Modules that were asked for, and what gathers their weights."""


def for_second_run(module: nn.Module, model: nn.Module | None) -> None:
    """Gather what ``module`` of ``model`` reads, if it is not there. Who has split it lets it go after the module's
    backward."""
    if _EXTERNAL in module.__dict__ and model is not None:
        _from_zero(module, model)
        return
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


def _from_zero(module: nn.Module, model: nn.Module) -> None:
    """DeepSpeed does it in hooks around a module's call, which a second run is not; modules in it are called, and have
    theirs."""
    external = getattr(module, _EXTERNAL)()
    split: list[Any] = [
        one for one in (*module._parameters.values(), *dict(external).values()) if hasattr(one, "ds_status")
    ]
    on_their_way = [one for one in split if one.ds_status.name == "INFLIGHT"]  # it has begun to gather ahead
    if on_their_way:
        for holder in model.modules():
            registry = holder.__dict__.get(_ON_THEIR_WAY, {})
            for one in on_their_way:
                if one in registry:
                    registry.pop(one).wait()
    missing = [one for one in split if one.ds_status.name == "NOT_AVAILABLE"]
    if missing:
        missing[0].all_gather(missing)


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

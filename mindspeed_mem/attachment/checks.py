"""What `attach` is given, checked: each function adds what is wrong to a list of problems."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mindspeed_mem.activation import compiled_calls
from mindspeed_mem.attachment import blocks, compiled
from mindspeed_mem.device import Backend, DeviceError, get_backend
from mindspeed_mem.plan import MemoryConfig, MemoryConfigError, load_memory_config, resolve
from mindspeed_mem.plan.checks import given

Plan = str | os.PathLike[str] | Mapping[str, Any]
_GIB = 2**30
_SHOWN = 12  # operators in a message


def bytes_of(name: str, gib: float | None, problems: list[str]) -> int | None:
    """The bytes of a limit in GiB."""
    if gib is None or (isinstance(gib, (int, float)) and not isinstance(gib, bool) and 0 < gib < math.inf):
        return None if gib is None else int(gib * _GIB)
    problems.append(f"{name}: got {given(gib)}; allowed: a number above 0, or None")
    return None


def backend_of(model: nn.Module, problems: list[str]) -> Backend | None:
    """Of the device that a model is on."""
    devices = {one.device for one in (*model.parameters(), *model.buffers())} or {torch.device("cpu")}
    kinds = sorted({one.type for one in devices})
    if "meta" in kinds:
        problems.append("model: it is on meta; allowed: a model on its device (model.to_empty, then its weights)")
        return None
    if len(kinds) > 1:
        problems.append(f"model: it is on {' and '.join(kinds)}; allowed: one kind of device")
        return None
    try:
        usual = get_backend()
        backend = usual if usual.tensor_type == kinds[0] else get_backend(kinds[0])
    except DeviceError as error:
        problems.append(f"model: {error}")
        return None
    _check_numbers(kinds[0], {one.index for one in devices if one.index is not None}, backend.index(), problems)
    return backend


def _check_numbers(kind: str, numbers: set[int], current: int | None, problems: list[str]) -> None:
    """The model has to be on the one device of its kind that is current: there streams are made and memory counted."""
    found = " and ".join(f"{kind}:{number}" for number in sorted(numbers))
    if len(numbers) > 1:
        problems.append(
            f"model: it is on {found}; allowed: one device for each process; use FSDP2 (fully_shard) or "
            "DistributedDataParallel, a process for each device, or put the whole model on one device (Hugging Face: "
            "without device_map)"
        )
    elif current is not None and numbers and current not in numbers:
        problems.append(
            f"model: it is on {found}, and the current device is {kind}:{current}; call "
            f"torch.{kind}.set_device({min(numbers)}) before attach, each process for a device of its own"
        )


def config_of(
    plan: Plan | MemoryConfig | None, layers: Mapping[str, Sequence[nn.Module]], problems: list[str]
) -> MemoryConfig | None:
    """The plan, or None; what is wrong with it, and with it on these layers, is added to ``problems``."""
    try:
        if isinstance(plan, MemoryConfig):
            config = plan
        elif isinstance(plan, str) and plan.lower() == "auto":
            problems.append(f"plan: got {plan!r}; did you mean 'auto'?")
            return None
        elif plan is None or isinstance(plan, (str, os.PathLike, Mapping)):
            config = load_memory_config(plan)
        else:
            problems.append(f"plan: got {given(plan)}; allowed: a YAML file, or a mapping with what it contains")
            return None
    except MemoryConfigError as error:
        problems += error.problems
        return None
    members = [layer for found in layers.values() for layer in found]
    operators = {index: _operators(layer) for index, layer in enumerate(members)}
    first, stacks = 0, {}
    for name, found in layers.items():
        stacks[name] = range(first, first := first + len(found))
    try:
        resolve(config, operators, len(members), None, {name: one for name, one in stacks.items() if name})
    except MemoryConfigError as error:
        names = list(dict.fromkeys(path for paths in operators.values() for path in paths))
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        problems += [one.replace("what `python -m mindspeed_mem ops` prints", shown) for one in error.problems]
    return config


def _operators(layer: nn.Module) -> list[str]:
    if compiled_calls.is_compiled(layer):
        return [compiled.OPERATOR]
    return list(dict.fromkeys(name for path, _ in layer.named_modules() if (name := blocks.in_layer(path))))

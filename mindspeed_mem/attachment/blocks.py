"""What of a plain torch model is a layer: the members of its lists of blocks, counted on from list to list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from mindspeed_mem.activation import compiled_calls
from mindspeed_mem.plan.checks import suggestion

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_FSDP = "_fsdp_wrapped_module"
_WRAPPERS = {compiled_calls.INNER, _FSDP, "_checkpoint_wrapped_module"}


def lists_of_blocks(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The outermost lists in which several blocks are of one class, by their names; without any, the model is the one
    layer of a list without a name."""
    several = isinstance(model, (nn.ModuleList, nn.ModuleDict))  # models, that is: a list has no forward
    parts = model.named_children() if several else [("", model)]
    return {name: found for path, part in parts for name, found in _lists_in(part, path)} or {"": [_in_fsdp(model)]}


def _lists_in(module: nn.Module, path: str) -> Iterator[tuple[str, list[nn.Module]]]:
    members = _members(module) if isinstance(module, _LISTS) else []
    blocks = Counter(type(one) for one in members if any(True for _ in one.children()))
    if max(blocks.values(), default=0) > 1:
        yield plain(path), members
        return
    for name, child in module.named_children():
        yield from _lists_in(child, f"{path}.{name}" if path else name)


def named_layers(model: nn.Module, names: Sequence[str], problems: list[str]) -> dict[str, list[nn.Module]]:
    """The layers that a user names: of a list its members, any other module itself."""
    known = {plain(path): module for path, module in model.named_modules()}
    found: dict[str, list[nn.Module]] = {}
    for name in names:
        module = known.get(name)
        if module is None:
            near = suggestion(name, known)
            hint = f"did you mean {near!r}? " if near else ""
            problems.append(f"layers: got {name!r}; {hint}allowed: names of modules of this model")
        else:
            found[name] = _members(module) if isinstance(module, _LISTS) else [_in_fsdp(module)]
    above = [
        (one, other) for one in found for other in found if one != other and (not one or other.startswith(one + "."))
    ]
    problems += [f"layers: {other!r} is within {one!r}; allowed: one of the two" for one, other in above]
    return found


def outside(model: nn.Module, layers: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """The outermost modules that neither are in a layer nor hold one."""
    inside = {module for layer in layers for module in layer.modules()}
    open_ends = [model]
    while open_ends:
        module = open_ends.pop()
        if module in inside or isinstance(module, torch.jit.ScriptModule):
            continue
        holds = any(one in inside for one in module.modules())
        if holds or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            open_ends += module.children()
        else:
            yield module


def plain(path: str) -> str:
    """A module's name in the model itself, without what wrappers put in it."""
    return in_layer(path.removeprefix("module.")) if path != "module" else ""


def in_layer(path: str) -> str:
    """The same of a name in a layer."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def _members(module: nn.Module) -> list[nn.Module]:
    return [_in_fsdp(one) for one in dict.fromkeys(module.children())]


def _in_fsdp(module: nn.Module) -> nn.Module:
    """What FullyShardedDataParallel is around: its own forward gathers and frees weights, and cannot run by halves."""
    while (inner := module._modules.get(_FSDP)) is not None:
        module = inner
    return module

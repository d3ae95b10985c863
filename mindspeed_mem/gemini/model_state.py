"""A model's state dict, complete although each rank holds parts only; and loading one.

Names are those of the module that was wrapped; tied parameters are there under each of their names. Values are the fp32
masters', so that nothing is lost, and any plain model can load them strictly. Modules with code of their own (hooks,
overridden methods, extra state) make and take what they do in a plain model: see `state_code`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from mindspeed_mem.gemini import state_code
from mindspeed_mem.zero.plain.built_chunk import BuiltChunk


@torch.no_grad()
def complete(
    module: torch.nn.Module, chunks: Iterable[BuiltChunk], keep: bool, dtype: torch.dtype | None, prefix: str
) -> dict[str, Any]:
    """The state dict of `module` with all values, in host memory. Collective.

    keep: whether this rank is to hold it; if not, it takes part and returns {}, and modules' code does not run. dtype:
    what floating-point parameters are cast to; None: fp32 for those that are trained, the others as they are.
    """
    values: dict[torch.Tensor, torch.Tensor] = {}
    for one in chunks:
        found = one.full_values()
        if keep:
            casts = dtype is not None
            values |= {p: v.to(dtype) if casts and v.is_floating_point() else v for p, v in found.items()}
    if not keep:
        return {}
    if state_code.saves(module):
        return state_code.saved(module, values, prefix)
    state = module.state_dict(prefix=prefix, keep_vars=True)
    for name, value in state.items():
        if isinstance(value, torch.nn.Parameter):
            state[name] = values[value]
        elif isinstance(value, torch.Tensor):
            state[name] = value.detach().cpu().clone()
    return state


@torch.no_grad()
def load(
    module: torch.nn.Module,
    chunk_of: Mapping[torch.nn.Parameter, BuiltChunk],
    state: Mapping[str, Any],
    strict: bool,
    cast: Callable[[torch.Tensor], torch.Tensor],
) -> Any:
    """Write what `state` names, the same on all ranks, into parameters, masters and buffers.

    One name of a tied parameter is enough. Returns missing and unexpected names as torch does; raises RuntimeError with
    all of them if `strict`, and with all shapes that do not fit, before anything is written. Without communication,
    unless modules load by code of their own: then collective, and values are in host memory once more. `cast` gives
    buffers that such code makes device and dtype.
    """
    if state_code.loads(module):
        values: dict[torch.Tensor, torch.Tensor] = {}
        for one in dict.fromkeys(chunk_of.values()):
            values |= dict(one.full_values().items())
        found, new = state_code.loaded(module, values, state, strict, cast)
        for param, one in chunk_of.items():
            one.write(param, new[param])
        return found
    own = dict(_tensors(module))
    given = set(state)
    there = {id(value) for name, value in own.items() if name in given}
    missing = [name for name, value in own.items() if name not in given and id(value) not in there]
    unexpected = [name for name in state if name not in own]
    wrong = [
        f"{name} has shape {tuple(state[name].shape)} in the state dict, {tuple(value.shape)} in the model"
        if isinstance(state[name], torch.Tensor)
        else f"{name} is a tensor in the model, in the state dict a {type(state[name]).__name__}"
        for name, value in own.items()
        if name in given and getattr(state[name], "shape", None) != value.shape
    ]
    if strict:
        wrong += [f"missing: {', '.join(missing)}"] * bool(missing)
        wrong += [f"unexpected: {', '.join(unexpected)}"] * bool(unexpected)
    if wrong:
        raise RuntimeError(f"state dict of {type(module).__name__}: " + "; ".join(wrong))
    for name, value in own.items():
        if name not in given:
            continue
        if isinstance(value, torch.nn.Parameter):
            chunk_of[value].write(value, state[name])
        else:
            value.copy_(state[name])
    return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of a state dict, without running any code for it."""
    for path, owner in module.named_modules(remove_duplicate=False):
        kept = ((name, one) for name, one in owner._buffers.items() if name not in owner._non_persistent_buffers_set)
        for name, tensor in chain(owner._parameters.items(), kept):
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor

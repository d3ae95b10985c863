"""State-dict code of modules' own: hooks, overridden methods, extra state. It runs as in a plain model.

Between passes a parameter has no memory. While such code runs its memory is a copy on the host: whoever reads it finds
the value, through whatever reference, and what is loaded into it goes to the chunks from there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from mindspeed_mem.device import is_host_device

logger = logging.getLogger(__name__)

Values = Mapping[torch.Tensor, torch.Tensor]
"""Of parameters."""
_REFUSALS = ("__deepcopy__", "__reduce_ex__")
"""What parameters without memory have of their own."""


def saves(module: torch.nn.Module) -> bool:
    """Whether code of its modules' own takes part when a state dict is taken."""
    methods = ("state_dict", "_save_to_state_dict", "get_extra_state")
    return _has(module, methods, ("_state_dict_hooks", "_state_dict_pre_hooks"))


def loads(module: torch.nn.Module) -> bool:
    """Whether code of its modules' own takes part when a state dict is loaded."""
    methods = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
    return _has(module, methods, ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"))


def _has(module: torch.nn.Module, methods: Iterable[str], hooks: Iterable[str]) -> bool:
    return any(
        any(vars(one).get(name) for name in hooks) or any(_is_own(one, name) for name in methods)
        for one in module.modules()
    )


def _is_own(module: torch.nn.Module, method: str) -> bool:
    return method in vars(module) or getattr(type(module), method) is not getattr(torch.nn.Module, method)


def saved(module: torch.nn.Module, values: Values, prefix: str) -> dict[str, Any]:
    """The state dict that `module` makes if its parameters are `values`, all on the host."""
    elsewhere = [one for one in module.buffers() if not is_host_device(one.device)]
    of_place = {_place(value): value for value in values.values()}
    places, written = _places(module), []
    with _filled(values, elsewhere):
        versions = {param: param._version for param in values}
        try:
            state = module.state_dict(prefix=prefix)
        finally:
            for place in places:
                written += place.restore()
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                known = of_place.get(_place(value))  # tied ones stay one
                state[name] = value.detach().cpu().clone() if known is None else known
            elif any(_is_one_of(values, leaf) for leaf in tree_leaves(value)):
                state[name] = tree_map(lambda leaf: values[leaf] if _is_one_of(values, leaf) else leaf, value)
        written += [
            name
            for name, one in module.named_parameters()
            if _is_one_of(values, one) and (one._version != versions[one] or _place(one) != _place(values[one]))
        ]
    if written:
        logger.warning(
            "state-dict code of this model's modules wrote to %s while a state dict was taken: that is in the state "
            "dict only, the model is as before. Change parameters by load_state_dict()",
            ", ".join(dict.fromkeys(written)),
        )
    return state


def loaded(
    module: torch.nn.Module,
    values: Values,
    state: Mapping[str, Any],
    strict: bool,
    cast: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[Any, dict[torch.Tensor, torch.Tensor]]:
    """What torch's loading makes of a model whose parameters are `values`: (missing and unexpected names, new values).

    Buffers are loaded, parameters are as before. Raises RuntimeError with all that is wrong; then buffers are as
    before, too, but not what modules keep elsewhere. `cast` gives new buffers device and dtype.
    """
    places = _places(module)
    tensors = dict((*_named(module, "parameters"), *_named(module, "buffers")))
    told: list[Any] = []
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    overridden = _is_own(module, "load_state_dict")
    good, wrong, cause = False, [], None
    listening = module.register_load_state_dict_post_hook(lambda _, keys: told.append(keys))
    try:
        torch.__future__.set_swap_module_params_on_conversion(False)
        with _filled(values, list(module.buffers())):
            try:
                found = module.load_state_dict(state, strict=strict and overridden)
            except RuntimeError as error:
                found, wrong, cause = None, [str(error)], error
            result = _without_tied(found if hasattr(found, "missing_keys") else told[-1] if told else None, tensors)
            if strict and result.missing_keys:
                wrong.append(f"missing: {', '.join(result.missing_keys)}")
            if strict and result.unexpected_keys:
                wrong.append(f"unexpected: {', '.join(result.unexpected_keys)}")
            wrong += _take_replaced(places)
            new = {param: param.data for param in values}
            wrong += [
                f"{name} has got the shape {tuple(new[one].shape)}, it has {tuple(values[one].shape)} in its chunk"
                for name, one in tensors.items()
                if one in new and new[one].shape != values[one].shape
            ]
            if wrong:
                raise RuntimeError(f"state dict of {type(module).__name__}: " + "; ".join(wrong)) from cause
        good = True
    finally:
        listening.remove()
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        for place in places:
            place.restore()
            place.settle_buffers(cast if good else None)
    return result, new


def _places(module: torch.nn.Module) -> list[_Owner]:
    return [
        _Owner(path, one, dict(one._parameters), dict(one._buffers), dict(one._modules))
        for path, one in module.named_modules()
    ]


class _Owner(NamedTuple):
    """A module, and what it had before its code ran."""

    path: str
    module: torch.nn.Module
    parameters: dict[str, torch.nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]
    modules: dict[str, torch.nn.Module | None]

    def name(self, of: str) -> str:
        return f"{self.path}.{of}" if self.path else of

    def restore(self) -> list[str]:
        """Let it have the same parameters and modules again; returns the names of those that were others."""
        module = self.module
        changed = [
            self.name(name)
            for were, now in ((self.parameters, module._parameters), (self.modules, module._modules))
            for name in {**were, **now}
            if were.get(name) is not now.get(name)
        ]
        if not _same(module._parameters, self.parameters):
            for name, param in self.parameters.items():
                if param is not None:
                    setattr(module, name, param)  # recurrent modules note them elsewhere, too
            module._parameters.clear()
            module._parameters.update(self.parameters)
        if not _same(module._modules, self.modules):
            module._modules.clear()
            module._modules.update(self.modules)
        return changed

    def settle_buffers(self, cast: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        """Let those that are others now be `cast`; None: let it have the same ones again."""
        buffers = self.module._buffers
        if cast is None:
            buffers.clear()
            buffers.update(self.buffers)
            return
        for name, buffer in list(buffers.items()):
            if buffer is not None and buffer is not self.buffers.get(name):
                buffers[name] = cast(buffer.detach())


def _take_replaced(places: Iterable[_Owner]) -> list[str]:
    """Fill parameters that others have replaced in their modules; returns what is wrong with these."""
    wrong = []
    replacing: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    for place in places:
        now, were = place.module._parameters, place.parameters
        for name in {**were, **now}:
            old, new = were.get(name), dict.get(now, name)
            if old is not None and new is not None and old.shape == new.shape:
                replacing.setdefault(old, {})[place.name(name)] = new
            elif old is not new:
                shapes = ["none" if one is None else str(tuple(one.shape)) for one in (old, new)]
                wrong.append(
                    f"{place.name(name)} is made anew by its module's code (shape {shapes[0]}, then {shapes[1]}); "
                    "chunks keep the shapes that they were built with: let the model have it before it is wrapped"
                )
        if not _same(place.module._modules, place.modules):
            wrong.append(f"{place.path or 'the model'} gets other modules by its code: wrap the model after that")
    for param, news in replacing.items():
        first, *others = news.values()
        if any(one is not first for one in others):
            wrong.append(f"{', '.join(news)} are tied, and made anew apart from each other by the modules' code")
        elif first is not param:
            param.data = first.detach()
    return wrong


def _without_tied(keys: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """`keys`, but for missing names of what was loaded by another name."""
    missing, unexpected = ([], []) if keys is None else (keys.missing_keys, keys.unexpected_keys)
    there = {id(one) for name, one in tensors.items() if name not in missing}
    missing = [name for name in missing if name not in tensors or id(tensors[name]) not in there]
    return torch.nn.modules.module._IncompatibleKeys(missing, list(unexpected))


@contextlib.contextmanager
def _filled(values: Values, buffers: list[torch.Tensor]) -> Iterator[None]:
    """Inside, parameters have the memory of `values`, and `buffers` copies of theirs on the host.

    What these buffers are at the end is kept, unless there is an exception.
    """
    copies = {one: one.detach().to("cpu", copy=True) for one in buffers}
    before = {one: one.data for one in (*values, *buffers)}
    attributes = {param: {name: vars(param)[name] for name in _REFUSALS if name in vars(param)} for param in values}
    found: dict[torch.Tensor, torch.Tensor] = {}
    try:
        for one, memory in (*values.items(), *copies.items()):
            one.data = memory
        for param, names in attributes.items():
            for name in names:
                del vars(param)[name]
        yield
        found = {one: one.data for one in buffers}
    finally:
        for one, memory in before.items():
            one.data = memory
        for param, names in attributes.items():
            vars(param).update(names)
    changed = {one: new for one, new in found.items() if not _equal(new, before[one])}
    for one, new in changed.items():  # looked for before: buffers may lie in each other's memory
        if one.shape == new.shape:
            one.copy_(new)
        else:
            one.data = new.to(one.device, one.dtype)


def _named(module: torch.nn.Module, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    return getattr(module, f"named_{kind}")(remove_duplicate=False)


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether both have the same objects in the same order."""
    return list(one) == list(other) and all(a is b for a, b in zip(one.values(), other.values(), strict=True))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())


def _is_one_of(values: Values, leaf: Any) -> bool:
    return isinstance(leaf, torch.nn.Parameter) and leaf in values


def _place(tensor: torch.Tensor) -> Any:
    """Equal for tensors of one memory and form; of those without plain memory each is its own."""
    if tensor.layout is not torch.strided or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype

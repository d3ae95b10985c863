"""Which operator runs: plain-data tags on modules, set when a model is built, and names for inline operators.

A tag is ``(layer, path)``: the layer's global index, counted from 0, and the module's path inside it (the layer itself
is ``""``). Being plain data in ``module.__dict__`` it survives deepcopy and pickle and is no part of a state dict.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from mindspeed_mem.plan.operators import MARKERS

TAG = "_mindspeed_mem_operator"
STACK = "_mindspeed_mem_stack"
"""On a stack of layers: how many the model has in it, on all ranks."""
SHARED = "_mindspeed_mem_shared"
"""On a layer: paths of modules that it shares with others. Plain data, so that copies have theirs."""
WHOLE = "_mindspeed_mem_whole"
"""On a layer of which no part runs by itself: the name of the one operator in it."""

_CHECKPOINT = "torch.utils.checkpoint"
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
is_traced: Callable[[], bool] = torch._C._is_tracing
"""Whether ``torch.jit.trace`` writes down what runs."""
_hooks_enabled = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", lambda: True)
_NO_OPERATOR = {"IdentityOp", "IdentityFuncOp"}

_tagged: list[tuple[int, weakref.ref[nn.Module], tuple[int, int]]] = []
_built = 0
_tails: dict[int, int] = {}  # what follows a stack that is not a model's last: its index, and the layer's before it


def tag_layer(layer: nn.Module, index: int, place: tuple[int, int] = (0, 0), inner: Collection[str] = ()) -> set[type]:
    """Tag a transformer layer and everything below it; return the classes whose ``forward`` is to be wrapped.

    Args:
        place: the layer's pipeline stage and virtual stage.
        inner: names of a layer in it whose operators are called as if they were its own.
    """
    classes = set()
    if inner:
        untag(layer)  # a stack in it is part of it
    for path, module in layer.named_modules():
        first, _, rest = path.partition(".")
        path = rest if first in inner else path
        if type(module).__name__ in _NO_OPERATOR or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            continue
        if isinstance(module, torch.jit.ScriptModule):  # one operator, like what is compiled
            continue
        if not isinstance(type(module).forward, FunctionType):  # a cached function (rotary tables): not wrappable
            continue
        module.__dict__[TAG] = (index, path)
        classes.add(type(module))
    _tagged.append((index, weakref.ref(layer), place))
    global _built
    _built += 1
    return classes


def built() -> int:
    """How many layers were tagged so far: a plan made when there were fewer does not know all."""
    return _built


def tag_tail(module: nn.Module, index: int) -> set[type]:
    """Tag what follows the last layer and may save that layer's output (the final norm)."""
    module.__dict__[TAG] = (index, "")
    return {type(module)}


def untag(module: nn.Module) -> None:
    """Take all tags off what is in `module`."""
    inside = set(module.modules())
    for one in inside:
        one.__dict__.pop(TAG, None)
        one.__dict__.pop(WHOLE, None)
    _tagged[:] = [known for known in _tagged if known[1]() not in inside]


def models() -> list[nn.Module]:
    """The outermost modules in this process that contain stacks of layers."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module) and "_modules" in one.__dict__]
    holders = {inner: outer for outer in modules for inner in outer._modules.values() if inner is not None}
    found: dict[nn.Module, None] = {}
    for module in modules:
        if STACK in module.__dict__:
            while module in holders:
                module = holders[module]
            found[module] = None
    return list(found)


def stacks_in(models: Iterable[nn.Module]) -> dict[str, int]:
    """How many layers each stack of a model's parts has, by its path, in the model's order."""
    return {path: stack.__dict__[STACK] for path, stack in _stacks(models)}


def count_on(models: Iterable[nn.Module], first: Mapping[str, int], total: int) -> None:
    """Give the layers of several stacks of one model numbers that differ.

    ``first``: the number of each stack's first layer, by its path. ``total``: how many layers there are.
    """
    for path, stack in _stacks(models):
        layers = [layer for layer in layers_of(stack) if TAG in layer.__dict__]
        tail = [m for m in stack.children() if TAG in m.__dict__]
        for layer in layers:
            _renumber(layer, first[path] + layer.layer_number - 1)
        for module in tail if layers else ():
            last = layers[-1].__dict__[TAG][0]
            index = last + 1 if last + 1 == total else total + 1 + list(first).index(path)
            module.__dict__[TAG] = (index, "")
            _tails[index] = last


def _stacks(models: Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    inside: set[nn.Module] = set()
    for model in models:
        for path, module in model.named_modules():
            if STACK in module.__dict__ and module not in inside:  # one in a layer belongs to that
                found.append((path.removeprefix("module.").removeprefix("module."), module))
                inside.update(module.modules())
    return found


def _renumber(layer: nn.Module, index: int) -> None:
    for module in layer.modules():
        if TAG in module.__dict__:
            module.__dict__[TAG] = (index, module.__dict__[TAG][1])
    _tagged[:] = [(index, ref, place) if ref() is layer else (old, ref, place) for old, ref, place in _tagged]


def after(layers: set[int]) -> set[int]:
    """What may save these layers' outputs: the next layers, and what follows stacks."""
    return {layer + 1 for layer in layers} | {index for index, last in _tails.items() if last in layers}


def tagged_layers() -> dict[int, set[str]]:
    """The operator paths of each layer that is alive in this process, by global index."""
    found: dict[int, set[str]] = {}
    _tagged[:] = [one for one in _tagged if one[1]() is not None]
    for index, layer in alive():
        whole = layer.__dict__.get(WHOLE)
        paths = {m.__dict__[TAG][1] for m in layer.modules() if TAG in m.__dict__} if whole is None else {whole}
        found.setdefault(index, set()).update(paths - {""})
    return found


def alive() -> list[tuple[int, nn.Module]]:
    """The layers of this process, with their global indices."""
    return [(index, layer) for index, ref, _ in _tagged if (layer := ref()) is not None]


def places() -> dict[int, tuple[int, int]]:
    """The pipeline stage and virtual stage of each layer that is alive in this process."""
    return {index: place for index, ref, place in _tagged if ref() is not None}


def layer_classes() -> dict[int, str]:
    """A label per live layer: layers of one class and one set of operators share it."""
    return {index: f"{type(layer).__name__}[{type(getattr(layer, 'mlp', layer)).__name__}]" for index, layer in alive()}


@functools.cache
def inline_path(parent: str, name: str) -> str:
    """The operator that an inline marker ``name`` inside ``parent`` stands for."""
    name = MARKERS.get(name, name)
    return f"{parent}.{name}" if parent else name


@functools.cache
def last_of(path: str) -> str:
    """An operator's name, without what contains it."""
    return path.rpartition(".")[2]


def layers_of(stack: nn.Module) -> Iterable[Any]:
    """The layers of a stack on this rank, as Megatron calls them."""
    return stack.layers  # type: ignore[return-value]  # a ModuleList, which nn.Module does not know of


def may_save() -> bool:
    """Whether a forward that starts now keeps activations for a later backward.

    Not without grad; not inside backward, where a recompute's activations are needed at once; not under a
    non-reentrant checkpoint, whose own hooks must stay innermost or it silently keeps everything; not under a
    transform of torch.func, whose tensors have no storages and which lets nobody have hooks; not while
    ``torch.jit.trace`` writes down what runs, as what second runs need would be part of the program.
    """
    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
        return False
    return not in_transform() and not is_traced() and not _under_checkpoint()


def hooks_are_ours_alone() -> bool:
    """Whether nobody's saved-tensor hooks are in force, and ours may be; False where torch cannot tell (before 2.7)."""
    return _top_hooks is not None and _top_hooks(False) is None and hooks_may_be()


def hooks_may_be() -> bool:
    """Whether nobody has disabled saved-tensor hooks here."""
    return _hooks_enabled()


def _under_checkpoint() -> bool:
    if _top_hooks is not None:
        hooks = _top_hooks(False)
        return hooks is not None and getattr(hooks[0], "__module__", "") == _CHECKPOINT
    frame: FrameType | None = sys._getframe(1)  # before torch 2.7 nobody tells whose hooks are in force: who calls?
    while frame is not None:
        if frame.f_globals.get("__name__") == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False

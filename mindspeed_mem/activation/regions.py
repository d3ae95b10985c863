"""Which operator runs: plain-data tags on modules, set when a model is built, and names for inline operators.

A tag is ``(layer, path)``: the layer's global index, counted from 0, and the module's path inside it (the layer itself
is ``""``). Being plain data in ``module.__dict__`` it survives deepcopy and pickle and is no part of a state dict.
"""

from __future__ import annotations

import sys
import weakref
from types import FunctionType

import torch
from torch import nn

TAG = "_mindspeed_mem_operator"

# Inline code that Megatron marks by name, and what that operator is called here (where the name differs).
_INLINE = {"activation": "activation_func"}
_CHECKPOINT = "torch.utils.checkpoint"
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_NO_OPERATOR = {"IdentityOp", "IdentityFuncOp"}

_tagged: list[tuple[int, weakref.ref[nn.Module], tuple[int, int]]] = []
_built = 0


def tag_layer(layer: nn.Module, index: int, place: tuple[int, int] = (0, 0)) -> set[type]:
    """Tag a transformer layer and everything below it; return the classes whose ``forward`` is to be wrapped.

    ``place``: the layer's pipeline stage and virtual stage.
    """
    classes = set()
    for path, module in layer.named_modules():
        if type(module).__name__ in _NO_OPERATOR or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
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


def tagged_layers() -> dict[int, set[str]]:
    """The operator paths of each layer that is alive in this process, by global index."""
    found: dict[int, set[str]] = {}
    alive = []
    for index, ref, place in _tagged:
        layer = ref()
        if layer is None:
            continue
        alive.append((index, ref, place))
        paths = {m.__dict__[TAG][1] for m in layer.modules() if TAG in m.__dict__}
        found.setdefault(index, set()).update(paths - {""})
    _tagged[:] = alive
    return found


def places() -> dict[int, tuple[int, int]]:
    """The pipeline stage and virtual stage of each layer that is alive in this process."""
    return {index: place for index, ref, place in _tagged if ref() is not None}


def layer_classes() -> dict[int, str]:
    """A label per live layer: layers of one class and one set of operators share it."""
    labels = {}
    for index, ref, _ in _tagged:
        layer = ref()
        if layer is not None:
            labels[index] = f"{type(layer).__name__}[{type(getattr(layer, 'mlp', layer)).__name__}]"
    return labels


def inline_path(parent: str, name: str) -> str:
    """The operator that an inline marker ``name`` inside ``parent`` stands for."""
    name = _INLINE.get(name, name)
    return f"{parent}.{name}" if parent else name


def may_save() -> bool:
    """Whether a forward that starts now keeps activations for a later backward.

    Not without grad; not inside backward, where a recompute's activations are needed at once; not under a
    non-reentrant checkpoint, whose own hooks must stay innermost or it silently keeps everything.
    """
    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
        return False
    return not _under_checkpoint()


def _under_checkpoint() -> bool:
    if _top_hooks is not None:
        hooks = _top_hooks(False)
        return hooks is not None and getattr(hooks[0], "__module__", "") == _CHECKPOINT
    frame = sys._getframe(1)  # before torch 2.7 nobody tells whose hooks are in force: look who is calling
    while frame is not None:
        if frame.f_globals.get("__name__") == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False

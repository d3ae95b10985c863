"""A stack of layers has been built: its operators get their tags, and what they run is wrapped.

What is wrapped is the ``forward`` of each class found below a layer, once per class; instances without a tag go
straight through.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain

import torch
from torch import nn

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation import regions
from mindspeed_mem.activation.rerun.arguments import attributes_of
from mindspeed_mem.activation.storage import marks
from mindspeed_mem.activation.storage.records import local_of
from mindspeed_mem.activation.wrappers import region_forward
from mindspeed_mem.patching import REGISTRY


def tag_stack(
    stack: nn.Module,
    tail: nn.Module | None,
    num_layers: int,
    place: tuple[int, int],
    patch: str,
    inner: Collection[str] = (),
) -> None:
    """Tag the layers of a stack and its tail, what follows the last layer.

    Args:
        stack: its ``layers`` are this rank's; each has its global number, counted from 1, as ``layer_number``.
        tail: None if that is on another rank.
        num_layers: of the whole model.
        place: the pipeline stage and virtual stage of these layers.
        patch: the patch module that asks for it, and takes the wrappers off when it is undone.
        inner: of a layer around another one the names of that: operators are called as elsewhere.
    """
    classes, last = set(), None
    stack.__dict__[regions.STACK] = num_layers
    for layer in regions.layers_of(stack):
        if hasattr(layer, "layer_number"):
            last = layer.layer_number
            classes |= regions.tag_layer(layer, last - 1, place, inner)
    if tail is not None and last is not None:
        classes |= regions.tag_tail(tail, last)
    for cls in classes:
        REGISTRY.apply_method(cls, "forward", region_forward, patch)
    engine = engines.current()
    if engine is not None:
        engine.in_force.num_layers = max(engine.in_force.num_layers, num_layers)


def mark_static(models: Iterable[nn.Module]) -> None:
    """What these models hold before they run is never moved, whatever view of it is saved: parameters, buffers, and
    tables that modules, and objects that these hold, have as attributes."""
    for model in models:
        # Megatron's data parallel wrapper has a list called buffers
        for tensor in chain(nn.Module.parameters(model), nn.Module.buffers(model), _tables(model)):
            tensor = local_of(tensor)
            if tensor.layout is torch.strided:
                marks.of(tensor.untyped_storage()).static = True


def _tables(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        for value in list(vars(module).values()):
            held = None if isinstance(value, (nn.Module, type)) else attributes_of(value)
            for one in (value, *(held or {}).values()):
                if type(one) is torch.Tensor and _is_leaf(one):
                    yield one


def _is_leaf(tensor: torch.Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # so torch does for a view of weights that FullyShardedDataParallel has gathered and freed
        return False

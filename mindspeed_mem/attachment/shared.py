"""Modules that several layers share: each time they are operators of the layer that runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from mindspeed_mem.activation import regions


def note(layers: Sequence[nn.Module], operator: Callable[[str], str]) -> list[str]:
    """Write down on the layers what they share, and return what to say.

    Args:
        layers: in their order, tagged.
        operator: makes a module's path in a layer an operator's.
    """
    places: dict[nn.Module, dict[int, str]] = {}
    for index, layer in enumerate(layers):
        for path, module in layer.named_modules():
            if path and regions.TAG in module.__dict__:
                places.setdefault(module, {})[index] = path
    told = []
    for module, of in places.items():
        if len(of) > 1 and len({operator(path) for path in of.values()}) > 1:
            index, name = module.__dict__[regions.TAG]
            told.append(
                f"layers {_listed(of)} share a {type(module).__name__} under different names: in all of them it counts "
                f"as operator {name} of layer {index}; give it one name in all layers, and the plan reaches it in each"
            )
        elif len(of) > 1:
            for index, path in of.items():
                layers[index].__dict__.setdefault(regions.SHARED, []).append(path)
    return told


def _listed(of: Mapping[int, Any]) -> str:
    return ", ".join(map(str, of))


def layer_forward(original: Callable) -> Callable:
    """Around a layer's own forward: what it shares is the layer's meanwhile."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tag, before = module.__dict__.get(regions.TAG), []
        if tag is not None:
            for path in module.__dict__.get(regions.SHARED, ()):
                try:
                    one = module.get_submodule(path)
                except AttributeError:  # somebody has taken it out
                    continue
                earlier = one.__dict__.get(regions.TAG)
                if earlier is not None and earlier[0] != tag[0]:
                    before.append((one, earlier))
                    one.__dict__[regions.TAG] = (tag[0], earlier[1])
        try:
            return original(module, *args, **kwargs)
        finally:
            for one, earlier in before:
                one.__dict__[regions.TAG] = earlier

    return forward

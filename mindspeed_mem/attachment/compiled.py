"""Modules of a model that torch compiles, in place (`module.compile()`) or by a wrapper (`torch.compile(module)`).

Each is one operator, or a layer as a whole, whatever is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from mindspeed_mem.activation import regions
from mindspeed_mem.activation.compiled_calls import call_of, is_compiled
from mindspeed_mem.activation.wrappers import region_forward

OPERATOR = "compiled"
"""What a plan calls a compiled layer, as the one operator in it."""
AS_ONE = (
    "the plan has no effect: the model, or a part of it with all layers, is compiled as a whole, and runs as it is; "
    "compile the layers instead, or parts of them"
)


def inside(model: nn.Module) -> set[nn.Module]:
    """What is in a module that is compiled in place: nothing there runs by itself."""
    return {inner for module in model.modules() if call_of(module) is not None for inner in _below(module)}


def are_one(model: nn.Module, layers: Sequence[nn.Module]) -> bool:
    """Whether all layers are compiled together, with a module that holds them."""
    return any(is_compiled(module) and _below(module).issuperset(layers) for module in model.modules())


def as_operator(layer: nn.Module, index: int) -> Callable[[Callable], Callable]:
    """What goes around the calls of a compiled layer, which have to be an operator for a plan to name: `OPERATOR`."""
    layer.__dict__[regions.WHOLE] = OPERATOR
    whole = nn.Module()
    whole.__dict__[regions.TAG] = index, OPERATOR
    whole._modules["layer"] = layer  # what runs again is looked at with all modules in it

    def around(original: Callable) -> Callable:
        run = region_forward.make(lambda _, *args, **kwargs: original(layer, *args, **kwargs))

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is not layer:  # a copy
                return original(module, *args, **kwargs)
            return run(whole, *args, **kwargs)

        return forward

    return around


def _below(module: nn.Module) -> set[nn.Module]:
    return set(module.modules()) - {module}

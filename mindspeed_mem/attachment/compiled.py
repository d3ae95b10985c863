"""Modules of a model that torch compiles, in place (`module.compile()`) or by a wrapper (`torch.compile(module)`).

Each is one operator, or a layer as a whole, whatever is in it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation import regions
from mindspeed_mem.activation.wrappers import region_forward

INNER = "_orig_mod"
"""By which name a wrapper has its module."""
_CALL = "_compiled_call_impl"
"""What the calls of a module are that is compiled in place."""
_OWN = "_mindspeed_mem_compiled"
"""On ours around it: that."""
OPERATOR = "compiled"
"""What a plan calls a compiled layer, as the one operator in it."""
AS_ONE = (
    "the plan has no effect: the model, or a part of it with all layers, is compiled as a whole, and runs as it is; "
    "compile the layers instead, or parts of them"
)


def call_of(module: nn.Module) -> Callable | None:
    """What its calls are compiled to; None: nothing, a wrapper does that, or nobody calls it (a list of modules)."""
    is_called = "forward" in module.__dict__ or type(module).forward is not nn.Module.forward
    call = module.__dict__.get(_CALL) if is_called else None
    return getattr(call, _OWN, call)


def go_around(module: nn.Module, around: Callable[[Callable], Callable], call: Callable) -> None:
    """Put ``around`` on the compiled calls of a module, or on what was put on them before. ``call``: these, by its
    module. (Its forward stays: of its own modules torch compiles some nowhere, and would compile ours in their place.)
    """
    before = module.__dict__[_CALL]
    ours = around(before.__func__ if hasattr(before, _OWN) else call)
    ours.__dict__[_OWN] = call_of(module)
    module.__dict__[_CALL] = types.MethodType(ours, module)


def finding_room(call: Callable) -> Callable:
    """Around the compiled calls of modules: while memory is tight, room is made before they begin."""
    compiling = torch.compiler.is_compiling

    def calls(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        engine = engines.in_use
        if engine is None or compiling():
            return call(module, *args, **kwargs)
        inner = module._modules.get(INNER)
        of = module if inner is None else inner
        return engine.run_compiled(of, functools.partial(call, module), args, kwargs)

    return calls


def take_off(module: nn.Module) -> None:
    call = call_of(module)
    if call is not None:
        module.__dict__[_CALL] = call


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


def is_compiled(module: nn.Module) -> bool:
    """In place, or it is the wrapper."""
    return INNER in module._modules or call_of(module) is not None


def _below(module: nn.Module) -> set[nn.Module]:
    return set(module.modules()) - {module}

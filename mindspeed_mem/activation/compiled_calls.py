"""The calls of modules that torch compiles, in place (`module.compile()`), by a wrapper (`torch.compile(module)`) or as
their forward (`module.forward = torch.compile(module.forward)`): what stands around these."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mindspeed_mem.activation import engine as engines

INNER = "_orig_mod"
"""By which name a wrapper has its module."""
_CALL = "_compiled_call_impl"
"""What the calls of a module are that is compiled in place."""
_OWN = "_mindspeed_mem_compiled"
"""On ours around it: that."""
_COMPILED = "_torchdynamo_orig_callable"
"""On a function that torch has compiled."""


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


def find_room(model: nn.Module) -> None:
    """Have all of a model's compiled calls find room made before them while memory is tight, whatever they are of."""
    compiled = [module for module in model.modules() if is_compiled(module) or _is_its_forward(module)]
    traced = {inner for module in compiled for inner in module.modules() if inner is not module}
    for module in compiled:
        if module in traced:  # it does not run by itself
            continue
        if (call := call_of(module)) is not None:
            if not hasattr(module.__dict__[_CALL], _OWN):
                go_around(module, lambda ours: ours, finding_room(_without_self(call)))
        elif (forward := module.__dict__.get("forward")) is not None and not hasattr(forward, _OWN):
            ours = functools.partial(finding_room(_without_self(forward)), module)
            ours.__dict__[_OWN] = forward
            module.__dict__["forward"] = ours


def is_compiled(module: nn.Module) -> bool:
    """In place, or it is the wrapper."""
    return INNER in module._modules or call_of(module) is not None


def _is_its_forward(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return hasattr(getattr(forward, _OWN, forward), _COMPILED)


def _without_self(call: Callable) -> Callable:
    return lambda _, *args, **kwargs: call(*args, **kwargs)

"""Custom autograd functions as operators of their own."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_mem.activation import engine as engines


def adapt_mem_func_wrapper(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)``, with what it saves in the memory plan like any operator's activations.

    Inside a layer it is an operator named after the function's class, below the module that runs (such as
    ``mlp.MyFunction``): reports and the peak count it by that name, and what is selected above it covers it. Outside of
    layers, or without an engine, it is just ``function.apply(*args)``. Tensors that ``forward`` hands to
    ``ctx.save_for_backward`` can be moved and made again; what it keeps as attributes of ``ctx`` stays where it is.
    Gradients flow to every tensor among the arguments, whatever becomes of the activations.

    Args:
        function: a subclass of torch.autograd.Function.
        args: what its ``forward`` takes after ``ctx``.

    Returns:
        what ``function.apply`` does.
    """
    engine = engines.current()
    if engine is None or torch.compiler.is_compiling():
        return function.apply(*args)
    return engine.operators.run_inline(function.__name__, function.apply, args, {})

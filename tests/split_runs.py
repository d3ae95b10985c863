"""Training steps under --split-backward, with how many gradients of weights were put off.

Import this where the CPU patches are applied: in functions that `tests.worlds.on_ranks` runs.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from mindspeed_mem.schedule.weight_gradients import WEIGHT_GRADIENTS
from tests.worlds import applied, parallel


@contextlib.contextmanager
def split() -> Iterator[None]:
    """The patch is applied."""
    with applied("pipeline_split", "pipeline_delayed") as [module, _]:
        import sys

        sys.modules[module]._say_idle.cache_clear()
        yield


def departures(kind: str, layout: dict[str, Any], model: dict[str, Any], plan: Any = None, **more: Any) -> list[str]:
    """What differs in any bit between Megatron's backward and the one that is split, and if nothing was put off.
    ``plan``: of the engine that is on beside it; ``more``: of `tests.capped_runs.trained`."""
    from tests.capped_runs import trained
    from tests.swap_runs import difference, left_over, swap

    micro_batches = more.pop("micro_batches", 4)
    with parallel(**layout):
        plain, _ = trained(kind, model, micro_batches, **more)
        with split(), contextlib.nullcontext() if plan is None else swap(plan) as engine:
            before = WEIGHT_GRADIENTS.count
            ours, _ = trained(kind, model, micro_batches, **more)
            put_off = WEIGHT_GRADIENTS.count - before
            moved = None if engine is None else engine.report().bytes_out
            left = {} if engine is None else left_over(engine)
    found = [
        f"call {number}: {what}"
        for number, pair in enumerate(zip(ours, plain, strict=True))
        for what in difference(*pair)
    ]
    found += [] if put_off else ["nothing was put off"]
    found += ["nothing was moved"] if plan and plan["swap_config"].get("output_gradients") and not moved else []
    return found + ([f"left over {left}"] if any(left.values()) else [])


@contextlib.contextmanager
def gone_through_twice(unwanted: bool = False) -> Iterator[None]:
    """Each backward runs two backwards through the graph of a model's layers, the first of which keeps it.
    ``unwanted``: the first is asked for the gradient of what they were given only."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, leaf, graph, given):
            ctx.graph, ctx.given = graph, given
            return leaf.clone()

        @staticmethod
        def backward(ctx, gradient):
            if unwanted:
                torch.autograd.grad(ctx.graph, ctx.given, [gradient], retain_graph=True)
            else:
                torch.autograd.backward(ctx.graph, [gradient], retain_graph=True)
            torch.autograd.backward(ctx.graph, [gradient])
            return None, None, None

    def on_output(module, args, kwargs, output):
        if isinstance(module, TransformerBlock) and torch.is_grad_enabled():
            given = args[0] if args else kwargs["hidden_states"]
            return Twice.apply(output.detach().requires_grad_(), [output], [given])
        return None

    hook = torch.nn.modules.module.register_module_forward_hook(on_output, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def alive(shape: tuple[int, ...]) -> int:
    """How many tensors of this shape there are."""
    gc.collect()
    return sum(isinstance(one, torch.Tensor) and one.shape == shape for one in gc.get_objects())

"""adapt_mem_func_wrapper: a custom function's activations follow the plan, and gradients reach all its tensors."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from tests.swap_runs import again, entry, op
from tests.worlds import on_ranks

PLANS = {
    "kept": entry(op_swap=[op(r"self_attention", 2)]),
    "swapped": entry(op_swap=[op("mlp", 1)]),
    "recomputed": again(["mlp"]),
    "layers recomputed, inputs swapped": again(
        swap_config={"swap": True, "op_swap": [], "swap_recompute_inputs": True}, recompute=True
    ),
}


class ScaledSquare(torch.autograd.Function):
    """x squared times a vector, plus a number."""

    @staticmethod
    def forward(ctx, x, scale, number):
        ctx.save_for_backward(x, scale)
        return x * x * scale + number

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return 2 * x * scale * gradient, (x * x * gradient).flatten(0, -2).sum(0), None


def trained(plan: dict[str, Any] | None) -> tuple[Any, list[torch.Tensor], list[str]]:
    from mindspeed_mem.megatron_adaptor import adapt_mem_func_wrapper
    from tests import models, swap_runs
    from tests.worlds import parallel

    apply = (lambda function, *args: function.apply(*args)) if plan is None else adapt_mem_func_wrapper
    with parallel(), swap_runs.swap(plan) if plan is not None else contextlib.nullcontext() as engine:
        chunks = models.build_gpt("dense")
        scales = [torch.full((256,), 0.5, requires_grad=True) for _ in range(4)]
        for scale, layer in zip(scales, chunks[0].module.decoder.layers, strict=True):
            layer.mlp.activation_func = lambda x, scale=scale: apply(ScaledSquare, x, scale, 1)
        result = models.train_step(chunks, micro_batches=2)
        moved = [] if engine is None else [row["op"] for row in engine.report()["moved_by_operator"]]
    return result, [scale.grad for scale in scales], moved


def compared(plan: dict[str, Any]) -> tuple[list[str], bool, list[str]]:
    from tests.swap_runs import difference

    (without, scales, _), (result, others, moved) = trained(None), trained(plan)
    return difference(result, without), all(map(torch.equal, scales, others)), moved


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_flow_in_every_disposition(plan):
    [(found, same, moved)] = on_ranks(1, compared, PLANS[plan])
    assert found == [] and same
    assert any("ScaledSquare" in path for path in moved) == (plan == "swapped"), moved


def test_without_an_engine_it_is_apply():
    from mindspeed_mem.megatron_adaptor import adapt_mem_func_wrapper

    x = torch.rand(3, 4, requires_grad=True)
    scale = torch.rand(4, requires_grad=True)
    adapt_mem_func_wrapper(ScaledSquare, x, scale, 2).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach() * scale.detach()) and scale.grad is not None

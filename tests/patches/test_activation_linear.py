"""Fused weight-gradient accumulation keeps working under the engine's saved-tensor hooks."""

from __future__ import annotations

import contextlib
import functools

import pytest

from tests.worlds import on_ranks, parallel


def fused(overlap: bool) -> tuple[list[str], int]:
    from tests.models import build_gpt, train_step
    from tests.swap_runs import EVERYTHING, SDPA, difference, patched, swap

    def run():
        with parallel():
            chunks = build_gpt("dense", gradient_accumulation_fusion=True, ddp={"overlap_grad_reduce": overlap})
            return train_step(chunks)

    with patched(SDPA):
        without = run()
        with swap(EVERYTHING) as engine:
            return difference(run(), without), engine.report()["bytes_out"]


@pytest.mark.distributed
@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_accumulate_into_main_grad(overlap):
    """With overlap, a weight whose gradient the hook lost would keep its bucket from ever being reduced."""
    for differences, moved in on_ranks(2, fused, overlap, timeout=60):
        assert differences == []
        assert moved > 0


def foreign(overlap: bool) -> list[bool]:
    """A layer that adds to ``main_grad`` by itself and asks the weight that it saved for the flag, as
    TransformerEngine's."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tests.swap_runs import SWAP, patched

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            ctx.main_grad = weight.main_grad
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            ctx.main_grad.add_(grad.t() @ x)
            if not hasattr(weight, "grad_added_to_main_grad"):
                return grad @ weight, None
            weight.grad_added_to_main_grad = True
            return grad @ weight, torch.empty_like(weight)

    def run(hooks):
        torch.manual_seed(0)
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
        config.gradient_accumulation_fusion = True
        layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(2))
        model = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=overlap), layers)
        model.zero_grad_buffer()
        for sync in (model.no_sync, contextlib.nullcontext):
            with sync(), hooks():
                x = torch.randn(4, 8)
                for layer in layers:
                    x = Product.apply(x, layer.weight)
                x.sum().backward()
        model.finish_grad_sync()
        return [layer.weight.main_grad.clone() for layer in layers]

    identity = functools.partial(torch.autograd.graph.saved_tensors_hooks, lambda kept: kept, lambda kept: kept)
    with parallel(), patched(SWAP):
        return [*map(torch.equal, run(identity), run(contextlib.nullcontext))]


@pytest.mark.distributed
@pytest.mark.parametrize("overlap", [False, True])
def test_layers_that_accumulate_by_themselves_need_no_flag_on_what_they_saved(overlap):
    for same in on_ranks(2, foreign, overlap, timeout=60):
        assert same == [True, True]

"""With gradients of weights put off, losses and every gradient are bit-identical to Megatron's own backward."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worlds import on_ranks

sweep = pytest.mark.sweep
pytestmark = pytest.mark.distributed

OVERLAPPED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 20_000,
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def differing(cases: dict[str, tuple], bf16: bool = False) -> dict[str, list[str]]:
    """By name, what is wrong with a case: (kind, layout, model, more of `tests.split_runs.departures`)."""
    import torch

    from tests.split_runs import departures
    from tests.worlds import applied

    found = {}
    for name, (kind, layout, model, *more) in cases.items():
        with applied("sdpa_attention"):
            sizes = {"layers": 2 * layout.get("pp", 1), "dtype": torch.bfloat16 if bf16 else torch.float32}
            what = departures(kind, layout, {**sizes, **model}, **dict(*more))
        found |= {name: what} if what else {}
    return found


KINDS: dict[str, tuple] = {
    "tied": ("dense", {}, {}),
    "untied": ("swiglu_gqa_rope", {}, {"tied": False}),
    "bias": ("swiglu_gqa_rope", {}, {"add_qkv_bias": True}),
    "latent attention": ("mla", {}, {}),
    "experts": ("moe", {}, {}),
    "dropout": ("dropout", {}, {}, {"evaluate": True}),
    "fused": ("dense", {}, {"gradient_accumulation_fusion": True}),
    "fused, untied, recomputed": ("dropout", {}, {"gradient_accumulation_fusion": True, "tied": False, **FULL}),
    "recomputed": ("dropout", {}, FULL),
    "attention recomputed": ("swiglu_gqa_rope", {}, {"recompute_granularity": "selective"}),
    "several tokens": ("swiglu_gqa_rope", {}, {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.1, "tied": False}),
    "several tokens, tied": ("swiglu_gqa_rope", {}, {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.1}),
    "one micro-batch": ("dense", {}, {}, {"micro_batches": 1}),
}


@pytest.mark.parametrize("bf16", [pytest.param(False, marks=sweep), True], ids=["fp32", "bf16"])
def test_every_kind_of_model(bf16):
    assert on_ranks(1, differing, KINDS, bf16) == [{}]


LAYOUTS: dict[str, tuple] = {
    "tensor parallel": ("swiglu_gqa_rope", {"tp": 2}, {}),
    "sequence parallel": ("dropout", {"tp": 2}, {"sequence_parallel": True}),
    "sequence parallel, fused, untied": (
        "dense",
        {"tp": 2},
        {"sequence_parallel": True, "gradient_accumulation_fusion": True, "tied": False},
    ),
    "data parallel": ("dense", {}, {"ddp": {"overlap_grad_reduce": True, "bucket_size": 20_000}}),
    "data parallel, sharded": ("moe", {}, {"ddp": OVERLAPPED}),
    "data parallel, fused": ("dense", {}, {"ddp": OVERLAPPED, "gradient_accumulation_fusion": True}),
    "expert parallel": ("moe", {"ep": 2}, {}),
    "pipeline": ("dropout", {"pp": 2}, {}, {"evaluate": True}),
    "pipeline, virtual stages": ("dense", {"pp": 2, "vpp": 2}, {}),
}


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=sweep)], ids=["fp32", "bf16"])
def test_every_layout(bf16):
    assert on_ranks(2, differing, LAYOUTS, bf16) == [{}, {}]


def plans() -> dict[str, Any]:
    from tests.swap_runs import EVERYTHING, again, entry

    return {
        "swap": EVERYTHING,
        "swap, both": entry(layer_swap={"backward_prefetch": 3, "layers": True}, activations="both"),
        "recompute": again({"mlp": True, r"self_attention\.linear_.*": True}),
        "layers": again(recompute=True),
        "output gradients": entry(op_swap=[], output_gradients=True),
        "all of it": entry(layer_swap={"backward_prefetch": 3, "layers": True}, output_gradients=True),
    }


def beside_plans(layout: dict[str, Any]) -> dict[str, list[str]]:
    return differing({name: ("swiglu_gqa_rope", layout, {}, {"plan": plan}) for name, plan in plans().items()})


def test_beside_swap_and_recompute():
    assert on_ranks(1, beside_plans, {}) == [{}]


def twice_through_the_graph() -> dict[str, list[str]]:
    """Each backward runs two backwards through the graph of all layers, the first of which keeps it."""
    import torch
    from megatron.core.transformer.transformer_block import TransformerBlock

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, leaf, graph):
            ctx.graph = graph
            return leaf.clone()

        @staticmethod
        def backward(ctx, gradient):
            torch.autograd.backward(ctx.graph, [gradient], retain_graph=True)
            torch.autograd.backward(ctx.graph, [gradient])
            return None, None

    def on_output(module, _, output):
        if isinstance(module, TransformerBlock) and torch.is_grad_enabled():
            return Twice.apply(output.detach().requires_grad_(), [output])
        return None

    hook = torch.nn.modules.module.register_module_forward_hook(on_output)
    try:
        return beside_plans({})
    finally:
        hook.remove()


def test_a_graph_that_is_kept_for_a_second_backward():
    assert on_ranks(1, twice_through_the_graph) == [{}]


def is_let_go_of() -> bool:
    import gc
    import weakref

    from tests.models import build_gpt, forget_routing, train_step
    from tests.split_runs import split
    from tests.worlds import parallel

    with parallel(), split():
        chunks = build_gpt("dense", layers=2)
        train_step(chunks)
        model = weakref.ref(chunks[0])
        forget_routing(chunks)
        del chunks
        gc.collect()
        return model() is None


def test_a_model_that_nobody_has_any_more_is_let_go_of():
    assert on_ranks(1, is_let_go_of) == [True]

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
    from tests.split_runs import gone_through_twice

    with gone_through_twice():
        return beside_plans({})


def test_a_graph_that_is_kept_for_a_second_backward():
    assert on_ranks(1, twice_through_the_graph) == [{}]


def by_a_function_of_ones_own(asks: str) -> dict[str, Any]:
    """Gradients where a function's backward asks for those of an MLP: "inputs", "all" of them, or by "backward"."""
    import torch

    from tests.models import build_gpt, train_step

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, run, *parameters):
            with torch.enable_grad():
                ctx.x = x.detach().requires_grad_()
                ctx.output = run(ctx.x)
            ctx.parameters = parameters
            return ctx.output.detach()

        @staticmethod
        def backward(ctx, gradient):
            none = [None] * len(ctx.parameters)
            if asks == "backward":
                torch.autograd.backward(ctx.output, gradient, inputs=[ctx.x])
                return ctx.x.grad, None, *none
            wanted = ctx.parameters if asks == "all" else ()
            found, *theirs = torch.autograd.grad(ctx.output, [ctx.x, *wanted], gradient, allow_unused=True)
            return found, None, *([None if one is None else one / 2 for one in theirs] or none)

    chunks = build_gpt("dense", layers=2)
    mlp = chunks[0].module.decoder.layers[1].mlp
    native, parameters = mlp.forward, list(mlp.parameters())
    mlp.forward = lambda x, **more: (Asks.apply(x, lambda x: native(x, **more)[0], *parameters), None)
    return train_step(chunks, micro_batches=2).grads


def of_t5(tied: bool) -> dict[str, Any]:
    """Gradients of a model that embeds twice in a pass."""
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import (
        get_t5_decoder_with_local_block_spec,
        get_t5_encoder_with_local_block_spec,
    )
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "hidden_dropout": 0.0}
    others = {"attention_dropout": 0.0, "masked_softmax_fusion": False, "gradient_accumulation_fusion": False}
    config = TransformerConfig(**sizes, **others, finalize_model_grads_func=finalize_model_grads)
    specs = get_t5_encoder_with_local_block_spec(2), get_t5_decoder_with_local_block_spec(2)
    for spec in specs:
        spec.layer_norm = WrappedTorchNorm
    model = T5Model(
        config, config, *specs, vocab_size=256, max_sequence_length=32, share_embeddings_and_output_weights=tied
    )
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    seen, causal = torch.zeros(2, 1, 32, 32, dtype=torch.bool), torch.ones(2, 1, 32, 32, dtype=torch.bool).triu(1)

    def forward_step(batches, model):
        source, target = next(batches)
        output = model(source, target[:, :-1], seen, causal, seen, lm_labels=target[:, 1:])
        return output, lambda output: (output.mean(), {})

    texts = [(torch.randint(256, (2, 32)), torch.randint(256, (2, 33))) for _ in range(2)]
    _scheduled(forward_step, texts, model)
    return {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}


def twice_in_a_forward(tied: bool) -> dict[str, Any]:
    """Gradients of a model that two texts of a micro-batch go through one after the other."""
    import torch

    from tests.models import build_gpt

    [model] = build_gpt("dense", layers=2, tied=tied)

    def forward_step(batches, model):
        positions, (chosen, rejected) = torch.arange(32).expand(2, -1), next(batches)
        both = [model(text[:, :-1], positions, None, labels=text[:, 1:]).mean() for text in (chosen, rejected)]
        return both[0] - both[1] / 2, lambda loss: (loss, {})

    _scheduled(forward_step, list(torch.randint(256, (2, 2, 2, 33))), model)
    return {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}


def without_data_parallelism(tied: bool) -> dict[str, Any]:
    """Gradients of a model as it is."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=256,
        max_sequence_length=32,
        share_embeddings_and_output_weights=tied,
    )

    def forward_step(batches, model):
        text = next(batches)
        output = model(text[:, :-1], torch.arange(32)[None], None, labels=text[:, 1:])
        return output, lambda output: (output.mean(), {})

    _scheduled(forward_step, [torch.randint(256, (2, 33)) for _ in range(3)], model)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _scheduled(forward_step: Any, batches: list, model: Any) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=32,
        micro_batch_size=2,
    )


def gradients_differing(train: Any, *given: Any) -> tuple[list[str], int]:
    """Of what ``train`` returns, and how many were put off."""
    import torch
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from mindspeed_mem.schedule.weight_gradients import WEIGHT_GRADIENTS
    from tests.split_runs import split
    from tests.worlds import applied, parallel

    def seeded() -> dict[str, Any]:
        torch.manual_seed(1234)
        model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        return train(*given)

    with applied("sdpa_attention"), parallel():
        expected = seeded()
        with split():
            before = WEIGHT_GRADIENTS.count
            found = seeded()
    same = [name for name, one in expected.items() if one is found[name] or torch.equal(one, found[name])]
    return sorted(expected.keys() - same), WEIGHT_GRADIENTS.count - before


@pytest.mark.parametrize(
    ("train", "given"),
    [
        *((by_a_function_of_ones_own, asks) for asks in ("inputs", "all", "backward")),
        *((train, tied) for train in (of_t5, twice_in_a_forward, without_data_parallelism) for tied in (False, True)),
    ],
)
def test_what_others_make_of_weights_too_and_who_asks_for_gradients(train, given):
    [(found, count)] = on_ranks(1, gradients_differing, train, given)
    assert not found and count


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

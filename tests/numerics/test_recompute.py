"""Losses, gradients, generators and statistics are bit-identical with and without recompute, on one rank."""

from __future__ import annotations

import json

import pytest
import torch

from mindspeed_mem.tools import from_megatron
from tests.swap_runs import again, entry, mismatches, op
from tests.sweeping import apart, but
from tests.worlds import on_ranks

pytestmark = pytest.mark.distributed

ACTIVATION = r"mlp\.activation_func"
OF_EXPERTS = r"mlp\.experts\.local_experts\..*\.activation_func"
EACH = [".*norm", ".*_bda", r"self_attention\..*", r"mlp\..*"]
ALL_MOVE = {"swap": True, "layer_swap": [{"backward_prefetch": 2, "layers": True}]}
BOTH = entry(activations="both", op_swap=[op([r"self_attention\..*", "mlp"], 3)])["swap_config"]
POLICIES = {
    "whole layers": again(recompute=True),
    "some layers": again(recompute=[2]),
    "mlp": again(["mlp"]),
    "attention": again(["self_attention"]),
    "core attention": again([r"self_attention\.core_attention"]),
    "defaults": again(True),
    "norms": again(select_comm_recompute=True),
    "defaults and norms": again(True, select_comm_recompute=True),
    "each": again(EACH),
    "each but the activation": again(EACH, select_recompute_exclude={ACTIVATION: True}),
    "all but core attention": again(recompute=True, select_recompute_exclude={r".*\.core_attention": True}),
    "all but the first linear": again(
        recompute=True, select_recompute_exclude={r"mlp\.(linear_fc1|experts)": True, r".*norm": True}
    ),
}
MIXES = {
    "whole layers among swapped": again(None, ALL_MOVE, recompute=[0, 2]),
    "whole layers, inputs swapped": again(None, {**ALL_MOVE, "swap_recompute_inputs": True}, recompute=[0, 2]),
    "all layers, inputs swapped": again(None, {**ALL_MOVE, "swap_recompute_inputs": True}, recompute=True),
    "operators among swapped": again({r"mlp": [1], ".*norm": True, r".*\.core_attention": [0, 3]}, ALL_MOVE),
    "operators, inputs swapped": again(
        {"mlp": [1], ".*norm": True, r".*\.core_attention": [0, 3]}, {**ALL_MOVE, "swap_recompute_inputs": True}
    ),
    "both and operators": again({ACTIVATION: True, ".*norm": [1, 2]}, BOTH),
    "both and each": again(dict.fromkeys(EACH, [0, 2]), {**BOTH, "swap_recompute_inputs": True}),
}


def policies(kind: str, names: list[str] | None = None) -> dict:
    """Policies by name, all if None. Expert layers have their activation functions two levels further down."""
    plans = {name: plan for name, plan in (POLICIES | MIXES).items() if names is None or name in names}
    if kind == "moe":
        deeper = json.dumps(plans).replace(json.dumps(ACTIVATION)[1:-1], json.dumps(OF_EXPERTS)[1:-1])
        plans = json.loads(deeper)
    return plans


FEW = ["whole layers", "defaults and norms", "each", "all but core attention", "operators, inputs swapped"]


def test_every_policy():
    assert on_ranks(1, mismatches, policies("moe"), {}, {"kind": "moe", "hidden_dropout": 0.1}) == [[]]


@pytest.mark.parametrize(
    "kind",
    apart(["dense", "swiglu_gqa_rope", "mla", "dropout"], "dense", python=["mla"], native=["swiglu_gqa_rope"]),
)
def test_other_kinds_of_model(kind):
    plans = policies(kind, [*FEW, "core attention", "both and each"])
    assert on_ranks(1, mismatches, plans, {}, {"kind": kind}) == [[]]


@pytest.mark.parametrize("kind", but(["moe", "dropout"], "dropout"))
def test_megatrons_own_core_attention(kind):
    names = ["whole layers", "core attention", "each", "all but core attention", "operators, inputs swapped"]
    assert on_ranks(1, mismatches, policies(kind, names), {}, {"kind": kind}, sdpa=False) == [[]]


def test_megatrons_flags_as_a_plan():
    """Its names of modules, moved and run again: what `plan --from-megatron` makes of a command line."""
    wrong: list[str] = []
    flags = "--num-layers 4 --num-experts 4 --fine-grained-activation-offloading --min-offloaded-tensor-size 0 "
    flags += "--offload-modules core_attn attn_proj qkv_linear --recompute-granularity selective --recompute-modules "
    plans = {one: from_megatron.read(flags + one, wrong) for one in ("moe_act layernorm", "moe")}
    assert not wrong and on_ranks(1, mismatches, plans, {}, {"kind": "moe"}) == [[]]


def test_latent_attention_one_projection_at_a_time():
    """Queries, keys and values are joined from what the up projections return: those alone save nothing."""
    parts = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
    plans = {f"idle {part}": again([rf"self_attention\.{part}"]) for part in parts if "up" in part}
    plans |= {f"maybe {part}": again([rf"self_attention\.{part}"]) for part in parts if "down" in part}
    plans["all of them"] = again([rf"self_attention\.{part}" for part in parts])
    plans["with their norms"] = again([r"self_attention\.(q|kv)_layernorm", *(rf"self_attention\.{p}" for p in parts)])
    model = {"kind": "mla", "hidden_dropout": 0.1, "qk_layernorm": True}
    assert on_ranks(1, mismatches, plans, {}, model) == [[]]


EXPERTS = {
    "whole layers": again(recompute=True),
    "mlp": again(["mlp"]),
    "maybe router": again([r"mlp\.router"]),
    "experts": again([r"mlp\.experts"]),
    "one expert": again([r"mlp\.experts\.local_experts\.2"]),
    "maybe dispatch": again([r"mlp\.dispatch"]),
    "maybe its steps": again([rf"mlp\.dispatch\.{step}" for step in ("preprocess", "communicate", "postprocess")]),
    "defaults": again(True),
    "all but the dispatch": again(["mlp"], select_recompute_exclude={r"mlp\.dispatch": True}),
    "all but the router": again(recompute=True, select_recompute_exclude={r"mlp\.router": True}),
    "dispatch among swapped": again({r"mlp\.dispatch": True, r"mlp\.router": [1]}, ALL_MOVE),
    "experts, inputs swapped": again({r"mlp\.experts": [0, 3]}, {**ALL_MOVE, "swap_recompute_inputs": True}),
}
BIASED = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "moe_z_loss_coeff": 1e-3}
SHARED = {"moe_shared_expert_intermediate_size": 48}
ALLGATHER = SHARED | {"moe_token_dispatcher_type": "allgather", "hidden_dropout": 0.1}
JITTER = {"moe_input_jitter_eps": 0.1, "moe_router_load_balancing_type": "seq_aux_loss"}


@pytest.mark.parametrize(
    "model",
    apart([SHARED | BIASED, ALLGATHER, JITTER], python=[JITTER], native=[ALLGATHER]),
    ids=["alltoall, expert bias", "allgather, dropout", "jitter"],
)
def test_expert_layers(model):
    """Among what is compared are the auxiliary losses that Megatron logs, and the experts' bias."""
    every = "moe_router_enable_expert_bias" in model
    some = ("whole layers", "maybe router", "maybe its steps", "mlp")
    plans = {name: EXPERTS[name] for name in EXPERTS if every or name in some}
    if "moe_shared_expert_intermediate_size" in model:
        plans["shared experts"] = again([r"mlp\.shared_experts"])
        plans["all but shared experts"] = again(["mlp"], select_recompute_exclude={r"mlp\.shared_experts": True})
    assert on_ranks(1, mismatches, plans, {}, {"kind": "moe", **model}) == [[]]


def tokens(plan: dict | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """How many tokens each expert of each layer got by the end of a step's backward, and its bias after the step."""
    import contextlib

    from tests.models import build_gpt, train_step
    from tests.swap_runs import swap
    from tests.worlds import parallel

    with parallel(), swap(plan) if plan else contextlib.nullcontext():
        chunks = build_gpt("moe", moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
        config, counted = chunks[0].config, []
        routers = [layer.mlp.router for layer in chunks[0].module.decoder.layers]
        finalize = config.finalize_model_grads_func

        def count(*args, **kwargs):
            counted.extend(router.local_tokens_per_expert.clone() for router in routers)
            finalize(*args, **kwargs)

        config.finalize_model_grads_func = count
        train_step(chunks)
        return list(zip(counted, [router.expert_bias.clone() for router in routers], strict=True))


def test_tokens_are_counted_once():
    [without] = on_ranks(1, tokens, None)
    assert all(int(counts.sum()) == 4 * 2 * 32 * 2 for counts, _ in without)
    for plan in (again(recompute=True), again([r"mlp\.router"]), again(["mlp"])):
        [found] = on_ranks(1, tokens, plan)
        for (counts, bias), (other, other_bias) in zip(found, without, strict=True):
            assert torch.equal(counts, other) and torch.equal(bias, other_bias)


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ({"kind": "dropout", "dtype": torch.bfloat16}, {}),
        ({"kind": "dropout", "bias_activation_fusion": True, "bias_dropout_fusion": True}, {}),
        ({"kind": "swiglu_gqa_rope", "bias_activation_fusion": True, "hidden_dropout": 0.1}, {"sdpa": False}),
        ({"kind": "moe", "bias_activation_fusion": True, "bias_dropout_fusion": True, "hidden_dropout": 0.1}, {}),
        ({"kind": "swiglu_gqa_rope", "rotary_interleaved": True, "qk_layernorm": True}, {}),
        ({"kind": "swiglu_gqa_rope", "attention_output_gate": True}, {"sdpa": False}),
    ],
    ids=["bf16", "fused", "fused swiglu", "fused moe", "qk norm", "output gate"],
)
def test_other_models(model, more):
    plans = policies(model["kind"], FEW)
    plans["inline"] = again([r"self_attention\.(qkv|rotary_pos_emb|output_gate)", ".*_bda", "mlp"])
    assert on_ranks(1, mismatches, plans, {}, model, **more) == [[]]

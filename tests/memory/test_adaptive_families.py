"""The bytes that the planner takes layers of other kinds than dense ones to keep, and their parameters, are those of the
real model: experts, latent attention, prediction of several tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worlds import on_ranks, parallel

GATED = {"swiglu": True, "normalization": "RMSNorm", "bias": False}
EXPERTS = GATED | {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
SHARED = {"moe_shared_expert_intermediate_size": 96}
AHEAD = {"mtp_num_layers": 1, "position_embedding_type": "rope"}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "experts": ("moe", {}, EXPERTS),
    "experts and a shared one": ("moe", SHARED, EXPERTS | {"shared_expert_size": 96}),
    "latent attention": ("mla", {}, GATED | LATENT),
    "latent attention, norms": ("mla", {"qk_layernorm": True}, GATED | LATENT | {"qk_layernorm": True}),
    "latent attention, one query linear": (
        "mla",
        {"q_lora_rank": None, "normalization": "LayerNorm"},
        {"swiglu": True, "bias": False} | LATENT | {"q_lora_rank": 0},
    ),
    "latent attention with experts": (
        "mla",
        {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall", "moe_ffn_hidden_size": 64},
        LATENT | EXPERTS,
    ),
    "several tokens ahead": ("dense", AHEAD, {"mtp_num_layers": 1, "rope": True}),
    "several tokens ahead, RMSNorm": (
        "swiglu_gqa_rope",
        AHEAD,
        GATED | {"mtp_num_layers": 1, "rope": True, "num_query_groups": 2},
    ),
    "an output matrix of its own": ("dense", {"tied": False, "position_embedding_type": "rope"}, {"untied": True}),
}


def counted(kind: str, more: dict[str, Any]) -> tuple[list[dict], int]:
    """The census of one forward and backward, and the number of parameters."""
    import torch

    from tests.models import build_gpt
    from tests.swap_runs import SDPA, one_forward, patched, swap

    with patched(SDPA), parallel(), swap({}, watch_only=True) as engine:
        more = {"position_embedding_type": "rope", **more}
        chunks = build_gpt(kind, layers=3, dtype=torch.bfloat16, bias_activation_fusion=True, **more)
        loss = one_forward(engine, chunks)
        engine.passes.begin_backward(loss)
        loss.mean().backward()
        engine.passes.end_backward()
        return engine.observation.census.storages(), sum(one.numel() for one in chunks[0].parameters())


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_bytes_and_parameters_are_those_of_the_model(case):
    from mindspeed_mem.adaptive.problem import from_shape
    from mindspeed_mem.adaptive.problem.checks import problems_of
    from mindspeed_mem.adaptive.problem.shape import Degrees, Machine, Shape

    kind, more, fields = CASES[case]
    sizes = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 4, "kv_channels": 16}
    sizes |= {"seq_length": 32, "micro_batch_size": 1, "ffn_hidden_size": 256, "vocab_size": 256}
    shape = Shape(**{**sizes, "cpu": True, "rope": True, **fields})
    problem = from_shape.problem(shape, Degrees(), Machine(memory_bytes=2**30))
    assert problems_of(problem) == []
    [(storages, parameters)] = on_ranks(1, counted, kind, more)
    assert problem.stages[0].static_bytes == 18 * parameters

    names = problem.stages[0].parts[0].layers
    for layer in range(1, 3 + shape.mtp_num_layers):
        mine = [one for one in storages if one["layer"] == layer]
        groups = {group.name: group.bytes for group in problem.class_of[names[layer]].groups}
        if layer < 3:  # what it is given is the layer's before
            mine = [one for one in mine if one["op"] != "mlp_bda"]
            mine += [one for one in storages if one["layer"] == layer - 1 and one["op"] == "mlp_bda"]
        assert sum(groups.values()) == pytest.approx(sum(one["bytes"] for one in mine), rel=0.01)
        groups.pop("mlp.router", None)  # more with a loss of its own
        for name, size in groups.items():
            inside = [one["bytes"] for one in mine if one["op"] == name or one["op"].startswith(name + ".")]
            assert not inside or size == pytest.approx(sum(inside), rel=0.001), name

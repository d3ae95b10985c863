"""The bytes that the planner takes layers of other kinds than dense ones to keep, and their parameters, are those of a
real model: experts, latent attention, prediction of several tokens."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_mem.patching import upstream
from tests import worlds
from tests.memory.test_adaptive_bytes import plan_of
from tests.sweeping import but
from tests.worlds import on_ranks, parallel

GATED = {"swiglu": True, "normalization": "RMSNorm", "bias": False}
EXPERTS = GATED | {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
SHARED = {"moe_shared_expert_intermediate_size": 96}
AHEAD = {"mtp_num_layers": 1, "position_embedding_type": "rope"}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "experts": ("moe", {}, EXPERTS),
    "experts and a shared one": ("moe", SHARED, EXPERTS | {"shared_expert_size": 96}),
    "experts, GELU, not fused": (
        "moe",
        {"gated_linear_unit": False, "bias_activation_fusion": False},
        EXPERTS | {"swiglu": False, "fused": False},
    ),
    "experts, not fused": ("moe", {"bias_activation_fusion": False}, EXPERTS | {"fused": False}),
    "latent attention": ("mla", {}, GATED | LATENT),
    "latent attention, norms": ("mla", {"qk_layernorm": True}, GATED | LATENT | {"qk_layernorm": True}),
    "latent attention, one query linear": (
        "mla",
        {"q_lora_rank": None, "normalization": "LayerNorm"},
        {"swiglu": True, "bias": False} | LATENT | {"q_lora_rank": 0},
    ),
    "latent attention with experts": (
        "mla",
        {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "alltoall",
            "moe_ffn_hidden_size": 64,
        },
        LATENT | EXPERTS,
    ),
    "several tokens ahead": ("dense", AHEAD, {"mtp_num_layers": 1, "rope": True}),
    "several tokens ahead, RMSNorm": (
        "swiglu_gqa_rope",
        AHEAD,
        GATED | {"mtp_num_layers": 1, "rope": True, "num_query_groups": 2},
    ),
    "norms of queries and keys": ("dense", {"qk_layernorm": True}, {"qk_layernorm": True}),
    "norms of queries and keys, not rotated": (
        "dense",
        {"qk_layernorm": True, "position_embedding_type": "none"},
        {"qk_layernorm": True, "rope": False},
    ),
    "norms of queries and keys, RMSNorm": (
        "swiglu_gqa_rope",
        {"qk_layernorm": True},
        GATED | {"qk_layernorm": True, "num_query_groups": 2},
    ),
    "an output matrix of its own": ("dense", {"tied": False, "position_embedding_type": "rope"}, {"untied": True}),
}


def counted(
    kind: str, more: dict[str, Any], plans: dict[str, dict[str, Any]]
) -> tuple[list[dict], int, dict[str, int]]:
    """The census of one forward and backward, the number of parameters, and for each plan by how many bytes what is
    held at the end of a forward is less."""
    import gc

    import torch

    from mindspeed_mem.activation.observe.meter import ActivationMeter
    from mindspeed_mem.activation.storage.ledger import LEDGER
    from tests.models import build_gpt, forget_routing
    from tests.swap_runs import SDPA, one_forward, patched, swap

    def held(engine: Any) -> int:
        chunks = build_gpt(kind, layers=3, dtype=torch.bfloat16, **more)
        sizes.append(sum(one.numel() for one in chunks[0].parameters()))
        gc.collect()
        before = LEDGER.held.now
        with ActivationMeter(engine.backend):
            loss = one_forward(engine, chunks)
            found = LEDGER.held.now - before
            engine.passes.begin_backward(loss)
            loss.mean().backward()
            engine.passes.end_backward()
        forget_routing(chunks)
        return found

    more, sizes, freed = {"position_embedding_type": "rope", "bias_activation_fusion": True, **more}, [], {}
    if not more.get("gated_linear_unit", True):
        more["activation_func"] = torch.nn.functional.gelu
    with patched(SDPA), parallel():
        with swap({}, watch_only=True) as engine:
            without = held(engine)
            storages = engine.observation.census.storages()
        for name, plan in plans.items():
            with swap(plan) as engine:
                freed[name] = without - held(engine)
    return storages, sizes[0], freed


def shape_of(fields: dict[str, Any]) -> Any:
    from mindspeed_mem.adaptive.problem.shape import Shape

    sizes = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 4, "kv_channels": 16}
    sizes |= {"seq_length": 32, "micro_batch_size": 1, "ffn_hidden_size": 256, "vocab_size": 256}
    return Shape(**{**sizes, "cpu": worlds.REAL is None, "rope": True, **fields})


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
@pytest.mark.needs_torch("2.7", "RMSNorm keeps other bytes")
def test_bytes_and_parameters_are_those_of_the_model(case):
    from mindspeed_mem.adaptive.problem import from_shape
    from mindspeed_mem.adaptive.problem.checks import problems_of
    from mindspeed_mem.adaptive.problem.shape import Degrees, Machine

    kind, more, fields = CASES[case]
    shape = shape_of(fields)
    problem = from_shape.problem(shape, Degrees(), Machine(memory_bytes=2**30))
    assert problems_of(problem) == []
    [(storages, parameters, _)] = on_ranks(1, counted, kind, more, {})
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


SEQUENCE_PARALLEL = {"tensor": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[str, dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "experts over ranks": ("experts", {"ep": 2}, {}, {"data": 2, "expert": 2}),
    "experts split": ("experts and a shared one", {"tp": 2}, {}, SEQUENCE_PARALLEL),
    "experts over tensor-parallel ranks": (
        "experts",
        {"tp": 2, "ep": 2, "expert_tensor_parallel_size": 1},
        {"expert_tensor_parallel_size": 1},
        SEQUENCE_PARALLEL | {"expert": 2, "expert_tensor": 1},
    ),
    "latent attention split": ("latent attention, norms", {"tp": 2}, {}, SEQUENCE_PARALLEL),
    "latent attention split alone": ("latent attention", {"tp": 2}, {"sequence_parallel": False}, {"tensor": 2}),
}
"""Cases from above, and how two ranks share them."""


def shared(kind: str, layout: dict[str, int], more: dict[str, Any]) -> tuple[list[dict], int]:
    """The census of one forward and backward on each of two ranks, and the number of its parameters."""
    import torch

    from tests.models import build_gpt, forget_routing
    from tests.swap_runs import SDPA, one_forward, patched, swap

    more = {"position_embedding_type": "rope", "sequence_parallel": "tp" in layout, **more}
    with patched(SDPA), parallel(**layout), swap({}, watch_only=True) as engine:
        chunks = build_gpt(kind, layers=3, dtype=torch.bfloat16, bias_activation_fusion=True, **more)
        loss = one_forward(engine, chunks)
        engine.passes.begin_backward(loss)
        loss.mean().backward()
        engine.passes.end_backward()
        forget_routing(chunks)
        return engine.observation.census.storages(), sum(one.numel() for one in chunks[0].parameters())


@pytest.mark.distributed
@pytest.mark.parametrize("case", but(LAYOUTS, *list(LAYOUTS)[1:]))
@pytest.mark.needs_torch("2.7", "RMSNorm keeps other bytes")
def test_ranks_share_what_they_keep_and_their_parameters(case):
    from mindspeed_mem.adaptive.problem import from_shape
    from mindspeed_mem.adaptive.problem.shape import Degrees, Machine

    of, layout, more, degrees = LAYOUTS[case]
    kind, fields, of_shape = CASES[of]
    problem = from_shape.problem(shape_of(of_shape), Degrees(**degrees), Machine(memory_bytes=1))
    ranks = on_ranks(2, shared, kind, layout, {**fields, **more})
    assert {18 * parameters for _, parameters in ranks} == {problem.stages[0].static_bytes}
    kept = [one["bytes"] for storages, _ in ranks for one in storages if one["layer"] == 1]  # which has more is chance
    # From 0.17 on its own permutation keeps positions, of 8 bytes, in place of a map.
    positions = upstream.within("megatron", since="0.17") and "experts" in of
    assert sum(kept) == pytest.approx(2 * sum(group.bytes for group in problem.classes[0].groups), 0.01 * positions)


SOME = (
    "latent attention with experts",
    "experts and a shared one",
    "latent attention, one query linear",
    "experts, GELU, not fused",
)


@pytest.mark.distributed
@pytest.mark.parametrize("case", but(SOME, *SOME[1:]))
@pytest.mark.needs_torch("2.7", "RMSNorm keeps other bytes")
def test_a_plan_frees_what_is_predicted(case):
    from mindspeed_mem.adaptive.problem.from_shape import layer_class
    from mindspeed_mem.adaptive.problem.shape import Degrees, Machine

    kind, more, fields = CASES[case]
    shape = shape_of(fields)
    one = layer_class(shape, Degrees(), Machine(memory_bytes=1), bool(shape.num_experts))
    plans, expected = {}, {}
    for group in one.groups:
        if group.swappable:
            plans[f"{group.name} S"], expected[f"{group.name} S"] = plan_of(one, group, "S"), group.bytes
        if group.recompute_seconds is not None:
            plans[f"{group.name} R"] = plan_of(one, group, "R")
            expected[f"{group.name} R"] = group.bytes - group.recompute_keeps
    assert {"mlp.dispatch.postprocess S", "moe_act R"} <= set(plans) or not shape.num_experts
    [(_, _, freed)] = on_ranks(1, counted, kind, more, plans)
    assert freed == expected

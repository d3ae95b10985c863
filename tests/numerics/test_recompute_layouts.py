"""Recompute under tensor, sequence, pipeline, data and expert parallelism, and beside other recomputation."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.numerics.test_recompute import ALL_MOVE, EXPERTS, POLICIES
from tests.swap_runs import again, mismatches
from tests.sweeping import but
from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed

PLANS = {
    "whole layers": POLICIES["whole layers"],
    "defaults and norms": POLICIES["defaults and norms"],
    "each": POLICIES["each"],
    "mix": again({"mlp": [1], "input_layernorm": True}, {**ALL_MOVE, "swap_recompute_inputs": True}, recompute=[0, 2]),
}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = {  # ranks, parallel sizes, model
    "TP2": (2, {"tp": 2}, {}),
    "TP2 with sequence parallelism": (2, {"tp": 2}, {"sequence_parallel": True}),
    "PP2": (2, {"pp": 2}, {}),
    "PP2, two virtual stages": (2, {"pp": 2, "vpp": 2}, {}),
    "PP2, two virtual stages, not tied": (2, {"pp": 2, "vpp": 2}, {"tied": False}),
    "DP2, distributed optimizer with overlap": (2, {}, {"ddp": {**SHARDED, "bucket_size": 20000}}),
    "TP2 x PP2": (4, {"tp": 2, "pp": 2}, {"sequence_parallel": True}),
    "PP4": (4, {"pp": 4}, {}),
}


@pytest.mark.parametrize("layout", but(LAYOUTS, "TP2", "PP2", "PP2, two virtual stages, not tied", "TP2 x PP2"))
def test_every_layout(layout):
    ranks, sizes, model = LAYOUTS[layout]
    model = {"kind": "swiglu_gqa_rope" if "vpp" in sizes else "dropout", "hidden_dropout": 0.1, **model}
    plans = PLANS if ranks == 2 else {name: PLANS[name] for name in ("whole layers", "mix")}
    steps = 2 if "ddp" in model else 1  # parameters gathered in one step are used in the next
    assert on_ranks(ranks, mismatches, plans, sizes, model, micro_batches=4, steps=steps) == [[]] * ranks


@pytest.mark.parametrize("dispatcher", but(["alltoall", "allgather"], "allgather"))
def test_experts_of_two_ranks_exchange_their_tokens_again(dispatcher):
    names = ["whole layers", "maybe router", "maybe dispatch", "maybe its steps", "experts", "dispatch among swapped"]
    plans = {name: EXPERTS[name] for name in names}
    model = {"kind": "moe", "hidden_dropout": 0.1, "moe_token_dispatcher_type": dispatcher}
    assert on_ranks(2, mismatches, plans, {"ep": 2}, model, micro_batches=4, steps=1) == [[], []]


OF_ALL_BATCHES = {"moe_router_load_balancing_type": ["global_aux_loss", "aux_loss"], "moe_aux_loss_coeff": [0.1, 0.01]}


def test_a_loss_over_all_micro_batches_is_that_of_the_first_run():
    """The first stage counts the tokens of a second micro-batch before the first one's operators run again."""
    plans = {name: EXPERTS[name] for name in ("whole layers", "maybe router", "mlp")}
    model = {"kind": "moe", "layers": 2, **OF_ALL_BATCHES}
    assert on_ranks(2, mismatches, plans, {"pp": 2}, model, steps=1) == [[], []]


def of_one_rank(plan: dict) -> list[str]:
    mine = plan if torch.distributed.get_rank() == 0 else {"swap_config": ALL_MOVE}
    return mismatches({"maybe": mine}, {}, {"kind": "moe", "layers": 2, **OF_ALL_BATCHES}, steps=1)


def test_a_second_run_asks_no_other_data_parallel_rank():
    assert on_ranks(2, of_one_rank, EXPERTS["whole layers"], timeout=30) == [[], []]


def test_fused_weight_gradients_with_overlapping_reduction():
    """The parameter says whether its gradient is in place: the second run must use the parameter itself."""
    model = {"kind": "dropout", "ddp": {**SHARDED, "bucket_size": 20000}, "gradient_accumulation_fusion": True}
    assert on_ranks(2, mismatches, PLANS, {}, model, micro_batches=4) == [[], []]


def counted(module) -> ctypes.c_long:
    """Counts its runs, second ones included: what Python's own objects count is put back after these."""
    runs = ctypes.c_long()

    def count(*_):
        runs.value += 1

    module.register_forward_pre_hook(count)
    return runs


def recomputed(layout: dict, plan: dict) -> tuple[list[int], list[int], list[int]]:
    """Layers that the plan recomputes as a whole, those of this rank that ran twice for each of two micro-batches and
    once more to see whether they repeat themselves, and those that ran.
    """
    from tests.models import build_gpt, train_step
    from tests.swap_runs import swap

    with parallel(**layout), swap(plan) as engine:
        chunks = build_gpt("dense", layers=8)
        runs: dict[int, ctypes.c_long] = {}
        for chunk in chunks:
            for layer in chunk.module.decoder.layers:
                number = layer.layer_number - 1
                runs[number] = counted(layer.self_attention.linear_qkv)
        train_step(chunks, micro_batches=2)
        times = {number: count.value for number, count in runs.items()}
        planned = [layer for layer in range(8) if engine.in_force.plan.recompute(layer, "") is not None]
        return planned, sorted(n for n, of in times.items() if of == 5), sorted(runs)


@pytest.mark.parametrize(
    ("ranks", "layout", "counts", "expected"),
    [
        (2, {"pp": 2}, [2, 1], [0, 1, 4]),
        (2, {"pp": 2, "vpp": 2}, [[1, 0], [0, 1]], [0, 6]),
        (2, {"pp": 2, "vpp": 2}, [3, 1], [0, 1, 2, 4]),
        (2, {"pp": 2}, [0, 4], [4, 5, 6, 7]),
        (1, {}, [3], [0, 1, 2]),
    ],
)
def test_counts_per_stage_recompute_these_layers(ranks, layout, counts, expected):
    found = on_ranks(ranks, recomputed, layout, again(recompute=counts))
    for planned, twice, here in found:
        assert planned == expected
        assert twice == [layer for layer in here if layer in expected]
    assert sorted(layer for _, twice, _ in found for layer in twice) == expected


def selective(*modules: str) -> dict:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


@pytest.mark.parametrize(
    "model",
    [
        {"kind": "dropout", **selective("core_attn")},
        {"kind": "dropout", **selective("core_attn", "layernorm")},
        {"kind": "dropout", **selective("mlp"), "add_bias_linear": False},
        {"kind": "moe", "hidden_dropout": 0.1, **selective("moe")},
        {"kind": "moe", **selective("shared_experts", "layernorm"), "moe_shared_expert_intermediate_size": 48},
        {"kind": "mla", "hidden_dropout": 0.1, **selective("mla_up_proj", "core_attn")},
    ],
    ids=["core_attn", "layernorm", "mlp", "moe", "shared experts", "mla_up_proj"],
)
def test_beside_megatrons_selective_recompute(model):
    """What Megatron drops and makes again itself may be what our operators start from."""
    plans = {f"maybe {name}": POLICIES[name] for name in ("whole layers", "attention", "core attention", "each")}
    plans["mix"] = PLANS["mix"]
    assert on_ranks(1, mismatches, plans, {}, model, steps=1) == [[]]


def under_checkpoints(reentrant: bool, plan: dict) -> tuple[list[str], list[str], list[int]]:
    """Three steps with torch's checkpoint around two of four layers: what differs, what is said, how often ran what."""
    from tests.models import build_gpt, train_step
    from tests.swap_runs import difference, left_over, listening, swap

    runs: list[ctypes.c_long] = []

    def run() -> list:
        chunks = build_gpt("dropout")
        runs[:] = [counted(layer.mlp.linear_fc1) for layer in chunks[0].module.decoder.layers]
        for number, layer in enumerate(chunks[0].module.decoder.layers):
            if number in (1, 2):
                forward = layer.forward
                layer.forward = lambda hidden_states, *args, forward=forward, **kwargs: (
                    torch.utils.checkpoint.checkpoint(
                        lambda hidden: forward(hidden, *args, **kwargs), hidden_states, use_reentrant=reentrant
                    )
                )
        return [train_step(chunks, micro_batches=1, step=step) for step in range(3)]

    with parallel():
        without = run()
    with parallel(), listening() as messages, swap(plan) as engine:
        results = run()
        assert not any(left_over(engine).values())
    found = [what for one, other in zip(results, without, strict=True) for what in difference(one, other)]
    return found, messages, [count.value for count in runs]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("plan", ["whole layers", "mlp"])
def test_under_torchs_checkpoint_it_has_no_effect_and_says_so_once(reentrant, plan):
    [(found, messages, runs)] = on_ranks(1, under_checkpoints, reentrant, POLICIES[plan])
    assert found == []
    assert runs == [7, 6, 6, 7], "each layer twice in each step, ours once more to see whether it repeats itself"
    said = [message for message in messages if "checkpoint" in message]
    assert len(said) == 1, messages
    assert "in layers 1-2" in said[0] and "recompute_config" in said[0]

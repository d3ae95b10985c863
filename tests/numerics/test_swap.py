"""Losses and every gradient are bit-identical with swap on and off: policies, model kinds, types, layouts."""

from __future__ import annotations

import pytest
import torch

from tests.sweeping import apart, but
from tests.worlds import on_ranks, parallel

LAYOUTS = {  # ranks, parallel sizes, model
    "TP2": (2, {"tp": 2}, {}),
    "TP2 with sequence parallelism": (2, {"tp": 2}, {"sequence_parallel": True}),
    "PP2": (2, {"pp": 2}, {}),
    "PP2, two virtual stages": (2, {"pp": 2, "vpp": 2}, {}),
    "DP2": (2, {}, {}),
    "DP2, distributed optimizer with overlap": (
        2,
        {},
        {"ddp": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 20000}},
    ),
    "EP2": (2, {"ep": 2}, {}),
    "TP2 x PP2": (4, {"tp": 2, "pp": 2}, {"sequence_parallel": True}),
    "PP4": (4, {"pp": 4}, {}),
    "PP2 x DP2, distributed optimizer": (4, {"pp": 2}, {"ddp": {"use_distributed_optimizer": True}}),
}


def compare(layout: dict, model: dict, policies: list[str], sdpa: bool = True, steps: int = 2) -> list[str]:
    """Two training steps without and with each policy, from the same start; what differs."""
    from tests.models import build_gpt, build_optimizer, forget_routing, train_step
    from tests.swap_runs import POLICIES, SDPA, difference, left_over, patched, swap

    def run() -> list:
        with parallel(**layout):
            chunks = build_gpt(**model)
            optimizer = build_optimizer(chunks)
            results = [train_step(chunks, optimizer=optimizer, step=number) for number in range(steps)]
            forget_routing(chunks)
            return results

    found = []
    with patched(SDPA if sdpa else []):
        without = run()
        for name in policies:
            with swap(POLICIES[name]) as engine:
                results = run()
                moved = engine.report().bytes_out
                left = left_over(engine)
            for number, (one, other) in enumerate(zip(results, without, strict=True)):
                found += [f"{name}, step {number}: {what}" for what in difference(one, other)]
            if any(left.values()):
                found.append(f"{name}: left over {left}")
            if not moved:
                found.append(f"{name}: nothing was moved")
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind",
    apart(
        ["dense", "swiglu_gqa_rope", "mla", "moe", "dropout"],
        python=["dense", "mla"],
        native=["swiglu_gqa_rope", "dropout"],
    ),
)
def test_every_policy_on_every_kind_of_model(kind):
    policies = ["default", "everything", "everything, far ahead", "some layers", "operators", "saved", "both"]
    assert on_ranks(1, compare, {}, {"kind": kind}, policies) == [[]]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", but(["dense", "swiglu_gqa_rope", "moe"], "dense"))
def test_bf16(kind):
    model = {"kind": kind, "dtype": torch.bfloat16, "hidden_dropout": 0.1}
    assert on_ranks(1, compare, {}, model, ["everything", "both"]) == [[]]


@pytest.mark.distributed
def test_megatrons_own_core_attention_with_dropout():
    assert on_ranks(1, compare, {}, {"kind": "dropout"}, ["default", "everything", "saved"], sdpa=False) == [[]]


@pytest.mark.distributed
@pytest.mark.parametrize("tied", [True, False])
def test_two_layers_tied_or_not(tied):
    model = {"kind": "dense", "layers": 4, "tied": tied}
    assert on_ranks(2, compare, {"pp": 2}, model, ["everything"]) == [[], []]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    ],
    ids=["core_attn", "layernorm"],
)
def test_beside_megatrons_selective_recompute(recompute):
    model = {"kind": "dropout", **recompute}
    assert on_ranks(1, compare, {}, model, ["everything", "operators"]) == [[]]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    apart(
        LAYOUTS,
        *("TP2", "PP2", "DP2", "TP2 x PP2", "PP2 x DP2, distributed optimizer"),
        python=["TP2 with sequence parallelism", "PP4"],
        native=["EP2", "PP2, two virtual stages"],
    ),
)
def test_every_layout(layout):
    ranks, sizes, model = LAYOUTS[layout]
    kind = "moe" if "EP" in layout else "swiglu_gqa_rope"
    model = {"kind": kind, "hidden_dropout": 0.1, **model}
    assert on_ranks(ranks, compare, sizes, model, ["default", "everything", "operators", "both"]) == [[]] * ranks

"""Pipeline stages leave out the copies that lower no peak of the job; early stages swap deeper than late ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_mem.activation.residency import Measured, Residency, passes_to_keep
from tests.swap_runs import entry, op
from tests.worlds import on_ranks, parallel

LAYERS, MICRO_BATCHES, STEPS = 8, 8, 3
MLP = [op("mlp", 2)]


def course(sizes: dict, plan: dict, kind: str = "swiglu_gqa_rope") -> dict:
    """Copies, peaks and results of each step on this rank."""
    from mindspeed_mem.activation.ledger import LEDGER
    from tests.models import build_gpt, train_step
    from tests.swap_runs import SDPA, left_over, patched, swap

    found = {"copies": [], "peaks": [], "results": []}
    with patched(SDPA), parallel(**sizes), swap(plan) as engine:
        chunks = build_gpt(kind, layers=LAYERS)
        for step in range(STEPS):
            LEDGER.reset_peak()
            before = engine.mover.copies_out
            found["results"].append(train_step(chunks, micro_batches=MICRO_BATCHES, micro_batch_size=1, step=step))
            found["copies"].append(engine.mover.copies_out - before)
            found["peaks"].append(LEDGER.held.peak)
        report = engine.report()
        return {
            **found,
            "left": left_over(engine),
            "kept": report["passes_kept"],
            "all": report["passes"],
        }


def same_results(mine: list[dict], other: list[dict]) -> bool:
    from tests.swap_runs import difference

    return not [
        d for one, two in zip(mine, other, strict=True) for d in map(difference, one["results"], two["results"]) if d
    ]


@pytest.mark.distributed
def test_the_last_stage_makes_no_pointless_copies():
    aware = on_ranks(4, course, {"pp": 4}, entry(op_swap=MLP))
    blind = on_ranks(4, course, {"pp": 4}, entry(op_swap=MLP, pp_aware=False))
    assert same_results(aware, blind)
    assert [rank["copies"][0] for rank in aware] == [rank["copies"][0] for rank in blind], "the first step is measured"
    assert aware[3]["copies"][1:] == [0, 0]
    assert sum(blind[3]["copies"]) >= 100
    kept = [rank["kept"] for rank in aware]
    assert kept == sorted(kept) and kept[0] == 0 and kept[3] == aware[3]["all"] == 2 * MICRO_BATCHES
    assert all(mine["copies"][1] <= other["copies"][1] for mine, other in zip(aware, blind, strict=True))
    highest = max(rank["peaks"][0] for rank in blind)
    for rank in aware:
        assert max(rank["peaks"]) <= highest
        assert set(rank["left"].values()) == {0}


@pytest.mark.distributed
def test_a_stage_that_would_come_above_the_others_goes_on_swapping():
    plan = entry(layer_swap=[{"backward_prefetch": 1, "layers": True}])
    for rank in on_ranks(2, course, {"pp": 2}, plan):
        assert rank["kept"] == 0
        assert rank["copies"][0] == rank["copies"][1] == rank["copies"][2] > 0


@pytest.mark.distributed
def test_virtual_stages():
    aware = on_ranks(2, course, {"pp": 2, "vpp": 2}, entry(op_swap=MLP))
    blind = on_ranks(2, course, {"pp": 2, "vpp": 2}, entry(op_swap=MLP, pp_aware=False))
    assert same_results(aware, blind)
    assert aware[1]["copies"][1] < blind[1]["copies"][1]
    assert max(max(rank["peaks"]) for rank in aware) <= max(max(rank["peaks"]) for rank in blind)


@pytest.mark.distributed
def test_without_a_pipeline_everything_is_swapped_as_the_plan_says():
    [rank] = on_ranks(1, course, {}, entry(op_swap=MLP))
    assert rank["kept"] == 0 and rank["copies"][0] == rank["copies"][2] > 0


@given(
    st.lists(st.tuples(*[st.integers(0, 1000)] * 4), min_size=1, max_size=8),
)
def test_no_rank_comes_above_the_highest(rows):
    ranks = [
        Measured(stage, held + more, held, held + extra, moved) for stage, (held, more, extra, moved) in enumerate(rows)
    ]
    highest = max(rank.peak for rank in ranks)
    for rank in ranks:
        keep = passes_to_keep(rank, ranks)
        if keep == math.inf:
            assert rank.peak + rank.without - rank.held <= highest
        else:
            assert rank.peak + keep * rank.moved <= highest


def test_a_place_is_left_to_passes_whose_backward_comes_next():
    residency = Residency()
    residency.passes = 1
    assert not residency.stays(0, at_once=False, others_at_once=True)
    assert residency.stays(0, at_once=True, others_at_once=True)
    assert not residency.stays(1, at_once=True, others_at_once=True)
    assert residency.stays(0, at_once=False, others_at_once=False)


def test_what_is_said_names_the_stages():
    ranks = [Measured(0, 90, 90, 400, 30), Measured(1, 60, 60, 300, 30), Measured(2, 50, 50, 80, 30)]
    residency = Residency()
    assert residency.settle(ranks[1], ranks) == [
        "pipeline stage 1: 1 at a time are not swapped from now on, as that lowers no peak of the job "
        "(swap_config.pp_aware: False swaps them all the same)",
        "pipeline stage 2: no micro-batch is swapped from now on, as that lowers no peak of the job "
        "(swap_config.pp_aware: False swaps them all the same)",
    ]
    assert residency.passes == 1

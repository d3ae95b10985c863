"""Pipeline stages leave out the copies that lower no peak of the job; early stages swap deeper than late ones."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_mem.activation.stage_balance import StageBalance, StagePeak, passes_to_keep
from tests.swap_runs import entry, op
from tests.worlds import on_ranks, parallel

LAYERS, MICRO_BATCHES = 8, 8
STEPS = [MICRO_BATCHES] * 4
MLP = [op("mlp", 2)]


def course(sizes: dict, plan: dict, steps: list[int] = STEPS, fails: int | None = None, **model) -> dict:
    """Copies, peaks and results of each step on this rank; ``steps`` gives their numbers of micro-batches.

    ``fails``: in this step rank 1 raises at the end, and its loop goes on.
    """
    import torch.distributed as dist

    from mindspeed_mem.activation.storage.ledger import LEDGER
    from tests.models import build_gpt, train_step
    from tests.swap_runs import SDPA, left_over, patched, swap

    found = {"copies": [], "peaks": [], "results": []}
    with patched(SDPA), parallel(**sizes), swap(plan) as engine:
        chunks = build_gpt("swiglu_gqa_rope", layers=LAYERS, **model)
        for step, micro_batches in enumerate(steps):
            LEDGER.reset_peak()
            before = engine.mover.copies_out
            with raising(step == fails and dist.get_rank() == 1):
                found["results"].append(train_step(chunks, micro_batches=micro_batches, micro_batch_size=1, step=step))
            found["copies"].append(engine.mover.copies_out - before)
            found["peaks"].append(LEDGER.held.peak)
        report = engine.report()
        return {
            **found,
            "left": left_over(engine),
            "kept": report.passes_kept,
            "all": report.passes,
        }


@contextlib.contextmanager
def raising(wanted: bool):
    """As if the step's last act had raised, and somebody had caught it."""
    from mindspeed_mem.activation import engine as engines

    engine = engines.current()
    end = engine.passes.end_schedule
    engine.passes.end_schedule = lambda completed: end(completed and not wanted)
    try:
        yield
    finally:
        engine.passes.end_schedule = end


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
    assert [rank["copies"][:2] for rank in aware] == [rank["copies"][:2] for rank in blind], "two steps are measured"
    assert aware[3]["copies"][2:] == [0, 0]
    assert sum(blind[3]["copies"]) >= 100
    kept = [rank["kept"] for rank in aware]
    assert kept == sorted(kept) and kept[0] == 0 and kept[3] == aware[3]["all"] == 2 * MICRO_BATCHES
    assert all(mine["copies"][3] <= other["copies"][3] for mine, other in zip(aware, blind, strict=True))
    highest = max(rank["peaks"][0] for rank in blind)
    for rank in aware:
        assert max(rank["peaks"]) <= highest
        assert min(rank["peaks"]) == rank["peaks"][0], "what is kept is counted"
        assert set(rank["left"].values()) == {0}


@pytest.mark.distributed
def test_a_stage_that_would_come_above_the_others_goes_on_swapping():
    plan = entry(layer_swap=[{"backward_prefetch": 1, "layers": True}])
    for rank in on_ranks(2, course, {"pp": 2}, plan):
        assert rank["kept"] == 0
        assert len(set(rank["copies"])) == 1 and rank["copies"][0] > 0


@pytest.mark.distributed
def test_virtual_stages():
    aware = on_ranks(2, course, {"pp": 2, "vpp": 2}, entry(op_swap=MLP))
    blind = on_ranks(2, course, {"pp": 2, "vpp": 2}, entry(op_swap=MLP, pp_aware=False))
    assert same_results(aware, blind)
    assert aware[1]["copies"][2] < blind[1]["copies"][2]
    assert max(max(rank["peaks"]) for rank in aware) <= max(max(rank["peaks"]) for rank in blind)


@pytest.mark.distributed
def test_without_a_pipeline_everything_is_swapped_as_the_plan_says():
    [rank] = on_ranks(1, course, {}, entry(op_swap=MLP))
    assert rank["kept"] == 0 and len(set(rank["copies"])) == 1 and rank["copies"][0] > 0


@pytest.mark.distributed
def test_more_micro_batches_than_before_are_measured_anew():
    steps = [1, 1, 1, 8, 8, 8]
    layout = {"pipeline_model_parallel_layout": "Ett|ttttttL"}
    aware = on_ranks(2, course, {"pp": 2}, entry(op_swap=MLP), steps, **layout)
    blind = on_ranks(2, course, {"pp": 2}, entry(op_swap=MLP, pp_aware=False), steps, **layout)
    assert same_results(aware, blind)
    assert aware[0]["kept"] > 0
    for step in range(len(steps)):
        highest = max(max(rank["peaks"][: step + 1]) for rank in blind)
        assert max(rank["peaks"][step] for rank in aware) <= highest, step


@pytest.mark.distributed
def test_a_pipeline_with_fewer_micro_batches_than_another_leaves_nobody_waiting():
    steps = [4, 3, 4, 4]  # of two pipelines together: one of them has a step of another kind
    first, other, *_ = on_ranks(4, course, {"pp": 2}, entry(op_swap=MLP), steps, timeout=60)
    assert first["copies"][1] > other["copies"][1] > 0
    assert first["copies"][3] == other["copies"][3] > 0


@pytest.mark.distributed
def test_a_step_that_failed_on_one_rank_leaves_nobody_waiting():
    for rank in on_ranks(2, course, {"pp": 2}, entry(op_swap=MLP), fails=1):
        assert rank["kept"] == 0 and len(set(rank["copies"])) == 1


@given(st.lists(st.tuples(*[st.integers(0, 1000)] * 4), min_size=1, max_size=8))
def test_no_rank_comes_above_the_highest(rows):
    ranks = [StagePeak(stage, *row) for stage, row in enumerate(rows)]
    highest = max(rank.peak for rank in ranks)
    for rank in ranks:
        keep = passes_to_keep(rank, ranks)
        assert 0 <= keep <= rank.in_flight
        assert rank.peak + min(rank.away, keep * rank.moved) <= highest


def test_a_place_is_left_to_passes_whose_backward_comes_next():
    residency = StageBalance()
    residency.passes = 1
    assert not residency.stays(0, at_once=False, others_at_once=True)
    assert residency.stays(0, at_once=True, others_at_once=True)
    assert not residency.stays(1, at_once=True, others_at_once=True)
    assert residency.stays(0, at_once=False, others_at_once=False)


def test_what_is_said_names_the_stages():
    ranks = [StagePeak(0, 90, 300, 30, 3), StagePeak(1, 60, 240, 30, 2), StagePeak(2, 50, 30, 30, 1)]
    residency = StageBalance()
    for call in range(3):
        assert residency.begin("steps of one kind") == (call == 2)
        residency.passed(moved=30, away=240, in_flight=2)
        residency.end(stage=1, peak=60)
    assert residency.compare(lambda mine: [ranks[0], mine, ranks[2]]) == [
        "pipeline stage 1: 1 at a time are not swapped from now on, as that lowers no peak of the job "
        "(swap_config.pp_aware: False swaps them all the same)",
        "pipeline stage 2: no micro-batch is swapped from now on, as that lowers no peak of the job "
        "(swap_config.pp_aware: False swaps them all the same)",
    ]
    assert residency.passes == 1


def told(window: int) -> list[str]:
    from tests.models import build_gpt, train_step
    from tests.swap_runs import listening, swap

    with parallel(), listening() as messages, swap(entry(op_swap=MLP, window_bytes=window)):
        chunks = build_gpt("dense", layers=2)
        for step in range(2):
            train_step(chunks, step=step)
    return [line for line in messages if "window_bytes" in line]


@pytest.mark.distributed
def test_a_window_for_late_copies_has_no_effect_where_none_is_late():
    lines = ["swap_config.window_bytes has no effect: copies of cpu are never late"]
    assert [on_ranks(1, told, window) for window in (0, 2**20)] == [[[]], [lines]]

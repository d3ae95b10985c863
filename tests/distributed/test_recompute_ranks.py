"""Ranks that run collectives together must recompute the same operators; others need not."""

from __future__ import annotations

import pytest

from tests.numerics.test_recompute import ALL_MOVE
from tests.swap_runs import again
from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed

PLANS = (again(recompute=True), again(["mlp"]))


def step(layout: dict, plans: tuple[dict, ...], kind: str = "swiglu_gqa_rope") -> str:
    """A step with the plan of this rank: the error, or the loss."""
    import torch.distributed as dist

    from mindspeed_mem.plan import MemoryConfigError
    from tests.models import build_gpt, train_step
    from tests.swap_runs import swap

    with parallel(**layout), swap(plans[dist.get_rank() % len(plans)]):
        try:
            return f"loss {train_step(build_gpt(kind)).loss}"
        except MemoryConfigError as error:
            return str(error)


@pytest.mark.parametrize(
    ("plans", "layout", "kind"),
    [
        (PLANS, {"tp": 2}, "swiglu_gqa_rope"),
        (({"swap_config": {"swap": False}}, PLANS[1]), {"tp": 2}, "swiglu_gqa_rope"),
        ((again(None, ALL_MOVE, recompute=[1]), again(None, ALL_MOVE, recompute=[2])), {"tp": 2}, "swiglu_gqa_rope"),
        (PLANS, {"ep": 2}, "moe"),
    ],
    ids=["TP2", "TP2, one without", "TP2, other layers", "EP2"],
)
def test_different_plans_in_a_group_are_an_error_on_every_rank(plans, layout, kind):
    for message in on_ranks(2, step, layout, plans, kind, timeout=60):
        assert "ranks 0, 1 have different plans" in message


def test_data_parallel_ranks_may_differ():
    same = on_ranks(2, step, {}, PLANS[:1])
    assert on_ranks(2, step, {}, PLANS) == same
    assert same[0].startswith("loss ")


def test_only_the_group_that_differs_is_named_but_every_rank_stops():
    """Ranks 0 and 1 agree, 2 and 3 do not."""
    messages = on_ranks(4, step, {"tp": 2}, (PLANS[0], PLANS[0], *PLANS), timeout=60)
    for message in messages:
        assert "ranks 2, 3 have different plans" in message
        assert "ranks 0, 1" not in message


def test_pipeline_stages_may_differ():
    same = on_ranks(2, step, {"pp": 2}, PLANS[:1], timeout=60)
    assert on_ranks(2, step, {"pp": 2}, PLANS, timeout=60) == same

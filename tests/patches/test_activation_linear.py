"""Fused weight-gradient accumulation keeps working under the engine's saved-tensor hooks."""

from __future__ import annotations

import pytest

from tests.worlds import on_ranks, parallel


def fused(overlap: bool) -> tuple[list[str], int]:
    from tests.models import build_gpt, train_step
    from tests.swap_runs import EVERYTHING, SDPA, difference, patched, swap

    def run():
        with parallel():
            chunks = build_gpt("dense", gradient_accumulation_fusion=True, ddp={"overlap_grad_reduce": overlap})
            return train_step(chunks)

    with patched(SDPA):
        without = run()
        with swap(EVERYTHING) as engine:
            return difference(run(), without), engine.report()["bytes_out"]


@pytest.mark.distributed
@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_accumulate_into_main_grad(overlap):
    """With overlap, a weight whose gradient the hook lost would keep its bucket from ever being reduced."""
    for differences, moved in on_ranks(2, fused, overlap, timeout=60):
        assert differences == []
        assert moved > 0

"""Numbers for a training log: per step, and only of what is managed."""

from __future__ import annotations

import pytest

from mindspeed_mem.report.scalars import Scalars
from tests.worlds import on_ranks, parallel

MIB = 2**20
pytestmark = pytest.mark.distributed


def logged() -> tuple[dict, list[dict], tuple]:
    from tests.models import build_gpt, train_step
    from tests.swap_runs import EVERYTHING, swap

    nobody = Scalars().take(1)
    with parallel(), swap(EVERYTHING) as engine:
        chunks, scalars, found = build_gpt("dense"), Scalars(10), []
        for step in range(11, 14):
            train_step(chunks)
            if step != 12:
                found.append(scalars.take(step))
        return nobody, found, (engine.mover.bytes_out, engine.report().peak_bytes)


def test_figures_are_per_step():
    [(nobody, (first, second), (moved, peak))] = on_ranks(1, logged)
    assert nobody == {}
    assert first["mindspeed_mem/swapped_out_mib"] == second["mindspeed_mem/swapped_out_mib"] == moved / 3 / MIB > 0
    assert first["mindspeed_mem/swapped_in_mib"] == first["mindspeed_mem/swapped_out_mib"]
    assert second["mindspeed_mem/peak_activations_mib"] == peak / MIB
    assert second["mindspeed_mem/peak_activations_without_plan_mib"] > 2 * peak / MIB
    assert second["mindspeed_mem/recomputed_mib"] == second["mindspeed_mem/evicted_mib"] == 0

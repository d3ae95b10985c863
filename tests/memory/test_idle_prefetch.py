"""swap_config.idle_prefetch: what comes back between two passes, and that it costs no memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed


def stepped(schedule: str, **more: Any) -> tuple[list[int], int, list, dict]:
    """Bytes on the host when each backward of the last step begins, the peak, results, and what is left over."""
    import contextlib

    from mindspeed_mem import passes
    from mindspeed_mem.passes import Listener, Precedence
    from tests.capped_runs import capped
    from tests.models import build_gpt, train_step
    from tests.swap_runs import entry, left_over, swap

    plan = entry(layer_swap=[{"backward_prefetch": 1, "layers": [0, 2]}], pp_aware=False, **more)
    away: list[int] = []

    class Follows(Listener):
        precedence = Precedence.TRACE

        def begin_backward(self, output: Any) -> None:
            away.append(engine.mover.slabs.bytes_in_use)

    with parallel(pp=2), swap(plan) as engine:
        ours = contextlib.nullcontext() if schedule == "1f1b" else capped(None, split=True)
        with ours:
            chunks = build_gpt("dense")
            follows = Follows()
            passes.LISTENERS.append(follows)
            try:
                results = [train_step(chunks, step=step) for step in range(2)]
            finally:
                passes.LISTENERS.remove(follows)
        peak = engine.report().peak_bytes
        return away[len(away) // 2 :], peak, results, left_over(engine)


def compared(schedule: str) -> tuple[list[str], list[int], list[int]]:
    """What differs that must not, and bytes away from the device at the beginning of each backward without and with."""
    from tests.swap_runs import difference

    (plain, least, expected, _), (ours, peak, results, left) = stepped(schedule), stepped(schedule, idle_prefetch=True)
    found = [what for pair in zip(results, expected, strict=True) for what in difference(*pair)]
    found += [f"peak {peak} instead of {least}"] if peak > least else []
    found += [f"left over {left}"] if any(left.values()) else []
    return found, plain, ours


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_more_is_there_when_a_backward_begins(schedule):
    stages = on_ranks(2, compared, schedule)
    for found, plain, ours in stages:
        assert not found
        assert all(one <= other for one, other in zip(ours, plain, strict=True))
    _, plain, ours = stages[0]
    if schedule == "1f1b":  # one micro-batch is left, where there were two; with zb one waits for its weights as well
        assert ours[-1] < plain[-1]


def alone() -> list[str]:
    from tests.models import build_gpt, train_step
    from tests.swap_runs import entry, listening, swap

    with parallel(), swap(entry(idle_prefetch=True)), listening() as lines:
        chunks = build_gpt("dense", layers=1)
        for step in range(2):
            train_step(chunks, micro_batches=1, step=step)
    return [line for line in lines if "idle_prefetch" in line]


def test_without_a_pipeline_it_says_so_once():
    [lines] = on_ranks(1, alone)
    assert lines == ["swap_config.idle_prefetch has no effect: without pipeline stages none idles"]

"""swap_config.output_gradients with nothing else that is moved, where copies run beside computation."""

from __future__ import annotations

import pytest

from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed


def held(output_gradients: bool, window: int) -> tuple[list[int], list[int], int]:
    """Bytes that the ledger has at the end of each backward, and when its gradients of weights are there; then the most
    that late copies held. Raises what the simulated device finds."""
    from mindspeed_mem.activation.storage.ledger import LEDGER
    from mindspeed_mem.device.simulated import SimulatedBackend
    from mindspeed_mem.schedule.weight_gradients import WEIGHT_GRADIENTS
    from tests.models import build_gpt
    from tests.split_runs import split
    from tests.swap_runs import SDPA, entry, left_over, one_forward, patched, swap

    backend = SimulatedBackend()
    plan = entry(op_swap=[], output_gradients=output_gradients, window_bytes=window)
    after, done, late = [], [], [0]

    def watch(module, given):
        given[0].register_hook(lambda _: late.append(engine.mover.late.nbytes))

    with patched(SDPA), parallel(), backend.tracker(), split(), swap(plan, backend) as engine:
        chunks = build_gpt("dense", layers=2)
        for layer in chunks[0].module.decoder.layers:
            layer.mlp.register_forward_pre_hook(watch)
        for _ in range(3):
            engine.passes.begin_schedule(("test",))
            loss = one_forward(engine, chunks)
            engine.passes.begin_backward(loss)
            with WEIGHT_GRADIENTS.collect(0):
                loss.sum().backward()
            engine.passes.end_backward()
            late.append(engine.mover.late.nbytes)
            after.append(LEDGER.held.now)
            WEIGHT_GRADIENTS.run(0)
            done.append(LEDGER.held.now)
            del loss
            engine.passes.end_schedule(True)
        backend.check()
        left = left_over(engine)
        assert not any(left.values()), left
    return after, done, max(late)


def test_they_leave_though_nothing_else_does():
    [(stay, _, _)], [(leave, done, late)] = on_ranks(1, held, False, 0), on_ranks(1, held, True, 0)
    assert all(one < other / 2 for one, other in zip(leave, stay, strict=True)), (leave, stay)
    assert late == 0 and max(done) <= min(leave)


def test_what_is_late_stays_within_the_window():
    window = 50_000
    [(stay, _, _)], [(leave, _, late)] = on_ranks(1, held, False, window), on_ranks(1, held, True, window)
    assert late <= window
    assert all(one <= other / 2 + window for one, other in zip(leave, stay, strict=True)), (leave, stay)

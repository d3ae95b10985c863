"""swap_config.idle_prefetch on the simulated device, whose time is virtual: a stage that waits between two passes."""

from __future__ import annotations

import pytest

from tests.worlds import on_ranks, parallel

FORWARD, BACKWARD = "forward", "backward"
FIRST_OF_TWO = [  # what 1F1B runs on the first of two stages
    (FORWARD, 0, 0),
    (FORWARD, 1, 0),
    (BACKWARD, 0, 0),
    (FORWARD, 2, 0),
    (BACKWARD, 1, 0),
    (BACKWARD, 2, 0),
]


def run(idle_prefetch: bool, idle: float) -> tuple[float, int, list[float]]:
    """Seconds that computation waits for copies in the last of three steps, in which each backward comes ``idle``
    seconds after the pass before it; the peak; gradients."""
    from mindspeed_mem.device.simulated import SimulatedBackend
    from tests.models import build_gpt
    from tests.swap_runs import SDPA, entry, one_forward, patched, swap

    backend = SimulatedBackend(bandwidth=1e8, latency=0.0, op_seconds=1e-5)
    layers = [{"backward_prefetch": 1, "layers": [0, 2]}]
    plan = entry(layer_swap=layers, pp_aware=False, idle_prefetch=idle_prefetch, window_bytes=0)
    with patched(SDPA), parallel(), backend.tracker(), swap(plan, backend) as engine:
        chunks = build_gpt("dense", layers=4)
        for _ in range(3):
            for parameter in chunks[0].parameters():
                parameter.main_grad.zero_()
            before, losses = backend.stall_seconds(), {}
            engine.passes.begin_schedule(("test",), FIRST_OF_TWO, 0)
            for direction, number, _ in FIRST_OF_TWO:
                if direction == FORWARD:
                    losses[number] = one_forward(engine, chunks, number)
                    continue
                backend.current_stream().seconds += idle
                engine.passes.begin_backward(losses[number])
                losses.pop(number).sum().backward()
                engine.passes.end_backward()
            engine.passes.end_schedule(True)
        waited = backend.stall_seconds() - before
        backend.check()
        gradients = [parameter.main_grad.sum().item() for parameter in chunks[0].parameters()]
        return waited, engine.report().peak_bytes, gradients


def most_of_plans() -> tuple[int, int]:
    """Bytes held at most by a plan from the start, and by the same one after steps that kept almost everything."""
    from mindspeed_mem.activation.storage.ledger import LEDGER
    from mindspeed_mem.device.simulated import SimulatedBackend
    from mindspeed_mem.plan import load_memory_config
    from tests.models import build_gpt
    from tests.swap_runs import SDPA, entry, one_forward, op, patched, swap

    settings = {"pp_aware": False, "idle_prefetch": True, "window_bytes": 0}
    plan = entry(layer_swap=[{"backward_prefetch": 1, "layers": [0, 1, 2, 3]}], **settings)
    keeps = entry(op_swap=[op(r"self_attention\.linear_proj", 1)], **settings)
    order = [(FORWARD, 0, 0), (FORWARD, 1, 0), (FORWARD, 2, 0), *[(BACKWARD, number, 0) for number in range(3)]]
    found = []
    for first in (plan, keeps):
        backend = SimulatedBackend(bandwidth=1e8, latency=0.0, op_seconds=1e-5)
        with patched(SDPA), parallel(), backend.tracker(), swap(first, backend) as engine:
            chunks = build_gpt("dense", layers=4)
            for now in (first, plan):
                engine.adopt(load_memory_config(now), lambda mine: [mine])
                for _ in range(2):
                    LEDGER.reset_peak()
                    before, losses = LEDGER.held.now, {}
                    engine.passes.begin_schedule(("test",), order, 0)
                    for direction, number, _ in order:
                        if direction == FORWARD:
                            losses[number] = one_forward(engine, chunks, number)
                            continue
                        engine.passes.begin_backward(losses[number])
                        losses.pop(number).sum().backward()
                        engine.passes.end_backward()
                    engine.passes.end_schedule(True)
            found.append(LEDGER.held.peak - before)
    return found[0], found[1]


@pytest.mark.distributed
def test_what_was_held_before_the_plan_is_no_room():
    [(alone, after)] = on_ranks(1, most_of_plans)
    assert after <= alone, (after, alone)


@pytest.mark.distributed
def test_more_copying_is_hidden_in_idle_time_and_no_more_is_held():
    runs = {(ours, idle): on_ranks(1, run, ours, idle)[0] for ours in (False, True) for idle in (0.0, 1.0)}
    plain, ours = runs[False, 1.0], runs[True, 1.0]
    assert ours[0] < plain[0] and ours[1] <= plain[1] and ours[2] == plain[2]
    assert plain[0] - ours[0] > runs[False, 0.0][0] - runs[True, 0.0][0]  # it is the idle time that hides them

"""`backward_prefetch: Auto` on the simulated device, whose time is virtual: as near as the copies back allow."""

from __future__ import annotations

import logging

import pytest

from tests.worlds import on_ranks, parallel


def run(bandwidth: float, prefetch: int | str, calls: int, policy: str = "layer_swap") -> tuple:
    """Seconds of stand-still of each training call; distances at the end; whether they are final; log; gradients."""
    from mindspeed_mem.device.simulated import SimulatedBackend
    from tests.models import build_gpt
    from tests.swap_runs import SDPA, again, entry, listening, one_forward, patched, swap

    backend = SimulatedBackend(bandwidth=bandwidth, latency=0.0, op_seconds=1e-4)
    plans = {
        "layer_swap": entry(layer_swap=[{"backward_prefetch": prefetch, "layers": True}]),
        "inputs": again(
            ["mlp"], {"swap": True, "smallest_bytes": 0, "swap_recompute_inputs": True, "default_prefetch": prefetch}
        ),
    }
    stalls = []
    with (
        listening(logging.INFO) as said,
        patched(SDPA),
        parallel(),
        backend.tracker(),
        swap(plans[policy], backend) as engine,
    ):
        chunks = build_gpt("dense", layers=2)
        for _ in range(calls):
            for parameter in chunks[0].parameters():
                parameter.main_grad.zero_()
            before = backend.stall_seconds()
            engine.passes.begin_schedule(("test",))
            loss = one_forward(engine, chunks)
            engine.passes.begin_backward(loss)
            loss.sum().backward()
            engine.passes.end_backward()
            engine.passes.end_schedule(True)
            stalls.append(backend.stall_seconds() - before)
        gradients = [parameter.main_grad.sum().item() for parameter in chunks[0].parameters()]
        backend.check()
        distances = set(engine.auto._distances.values())
        return stalls, distances, engine.auto.settled, [line for line in said if "backward_prefetch" in line], gradients


@pytest.mark.distributed
def test_slow_copies_start_earlier_until_compute_no_longer_waits():
    [(stalls, distances, settled, said, gradients)] = on_ranks(1, run, 3e7, "Auto", 11)
    [(near, _, _, _, same)] = on_ranks(1, run, 3e7, 1, 2)
    assert settled and max(distances) > 1 and gradients == same
    assert stalls[0] == pytest.approx(near[0]) and stalls[-1] < 0.75 * near[-1]
    assert said and all(line.startswith("backward_prefetch Auto is ") for line in said)


@pytest.mark.distributed
def test_fast_copies_stay_near():
    [(_, distances, settled, _, _)] = on_ranks(1, run, 1e14, "Auto", 3)
    assert settled and distances == {1}


@pytest.mark.distributed
def test_inputs_of_recomputed_operators_follow_the_default_distance():
    [(stalls, distances, settled, _, _)] = on_ranks(1, run, 1e6, "Auto", 8, "inputs")
    assert settled and max(distances) > 1 and stalls[-1] < stalls[0]

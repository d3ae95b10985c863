"""Each wait of the engine is needed: the simulated device finds it missing. With all in place it finds nothing."""

from __future__ import annotations

import contextlib

import pytest

from mindspeed_mem.activation.storage import mover
from tests.sweeping import apart
from tests.worlds import on_ranks, parallel

# Forward and backward of micro-batches on the first of three pipeline stages.
PIPELINE = "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4".split()

SCARCE = 300_000
"""Host bytes for little more than one micro-batch: a slab is taken again as soon as it was given back."""


def run(program: str, leave_out: str | None, distance: int, host_limit: int | None = None) -> str:
    """Two steps of ``program`` on the simulated device or the accelerator; returns what it found, "" for nothing."""
    import torch

    from mindspeed_mem.device import get_backend
    from mindspeed_mem.device.simulated import SimulatedBackend
    from tests.models import DEVICE, build_gpt
    from tests.side_streams import without
    from tests.split_runs import split
    from tests.swap_runs import SDPA, entry, one_forward, patched, swap

    simulated = DEVICE == "cpu"
    backend = SimulatedBackend() if simulated else get_backend(DEVICE)
    looks = backend.tracker() if simulated else contextlib.nullcontext()
    plan = entry(
        layer_swap=[{"backward_prefetch": distance, "layers": True}],
        window_bytes=0,
        output_gradients=program == "split backward",
    )
    try:
        with (
            patched(SDPA),
            parallel(),
            looks,
            without(backend, leave_out),
            split(),
            swap(plan, backend, host_limit) as engine,
        ):
            chunks = build_gpt("dense", layers=2)
            for _ in range(2):
                engine.passes.begin_schedule(("test",))
                if program == "abandoned":
                    _abandon(engine, chunks)
                else:
                    _pipeline(engine, chunks, one_forward, weights_later=program == "split backward")
                engine.passes.end_schedule(True)
            if simulated:
                backend.check()
            else:
                torch.ops.accelerator.check_freed()
    except RuntimeError as error:
        if "race" not in f"{type(error).__name__} {error}".lower():
            raise
        return str(error)
    return ""


def _pipeline(engine, chunks, one_forward, weights_later) -> None:
    """``weights_later``: gradients of weights wait until the backward after theirs has run."""
    from mindspeed_mem.schedule.weight_gradients import WEIGHT_GRADIENTS

    losses, waiting = {}, []
    for action in PIPELINE:
        micro_batch = int(action[1:])
        if action.startswith("F"):
            losses[micro_batch] = one_forward(engine, chunks, micro_batch)
        else:
            loss = losses.pop(micro_batch)
            engine.passes.begin_backward(loss)
            with WEIGHT_GRADIENTS.collect(micro_batch) if weights_later else contextlib.nullcontext():
                loss.sum().backward()
            engine.passes.end_backward()
            waiting += [micro_batch] * weights_later
        while len(waiting) > (action != PIPELINE[-1]):
            WEIGHT_GRADIENTS.run(waiting.pop(0))


def _abandon(engine, chunks) -> None:
    """A forward that stops in its second layer, so that records die while their copies out are under way."""
    import torch

    from tests.models import DEVICE

    def stop(*_):
        raise ZeroDivisionError

    handle = chunks[0].module.decoder.layers[1].mlp.linear_fc2.register_forward_pre_hook(stop)
    engine.passes.begin_forward(0, 0)
    text = torch.arange(32, device=DEVICE).expand(1, -1)
    with pytest.raises(ZeroDivisionError):
        chunks[0](text, text, None, labels=text)
    handle.remove()


@pytest.mark.distributed
@pytest.mark.parametrize("program", ["pipeline", "abandoned", "split backward"])
@pytest.mark.parametrize(
    "distance, host_limit",
    apart([(1, None), (2, None), (30, None), (30, SCARCE)], python=[(1, None)], native=[(2, None)]),
)
def test_the_engine_has_no_races(program, distance, host_limit):
    assert on_ranks(1, run, program, None, distance, host_limit) == [""]


@pytest.mark.distributed
@pytest.mark.parametrize("wait", mover.WAITS)
def test_each_wait_is_missed_when_left_out(wait):
    program = "abandoned" if wait == mover.RETIRE_AFTER_COPIES else "pipeline"
    [found] = on_ranks(1, run, program, wait, 30, SCARCE)
    assert found, f"nothing was found although the wait '{wait}' was left out"

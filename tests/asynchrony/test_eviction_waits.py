"""Activations that leave because memory has run out, on a device whose copies run as late as they may."""

from __future__ import annotations

import functools
import traceback

import pytest
import torch

from mindspeed_mem.activation.storage import mover
from tests.worlds import on_ranks, parallel

PIPELINE = "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4".split()


def make_room(engine, wanted: int, *_) -> None:
    engine.mover.make_room(wanted, set())


class Failing:
    """In the place of `Backend.copy`: every so many copies back ahead of time find no memory."""

    def __init__(self, backend, every: int):
        self.copy, self.every, self.ahead, self.failed = backend.copy, every, 0, 0

    def __call__(self, target, source, stream):
        if stream.name == "copy in" and not _on_demand():
            self.ahead += 1
            if self.ahead % self.every == 0:
                self.failed += 1
                raise torch.OutOfMemoryError("out of memory")
        self.copy(target, source, stream)


def _on_demand() -> bool:
    """Whether backward asks for it: then a failure is the model's."""
    return any(frame.name == "bring_back" for frame in traceback.extract_stack())


def run(leave_out: str | None, plan: dict | None = None, fails_every: int = 0) -> str:
    """Two steps in which room is made within every layer, forward and backward; what the simulated device finds."""
    from mindspeed_mem.device.simulated import RaceError, SimulatedBackend
    from tests.limited_runs import surviving
    from tests.models import build_gpt
    from tests.swap_runs import one_forward

    backend = SimulatedBackend()
    backend.leave_out = {leave_out} if leave_out else set()
    failing = Failing(backend, fails_every) if fails_every else None
    if failing is not None:
        backend.copy = failing
    try:
        with parallel(), backend.tracker(), surviving(plan, backend=backend) as engine:
            chunks = build_gpt("dense", layers=2)
            for layer in chunks[0].module.decoder.layers:
                layer.mlp.register_forward_hook(functools.partial(make_room, engine, 60_000))
                layer.mlp.register_full_backward_hook(functools.partial(make_room, engine, 30_000))
            for _ in range(2):
                engine.passes.begin_schedule(("test",))
                losses = {}
                for action in PIPELINE:
                    micro_batch = int(action[1:])
                    if action.startswith("F"):
                        with engine.survival.holding_all():
                            losses[micro_batch] = one_forward(engine, chunks, micro_batch)
                    else:
                        loss = losses.pop(micro_batch)
                        engine.passes.begin_backward(loss)
                        loss.sum().backward()
                        engine.passes.end_backward()
                engine.passes.end_schedule(True)
            assert engine.mover.evictions > 50 if failing is None else failing.failed > 5
            backend.check()
    except RaceError as error:
        return str(error)
    return ""


PLAN = {
    "swap_config": {
        "swap": True,
        "smallest_bytes": 0,
        "op_swap": [{"op_name": "mlp", "backward_prefetch": 2, "layers": True}],
    }
}


@pytest.mark.distributed
@pytest.mark.parametrize("plan", [None, PLAN], ids=["alone", "beside a plan"])
def test_making_room_has_no_races(plan):
    assert on_ranks(1, run, None, plan) == [""]


@pytest.mark.distributed
@pytest.mark.parametrize("wait", [mover.OUT_AFTER_COMPUTE, mover.RELEASE_AFTER_OUT, mover.COMPUTE_AFTER_IN])
def test_a_wait_that_is_left_out_is_missed(wait):
    [found] = on_ranks(1, run, wait)
    assert found, f"nothing was found although the wait '{wait}' was left out"


def test_copies_back_that_fail_half_way_race_with_nothing():
    several = {"swap": True, "smallest_bytes": 0, "layer_swap": [{"backward_prefetch": 2, "layers": True}]}
    assert on_ranks(1, run, None, {"swap_config": several}, 3) == [""]  # some operators make several that leave

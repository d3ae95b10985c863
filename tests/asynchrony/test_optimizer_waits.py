"""Each wait of an optimizer step that swaps is needed: the simulated device finds it missing, and otherwise nothing."""

import pytest
import torch

from mindspeed_mem.device.simulated import RaceError, SimulatedBackend
from mindspeed_mem.zero.optimizer import swapped
from tests.placed_runs import DEVICE, SWAPPED, Run, on_host, same

SIZES = [4608] * 5 + [1500]
"""With two states each, and its copy, a parameter fills a buffer."""


def swapped_run(backend, kind):
    """Three steps of parameters that take several buffers, none of them in parts: they would share their storages."""
    with backend.tracker():
        places = [SWAPPED] * 5 + [DEVICE]
        run = Run(kind, SIZES, places, backend, copy_of=lambda param: copies[param])
        copies = {param: on_host(backend, param.data.bfloat16()) for param in run.params}
        run.steps(3)
        assert all(torch.equal(copies[param], param.bfloat16()) for param in run.params[:5])
    return run


@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
def test_copies_beside_computation_have_no_races(kind):
    backend = SimulatedBackend()
    run = swapped_run(backend, kind)
    backend.check()
    assert set(backend.reasons) == set(swapped.WAITS)
    assert same(run.saved(), Run(kind, SIZES, None).steps(3).saved())


@pytest.mark.parametrize("wait", swapped.WAITS)
def test_each_wait_is_missed_when_left_out(wait):
    backend = SimulatedBackend()
    backend.leave_out = {wait}
    with pytest.raises(RaceError):
        swapped_run(backend, "Adafactor")
        backend.check()

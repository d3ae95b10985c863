"""Each wait of an optimizer step that swaps is needed: the simulated device finds it missing, and otherwise nothing."""

import pytest

from mindspeed_mem.device.simulated import RaceError, SimulatedBackend
from mindspeed_mem.zero.optimizer import swapped
from tests.placed_runs import DEVICE, SWAPPED, Run, same

SIZES = [5120] * 5 + [1500]
"""With two states each, a parameter fills a buffer."""


def swapped_run(backend, kind):
    """Three steps of parameters that take several buffers, none of them in parts: they would share their storages."""
    with backend.tracker():
        return Run(kind, SIZES, [SWAPPED] * 5 + [DEVICE], backend).steps(3)


@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
def test_copies_beside_computation_have_no_races(kind):
    backend = SimulatedBackend()
    run = swapped_run(backend, kind)
    backend.check()
    unused = {swapped.FREE_AFTER_OUT} if kind == "AdamW" else set()  # it makes nothing outside the buffer
    assert set(backend.reasons) == set(swapped.WAITS) - unused
    assert same(run.saved(), Run(kind, SIZES, None).steps(3).saved())


@pytest.mark.parametrize("wait", swapped.WAITS)
def test_each_wait_is_missed_when_left_out(wait):
    backend = SimulatedBackend()
    backend.leave_out = {wait}
    with pytest.raises(RaceError):
        swapped_run(backend, "Adafactor")
        backend.check()

"""What is too small to be worth a copy stays: how small that is, the link says, or the plan."""

from __future__ import annotations

import pytest
import torch

from mindspeed_mem.activation.storage.staying import smallest_worth
from mindspeed_mem.device import get_backend
from mindspeed_mem.device.simulated import SimulatedBackend
from mindspeed_mem.report.swap_report import format_report
from tests.side_streams import run
from tests.swap_runs import entry

SAVED = 16 * 32 * 4  # bytes of what a part keeps: 16 rows of 32 floats


@pytest.mark.parametrize(
    ("latency", "bandwidth", "smallest"),
    [(1e-5, 10e9, 2**16), (2e-5, 25e9, 2**18), (1e-6, 1e9, 2**14), (1e-3, 50e9, 2**20)],
)
def test_a_copy_is_worth_its_start_if_it_runs_for_longer(latency, bandwidth, smallest):
    assert smallest_worth(SimulatedBackend(latency=latency, bandwidth=bandwidth)) == smallest


def test_where_copies_block_nothing_is_too_small():
    assert smallest_worth(get_backend("cpu")) == 0


def moved(smallest: int | None) -> tuple[int, int, list[torch.Tensor], str]:
    """Bytes that left, that were too small, the gradients, and the report."""
    engines = []
    plan = entry(layer_swap=[{"backward_prefetch": 1, "layers": True}], smallest_bytes=smallest)
    gradients, _ = run(plan, after_part=engines.append)
    report = engines[-1].report()
    return report.bytes_out, report.small_bytes, gradients, format_report([report])


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_what_is_smaller_than_the_plan_says_stays_and_is_reported():
    everything, none, gradients, text = moved(SAVED)
    assert everything and not none and "too small" not in text
    for smallest, said in ((SAVED + 1, SAVED + 1), (None, 2**16)):
        left, stayed, found, text = moved(smallest)
        assert not left and stayed == everything
        assert f"in activations of less than {said} bytes: too small to be worth copies" in text
        assert all(map(torch.equal, gradients, found))

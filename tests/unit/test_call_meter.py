"""What is measured of training calls while a plan is tried."""

from __future__ import annotations

from mindspeed_mem.activation.engine import Engine
from mindspeed_mem.adaptive.run.call_meter import CallMeter
from mindspeed_mem.device.cpu import CpuBackend
from mindspeed_mem.plan import load_memory_config


class InPieces(CpuBackend):
    """Its allocator keeps memory in pieces; it has retried so often."""

    retries = 7

    def allocation_retries(self):
        return self.retries


def test_retries_of_the_allocator_count_in_the_call_in_which_they_happen():
    backend = InPieces()
    meter = CallMeter(Engine(load_memory_config(None), backend, survive=True))
    assert meter.measured() is None
    found = []
    for retries in (0, 2, 1):
        meter.begin()
        backend.retries += retries
        meter.end(stage=3, micro_batches=1)
        backend.retries += 1  # between calls: the optimizer's
        found.append(meter.measured().retries)
    assert found == [0, 2, 2] and meter.measured().stage == 3
    meter.clear()
    assert meter.measured() is None

"""What --placement-policy auto takes of a device: what this process can have, by what its allocator holds at most."""

import pytest

from mindspeed_mem.device.accelerator import AcceleratorBackend
from mindspeed_mem.zero.core.gathering import Gathering
from mindspeed_mem.zero.core.passes import AutoPlacement

GB = 1 << 30


class Device:
    """torch.cuda's memory figures: of `total`, `foreign` is taken by nobody's tensors here."""

    def __init__(self, total, foreign):
        self.total, self.foreign = total, foreign
        self.allocated = self.reserved = self.peak = 0

    def current_device(self):
        return 0

    def get_device_properties(self, index):
        return type("Properties", (), {"total_memory": self.total})()

    def mem_get_info(self):
        return self.total - self.foreign - self.reserved, self.total

    def memory_allocated(self):
        return self.allocated

    def memory_reserved(self):
        return self.reserved

    def max_memory_reserved(self):
        return self.peak

    def reset_peak_memory_stats(self):
        self.peak = self.reserved

    def empty_cache(self):
        self.reserved = self.allocated

    def holds(self, allocated, reserved):
        """What a pass leaves: tensors, and what the allocator keeps for them."""
        assert self.foreign + reserved <= self.total
        self.allocated, self.reserved = allocated, max(reserved, self.reserved)
        self.peak = max(self.peak, self.reserved)


class StandIn(AcceleratorBackend):
    type = "cuda"

    def stream_key(self):
        raise NotImplementedError


class Resting:
    nbytes = GB

    def __init__(self):
        self.on_host = True

    def to_device(self):
        self.on_host = False


def moved(device, building, step):
    """How many of 100 chunks come up after two steps, with what the allocator holds for building and for a step."""
    gathering, chunks = Gathering(0), [Resting() for _ in range(100)]
    auto = AutoPlacement(StandIn(device), gathering)
    for held in (building, step):
        auto.begin_pass(chunks)
        device.holds(2 * GB, held)
        auto.end_pass()
    auto.begin_pass(chunks)
    return sum(not one.on_host for one in chunks), gathering.budget


@pytest.mark.parametrize("foreign, expected", [(0, 42), (20 * GB, 27), (56 * GB, 2)])
def test_what_others_take_of_a_device_is_not_there_to_be_taken(foreign, expected):
    count, budget = moved(Device(80 * GB, foreign), 20 * GB, 20 * GB)
    assert count == expected
    assert count * GB + budget <= 0.95 * (80 * GB - foreign) - 20 * GB


def test_what_the_allocator_held_for_building_is_not_counted():
    assert moved(Device(80 * GB, 0), 75 * GB, 20 * GB) == moved(Device(80 * GB, 0), 20 * GB, 20 * GB)

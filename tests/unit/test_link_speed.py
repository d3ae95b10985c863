"""Timestamps of the devices, and the speed of the link to the host that is measured by them."""

import gc
import time

import pytest
import torch

from mindspeed_mem.device import get_backend
from mindspeed_mem.device.cpu import CpuBackend
from mindspeed_mem.device.limited_cpu import CompilerError, LimitedMemory
from mindspeed_mem.device.link_speed import measure_link
from mindspeed_mem.device.simulated import SimulatedBackend
from tests.guarding import settled


@pytest.fixture
def memory():
    """The host's memory, counted."""
    try:
        memory = LimitedMemory()
    except CompilerError as error:
        pytest.skip(str(error))
    gc.collect()
    with memory:
        yield memory


def test_the_host_is_timed_by_its_clock():
    backend = CpuBackend()
    before, begin = time.perf_counter(), backend.timestamp()
    time.sleep(0.002)
    end, after = backend.timestamp(backend.new_stream("side")), time.perf_counter()
    assert 0.002 <= backend.seconds_between(begin, end) <= after - before


def test_a_simulated_copy_takes_its_virtual_time_on_its_stream_alone():
    backend = SimulatedBackend(bandwidth=1e9, latency=1e-3)
    side = backend.new_stream("out")
    target, source = backend.host_empty(10**6), backend.empty(10**6)
    compute, begin = backend.timestamp(), backend.timestamp(side)
    backend.copy(target, source, side)
    assert backend.seconds_between(begin, backend.timestamp(side)) == pytest.approx(2e-3)
    assert backend.seconds_between(compute, backend.timestamp()) == 0
    backend.wait(backend.current_stream(), backend.record(side), "test")
    assert backend.seconds_between(compute, backend.timestamp()) == pytest.approx(2e-3)


def test_the_speed_of_a_simulated_link_is_what_it_was_made_with():
    backend = SimulatedBackend(bandwidth=4e9, latency=1e-3)
    speed = measure_link(backend, nbytes=8_000_000)
    assert speed[:4] == pytest.approx([8_000_000 / 3e-3 / 1e9] * 4)
    assert not speed.blocking
    gc.collect()
    backend.check()  # no race, and nothing freed under a copy


def test_on_the_host_copies_block_and_there_is_nothing_to_run_beside():
    backend, begin = CpuBackend(), time.perf_counter()
    speed = measure_link(backend, nbytes=2**22, rounds=3)
    elapsed = time.perf_counter() - begin
    assert speed.blocking
    assert (speed.out, speed.back) == (speed.out_alone, speed.back_alone)
    assert min(speed) > 0
    # each direction was copied three times within that time: the median cannot be slower than all of it allows
    assert min(speed[:4]) >= 2 * 2**22 / elapsed / 1e9


def test_where_memory_is_tight_less_is_copied_and_all_is_freed_again(memory):
    backend = CpuBackend()
    backend.attach_ledger(memory)
    before, refused = settled(memory), memory.refused
    memory.limit = before + 8 * 2**20
    speed = measure_link(backend)
    assert min(speed[:4]) > 0
    assert memory.allocated == before
    assert memory.peak <= memory.limit and memory.refused == refused
    memory.limit = before + 2**11
    with pytest.raises(RuntimeError) as error:
        measure_link(backend)
    assert backend.is_out_of_memory(error.value)


class Cautious(CpuBackend):
    """Nobody knows how much room it has, and it gives out 5 MiB at most."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def empty(self, nbytes):
        self.asked.append(nbytes)
        if nbytes > 5 * 2**20:
            raise torch.OutOfMemoryError(f"no {nbytes} bytes")
        return super().empty(nbytes)


def test_what_does_not_fit_is_halved():
    backend = Cautious()
    assert min(measure_link(backend, nbytes=16 * 2**20, rounds=1)[:4]) > 0
    assert backend.asked == [n * 2**20 for n in (16, 8, 4)]


class Full(Cautious):
    """A device apart from the host, with no room for the matrices that are multiplied meanwhile."""

    def empty(self, nbytes):
        return super().empty(nbytes).to("meta")

    def copy(self, target, source, stream):
        assert "meta" in (target.device.type, source.device.type)


def test_without_room_for_matrices_copies_are_measured_alone():
    speed = measure_link(Full(), nbytes=2**20, rounds=1)
    assert (speed.out, speed.back) == (speed.out_alone, speed.back_alone) and min(speed[:4]) > 0


def test_nothing_is_multiplied_where_only_copies_are_asked_for():
    backend = Full()
    speed = measure_link(backend, nbytes=2**20, rounds=1, beside=False)
    assert backend.asked == [2**20] and speed.out == speed.out_alone


@pytest.mark.gpu
def test_a_gpu_copies_beside_its_computation():
    backend = get_backend("cuda")
    begin = backend.timestamp()
    speed = measure_link(backend)
    assert not speed.blocking and min(speed[:4]) > 0
    assert backend.seconds_between(begin, backend.timestamp()) > 0


def speeds_of_two():
    import os
    from unittest import mock

    import torch

    from mindspeed_mem.device import get_backend, speeds

    environment = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(torch.distributed.get_rank())}
    with mock.patch.dict(os.environ, environment), mock.patch.multiple(speeds, _SIDES=(64,), _MOVED=2**20):
        return speeds.measure(get_backend("cpu"))


@pytest.mark.distributed
def test_devices_of_a_node_copy_alone_and_all_at_once():
    from tests.worlds import on_ranks

    first, second = on_ranks(2, speeds_of_two)
    assert all(speed > 0 for one in (first, second) for speed in one.values())
    assert set(first) - set(second) == {"link_alone_gbps"}
    assert first["link_all_gbps"] == second["link_all_gbps"]

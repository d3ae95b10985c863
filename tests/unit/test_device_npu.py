"""The NPU backend against a stand-in for torch_npu, which cannot exist here: what it asks of torch.npu, and when.

The stand-in keeps tensors on the host and lets events happen when told. It shows that the calls fit torch_npu's
documented interface as we read it, and nothing about an NPU.
"""

import contextlib
import gc
import sys
import types

import pytest
import torch

from mindspeed_mem.device import DeviceError, available_backends, get_backend


class StandInStream:
    device = "npu:0"

    def __init__(self, npu):
        self.npu, self.waits = npu, []

    def wait_event(self, event):
        self.waits.append(event)


class StandInEvent:
    def __init__(self, npu, timing):
        self.npu, self.timing, self.happened, self.stream, self.at = npu, timing, False, None, 0.0
        npu.made.append(self)

    def record(self, stream):
        self.stream, self.happened, self.at = stream, False, self.npu.clock_ms

    def query(self):
        return self.happened

    def synchronize(self):
        self.happened = True

    def elapsed_time(self, end):
        assert self.timing and end.timing and self.happened and end.happened
        return end.at - self.at


def stand_in(present=True):
    npu = types.ModuleType("torch.npu")
    npu.made, npu.clock_ms, npu.used, npu.synchronized = [], 0.0, [], 0
    npu.main = StandInStream(npu)
    npu.Stream = lambda: StandInStream(npu)
    npu.Event = lambda enable_timing=False: StandInEvent(npu, enable_timing)
    npu.current_stream = lambda: npu.main
    npu.current_device = lambda: 0
    npu.device_count = lambda: 2
    npu.is_available = lambda: present
    npu.memory_allocated = lambda: 100
    npu.max_memory_allocated = lambda: 200
    npu.get_device_properties = lambda device: types.SimpleNamespace(total_memory=64 << 30)
    npu.get_device_name = lambda device: "Stand-in"
    npu.get_rng_state = lambda device: torch.arange(4, dtype=torch.uint8)
    npu.states = []
    npu.set_rng_state = lambda state, device: npu.states.append(state)
    npu.resets = []
    npu.reset_peak_memory_stats = lambda: npu.resets.append(1)

    def synchronize():
        npu.synchronized += 1

    @contextlib.contextmanager
    def stream(native):
        npu.used.append(native)
        yield

    npu.synchronize, npu.stream = synchronize, stream
    return npu


@pytest.fixture
def npu(monkeypatch):
    module = types.ModuleType("torch_npu")
    module.__version__ = "2.7.1"
    module.npu = stand_in()
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setattr(torch, "npu", module.npu, raising=False)
    return module.npu


@pytest.fixture
def backend(npu, monkeypatch):
    from mindspeed_mem.device.npu import NpuBackend

    monkeypatch.setattr(NpuBackend, "device", torch.device("cpu"))
    return NpuBackend()


def test_an_npu_is_preferred_when_there_is_one(npu, monkeypatch):
    monkeypatch.delenv("MINDSPEED_MEM_DEVICE", raising=False)
    assert available_backends()[0] == "npu"
    npu.is_available = lambda: False
    assert "npu" not in available_backends()
    with pytest.raises(DeviceError, match="finds no NPU"):
        get_backend("npu")


def test_a_broken_toolkit_is_an_absent_device_and_not_a_crash(monkeypatch, tmp_path):
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "npu" not in available_backends()
    with pytest.raises(DeviceError, match="torch_npu cannot be imported .*libhccl"):
        get_backend("npu")


def test_each_rank_of_a_node_takes_its_device_unless_it_has_taken_one(backend, npu, monkeypatch):
    chosen = []
    npu.set_device = chosen.append
    for rank in ("", "0", "2"):  # no torchrun; the first; more ranks than devices that this process sees
        monkeypatch.setenv("LOCAL_RANK", rank)
        backend.use_device_of_rank()
    assert chosen == []
    monkeypatch.setenv("LOCAL_RANK", "1")
    backend.use_device_of_rank()
    assert chosen == [1]
    npu.current_device = lambda: 1
    backend.use_device_of_rank()
    assert chosen == [1]


def test_copies_go_to_their_stream_and_waits_to_the_waiting_one(backend, npu):
    side, target, source = backend.new_stream("out"), torch.zeros(8, dtype=torch.uint8), backend.empty(8).fill_(5)
    version = target._version
    backend.copy(target, source, side)
    assert npu.used == [side.native] and torch.equal(target, source) and target._version == version
    event = backend.record(side)
    assert event.native.stream is side.native and not event.native.timing
    other = backend.new_stream("in")
    backend.wait(other, event, "x")
    assert other.native.waits == [event.native] and len(npu.made) == 1  # side streams are not timed
    assert not backend.done(event)
    backend.synchronize(event)
    assert backend.done(event)
    backend.synchronize()
    assert npu.synchronized == 1


def test_events_are_recycled(backend, npu):
    side = backend.new_stream("out")
    for _ in range(5):
        event = backend.record(side)
    held = backend.record(side)
    del event
    gc.collect()
    backend.record(side)
    assert len(npu.made) <= 3
    assert held.native is not backend.record(side).native


def test_stall_is_measured_only_where_computation_meets_an_unfinished_copy(backend, npu):
    side, compute = backend.new_stream("in"), backend.current_stream()
    event = backend.record(side)
    event.native.happened = True
    backend.wait(compute, event, "x")
    assert len(npu.made) == 1 and npu.main.waits == [event.native]
    event = backend.record(side)
    backend.wait(compute, event, "x")
    begin, end = [e for e in npu.made if e.timing]
    assert backend.stall_seconds() == 0.0  # still going on
    end.at, begin.happened, end.happened = begin.at + 250.0, True, True
    assert backend.stall_seconds() == 0.25 == backend.stall_seconds()
    backend.wait(compute, event, "x")
    assert len([e for e in npu.made if e.timing]) == 2  # the pair is used again


def test_timestamps_are_timing_events_of_their_stream_and_are_used_again(backend, npu):
    begin = backend.timestamp()
    npu.clock_ms = 40.0
    end = backend.timestamp(side := backend.new_stream("out"))
    assert (begin.native.stream, end.native.stream) == (npu.main, side.native)
    assert not begin.native.happened and not end.native.happened  # the host has not waited
    assert backend.seconds_between(begin, end) == 0.04
    used = begin.native
    del begin
    assert backend.timestamp().native is used


def test_memory_figures_and_random_state_are_torch_npus(backend, npu):
    assert (backend.allocated(), backend.peak(), backend.limit()) == (100, 200, 64 << 30)
    backend.reset_peak()
    assert npu.resets == [1]
    backend.set_rng_state(backend.rng_state())
    assert npu.states[0].tolist() == [0, 1, 2, 3]
    assert not backend.owns(torch.zeros(1))
    about = backend.describe()
    assert about["type"] == "npu" and about["torch_npu"] == "2.7.1" and about["device"] == "Stand-in"


def test_out_of_memory_is_known_by_type_and_by_text(backend):
    assert backend.is_out_of_memory(torch.OutOfMemoryError("x"))
    allocator, driver = "NPU out of memory. Tried to allocate 2.00 GiB", "NPU out of memory in aclrtMalloc"
    assert backend.is_out_of_memory(RuntimeError(allocator)) and backend.is_out_of_memory(RuntimeError(driver))
    # What torch's allocator has refused had not begun, in place or not; the driver may have refused in the middle.
    assert not backend.is_from_driver(RuntimeError(allocator)) and backend.is_from_driver(RuntimeError(driver))
    assert not backend.is_out_of_memory(RuntimeError("HCCL timeout"))
    assert not backend.is_out_of_memory(ValueError("NPU out of memory"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="host memory can be pinned here")
def test_host_memory_that_cannot_be_pinned_is_told_once(backend, recwarn):
    assert backend.host_empty(100).numel() == backend.host_empty(100).numel() == 100
    assert [str(w.message).split(" (")[0] for w in recwarn] == ["npu: host memory cannot be pinned"]

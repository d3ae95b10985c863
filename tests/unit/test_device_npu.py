"""The NPU backend against a stand-in for torch_npu, which cannot exist here: what it asks of torch.npu, and when.

The stand-in keeps tensors on the host and lets events happen when told. It shows that the calls fit torch_npu's
interface as we read it, and nothing about an NPU. What makes torch_npu wait for the queue of its launching thread
(`NPUStream::stream`, `NPUEvent::elapsed_time`) is an error there, or counted.
"""

import contextlib
import gc
import sys
import types

import pytest
import torch

from mindspeed_mem.device import DeviceError, available_backends, get_backend
from mindspeed_mem.device.slabs import HostSlabs


class StandInStream:
    device = "npu:0"

    def __init__(self, npu):
        self.npu, self.waits = npu, []

    def __eq__(self, other):
        return self is other

    def __hash__(self):
        raise AssertionError("the hash of a stream drains the queue")

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
        self.npu.drained += 1
        return end.at - self.at


def stand_in(present=True):
    npu = types.ModuleType("torch.npu")
    npu.made, npu.clock_ms, npu.used, npu.synchronized, npu.drained = [], 0.0, [], 0, 0
    npu.main = StandInStream(npu)
    npu.Stream = lambda: StandInStream(npu)
    npu.Event = lambda enable_timing=False: StandInEvent(npu, enable_timing)
    npu.current_stream = lambda: npu.main
    npu.current_device = lambda: 0
    npu.device_count = lambda: 2
    npu.is_available = lambda: present
    npu.memory_allocated = npu.memory_reserved = lambda: 100
    npu.mem_get_info = lambda: (60 << 30, 64 << 30)
    npu.fractions = []
    npu.set_per_process_memory_fraction = lambda fraction, device: npu.fractions.append(fraction)
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
    module._C = types.SimpleNamespace(_npu_getCurrentStream=lambda device: (3, device, 20))
    for variable in ("TASK_QUEUE_ENABLE", "PER_STREAM_QUEUE", "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
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
    assert len(npu.made) == 1 and npu.main.waits == []  # it costs nothing
    event = backend.record(side)
    backend.wait(compute, event, "x")
    begin, end = [e for e in npu.made if e.timing]
    assert backend.stall_seconds() == 0.0  # still going on
    end.at, begin.happened, end.happened = begin.at + 250.0, True, True
    assert backend.stall_seconds() == 0.25 == backend.stall_seconds()
    backend.wait(compute, event, "x")
    assert len([e for e in npu.made if e.timing]) == 2  # the pair is used again


def test_compute_never_waits_for_the_queue_to_know_how_long_it_stood_still(backend, npu):
    side, compute = backend.new_stream("in"), backend.current_stream()
    for _ in range(600):
        backend.wait(compute, backend.record(side), "x")
        begin, end = [event for event in npu.made if event.timing and not event.happened][-2:]
        begin.happened = end.happened = True
        end.at = begin.at + 10.0
        assert npu.drained == 0
    assert backend.stall_seconds() == pytest.approx(6.0)  # those that were kept stand for all
    assert 0 < npu.drained < 600
    assert len(npu.made) < 700


def test_with_a_queue_for_each_stream_no_event_is_used_twice(npu, monkeypatch):
    """A wait may be launched after a later record there, and wait for that instead: for ever, if that waits for it."""
    from mindspeed_mem.device.npu import NpuBackend

    monkeypatch.setenv("PER_STREAM_QUEUE", "1")
    backend = NpuBackend()
    side, compute = backend.new_stream("out"), backend.current_stream()
    for _ in range(3):
        backend.wait(side, backend.record(compute), "x")
    assert len({id(event) for event in side.native.waits}) == len(npu.made) == 3


def test_the_current_stream_is_known_without_a_stream_object(backend, npu):
    with pytest.raises(TypeError):
        hash(backend.current_stream())  # torch_npu's would drain the queue
    npu.current_stream = None
    assert backend.stream_key() == backend.stream_key() == (3, 0, 20)


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


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
@pytest.mark.parametrize("cause", ["EL0004: Failed to allocate memory", "error code is 207001", "NPU out of memory"])
def test_what_the_launching_thread_found_no_memory_for_cannot_be_retried(backend, error, cause):
    """The queue is lost with it, and later work is dropped without a word."""
    assert backend.is_out_of_memory(torch.OutOfMemoryError(cause))
    text = f"The Inner error is reported as above. The process exits for this inner error, and ... aclnnMm.\n{cause}"
    assert not backend.is_out_of_memory(error(text))


def test_what_cann_lacks_itself_comes_from_the_driver(backend):
    assert backend.is_from_driver(torch.OutOfMemoryError("aclrtMalloc, error code is 207001\nEL0004"))
    assert not backend.is_from_driver(torch.OutOfMemoryError("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; "))


def test_workspaces_that_the_launching_thread_takes_are_kept_free(backend, npu, monkeypatch):
    backend.keep_reserve()
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    backend.keep_reserve()
    without, with_them = (fraction * (64 << 30) for fraction in npu.fractions)
    assert without - with_them == pytest.approx(2 << 30, abs=1)


def test_pinned_buffers_are_counted_as_torch_npu_makes_them(backend, npu, monkeypatch):
    emptied = []
    npu.host_empty_cache = lambda: emptied.append(1)
    monkeypatch.setattr(NpuBackend := type(backend), "_pinned", lambda self, n: torch.empty(n, dtype=torch.uint8))
    slabs = HostSlabs(backend, limit_bytes=2048)
    slab = slabs.take(600)
    assert (slab.buffer.numel(), slab.nbytes, slabs.bytes_held, slabs.bytes_in_use) == (600, 1024, 1024, 1024)
    slabs.give(slab)
    assert slabs.take(1000) is slab and slabs.allocations == 1  # the room is there
    assert slabs.take(1025) is None
    assert slabs.take(512).nbytes == 512 and slabs.take(0).nbytes == 0
    slabs.give(slab)
    assert slabs.take(513) is slab and not emptied
    slabs.give(slab)
    assert slabs.clear() == 1024 and emptied == [1]
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "max_split_size_mb:64,pin_memory_expandable_segments:True")
    assert NpuBackend().host_bytes(600) == 600


@pytest.mark.skipif(torch.cuda.is_available(), reason="host memory can be pinned here")
def test_host_memory_that_cannot_be_pinned_is_told_once(backend, recwarn):
    assert backend.host_empty(100).numel() == backend.host_empty(100).numel() == 100
    assert [str(w.message).split(" (")[0] for w in recwarn] == ["npu: host memory cannot be pinned"]

"""The CUDA backend on a real GPU; without one, only how its host buffers are registered, with a stand-in runtime."""

import errno
import gc
import mmap
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_mem.device import get_backend, numa
from mindspeed_mem.device.op_guard import OpGuard
from mindspeed_mem.device.slabs import HostSlabs

MB = 1 << 20


class StandInRuntime:
    """Notes what is registered; `refuse` makes registration fail as a locked-memory limit does."""

    def __init__(self, refuse=False):
        self.refuse, self.calls, self.registered, self.bound = refuse, 0, {}, []

    def cudaHostRegister(self, address, nbytes, flags):
        assert flags == 1  # pinned for all devices
        self.calls += 1
        if not self.refuse:
            self.registered[address] = nbytes
        return 2 if self.refuse else 0

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return 0


@pytest.fixture
def unplugged(monkeypatch):
    """A CudaBackend and its runtime, which is a stand-in."""
    from mindspeed_mem.device.cuda import CudaBackend

    runtime = StandInRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(CudaBackend, "index", lambda self: 2)
    monkeypatch.setattr(CudaBackend, "pci_address", lambda self: "0000:3b:00.0")
    monkeypatch.setattr(numa, "bind", lambda *device: runtime.bound.append((device, runtime.calls)) or "bound")
    return CudaBackend(), runtime


def test_host_buffers_are_exact_aligned_and_registered_while_they_live(unplugged):
    backend, runtime = unplugged
    buffer = backend.host_empty(5000)
    address = buffer.data_ptr()
    assert runtime.registered == {address: 5000} and address % 4096 == 0
    assert buffer.dtype == torch.uint8 and buffer.untyped_storage().nbytes() == 5000
    view = buffer.fill_(9)[10:].view(-1, 10)
    del buffer
    gc.collect()
    assert runtime.registered == {address: 5000}  # a view keeps it
    assert int(view.sum()) == 9 * 4990
    del view
    assert runtime.registered == {}
    assert backend.host_empty(0).numel() == 0 and runtime.calls == 1


def test_a_kernel_that_takes_no_advice_about_pages_has_host_buffers_too(unplugged, monkeypatch):
    class Plain(mmap.mmap):
        def madvise(self, *unused):
            raise OSError(errno.EINVAL, "built without huge pages")

    backend, runtime = unplugged
    monkeypatch.setattr(mmap, "mmap", Plain)
    buffer = backend.host_empty(5000)
    assert runtime.registered == {buffer.data_ptr(): 5000}


def test_the_process_moves_next_to_its_device_before_its_first_host_buffer(unplugged):
    """Whatever needs the buffer; they lie where the process runs that first touches them."""
    backend, runtime = unplugged
    assert runtime.bound == []
    kept = [backend.host_empty(100) for _ in range(3)]
    assert runtime.bound == [((2, "0000:3b:00.0"), 0)] and len(kept) == runtime.calls


@pytest.mark.parametrize("device", ["CUDA", "NPU"])
def test_an_allocator_that_caches_nothing_is_none_to_survive_with(device, monkeypatch):
    from mindspeed_mem.device.cuda import CudaBackend

    backend = CudaBackend()
    monkeypatch.setattr(backend, "type", device.lower())
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    variable = f"PYTORCH_NO_{device}_MEMORY_CACHING"
    monkeypatch.setenv(variable, "0")
    assert backend.foreign_allocator() is None
    monkeypatch.setenv(variable, "1")
    assert backend.foreign_allocator() == variable


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinning by torch works here")
def test_a_refused_registration_falls_back_and_the_error_is_not_left_behind(unplugged, monkeypatch):
    backend, runtime = unplugged
    forgotten = []
    monkeypatch.setattr("mindspeed_mem.device.cuda._forget_error", lambda: forgotten.append(1))
    runtime.refuse = True
    with pytest.warns(RuntimeWarning, match="cuda: host memory cannot be pinned"):
        buffer = backend.host_empty(5000)
    assert buffer.numel() == 5000 and runtime.calls == len(forgotten) == 1 and runtime.registered == {}


NO_PLAN = [
    "GET was unable to find an engine to execute this computation",
    "FIND was unable to find an engine to execute this computation",
    "Unable to find a valid cuDNN algorithm to run convolution",
]
NO_HANDLE = [
    "CUDA error: initialization error when calling `cusparseCreate(handle)`",
    "CUDA error: insufficient resources when calling `cusparseSpGEMM_compute( handle, opA)`",
    "CUDA error: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
]
FULL = [
    "CUDA error: resource allocation failed when calling `cusparseCreate(handle)`",
    "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED",
    "MAGMA error: cannot allocate memory on GPU device, info = -113, when calling dsyevd",
]


@pytest.fixture
def full(monkeypatch):
    """A CudaBackend, and the figures of its device."""
    from mindspeed_mem.device.cuda import CudaBackend

    figures = types.SimpleNamespace(free=20 << 30, ooms=0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (figures.free, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda *_: {"num_ooms": figures.ooms})
    monkeypatch.setattr(CudaBackend, "_total", lambda self: 80 << 30)
    return CudaBackend(), figures


def test_what_more_libraries_say_when_the_driver_has_no_memory(full):
    backend, figures = full
    assert [text for text in FULL if not backend.is_out_of_memory(RuntimeError(text))] == []
    perhaps = NO_PLAN + NO_HANDLE
    assert [text for text in perhaps if backend.is_out_of_memory(RuntimeError(text))] == []
    figures.free = 1 << 20
    assert [text for text in perhaps if not backend.is_out_of_memory(RuntimeError(text))] == []
    assert not backend.is_out_of_memory(ValueError(NO_PLAN[0]))


@pytest.mark.parametrize("text", NO_PLAN)
def test_a_convolution_without_a_plan_has_lacked_memory_where_the_allocator_has_refused_some(full, text):
    """Under a limit, the driver has more."""
    backend, figures = full
    assert not backend.is_out_of_memory(RuntimeError(text))  # there is none for its types, say
    figures.ooms = 7
    assert not backend.is_out_of_memory(ValueError(text)) and not backend.is_out_of_memory(RuntimeError(text))
    figures.ooms = 9
    assert backend.is_out_of_memory(RuntimeError(text))
    assert not backend.is_out_of_memory(RuntimeError(text))
    figures.ooms = 10
    assert backend.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not backend.is_out_of_memory(RuntimeError(text))  # the refusal was that one's
    figures.ooms = 0  # the statistics have been reset
    assert not backend.is_out_of_memory(RuntimeError(text))


def test_a_convolution_without_a_plan_runs_again_in_the_guard(full):
    backend, figures = full
    failures, asked = [RuntimeError(NO_PLAN[0])] * 2, []

    class Full(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op is torch.ops.aten.convolution.default and failures:
                figures.ooms += 5
                raise failures.pop()
            return op(*args, **kwargs or {})

    backend.give_back = lambda: 0
    image, kernel = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3)
    with Full(), OpGuard(backend, lambda nbytes, _: asked.append(nbytes) or 1, None):
        result = torch.conv2d(image, kernel)
    assert torch.equal(result, torch.conv2d(image, kernel)) and len(asked) == 2


def test_host_buffers_are_out_of_the_guards_sight(unplugged, monkeypatch):
    """The driver's refusal to pin, which the next kernel is blamed for, is no lack of device memory."""
    backend, runtime = unplugged
    runtime.refuse, seen = True, []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append(op)
            return op(*args, **kwargs or {})

    monkeypatch.setattr("mindspeed_mem.device.cuda._forget_error", lambda: torch.empty(1).fill_(0))
    monkeypatch.setattr(backend, "_told_unpinned", True)
    with Seeing():
        assert backend.host_empty(5000).numel() == 5000
    assert seen == []


@pytest.fixture
def backend():
    return get_backend("cuda")


@pytest.mark.gpu
def test_a_round_trip_is_exact_and_asynchronous(backend):
    compute, out, in_ = backend.current_stream(), backend.new_stream("out"), backend.new_stream("in")
    assert not compute.side and out.side and out != in_ and compute == backend.current_stream()
    expected = []
    slabs = HostSlabs(backend, limit_bytes=200 * MB)
    for size in (1, 4097, 3 * MB + 1, 64 * MB):
        source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=backend.device)
        slab = slabs.take(size)
        assert slab.buffer.is_pinned() and slab.buffer.numel() == size
        backend.wait(out, backend.record(compute), "written")
        backend.copy(slab.buffer, source, out)
        copied = backend.record(out)
        backend.wait(compute, copied, "copied out")
        wanted = source.clone()
        del source
        target = backend.empty(size)
        backend.wait(in_, backend.record(compute), "allocated")
        backend.copy(target, slab.buffer, in_)
        back = backend.record(in_)
        backend.wait(compute, back, "copied in")
        slabs.give(slab, back)
        expected.append(torch.equal(target, wanted))
        assert backend.owns(target) and not backend.owns(slab.buffer)
    assert expected == [True] * 4
    backend.synchronize()
    assert backend.stall_seconds() > 0
    assert slabs.clear() == sum((1, 4097, 3 * MB + 1, 64 * MB)) and slabs.bytes_held == 0


@pytest.mark.gpu
def test_the_host_goes_on_and_an_event_happens_later(backend):
    side = backend.new_stream("out")
    source, host = backend.empty(512 * MB), backend.host_empty(512 * MB)
    backend.synchronize()
    for _ in range(4):
        backend.copy(host, source, side)
    event = backend.record(side)
    assert not backend.done(event)
    before = backend.stall_seconds()
    backend.wait(backend.current_stream(), event, "x")
    backend.synchronize(event)
    assert backend.done(event)
    backend.synchronize()
    once = backend.stall_seconds()
    assert once > before
    backend.wait(backend.current_stream(), event, "x")
    backend.synchronize()
    assert backend.stall_seconds() == once  # nothing to wait for


@pytest.mark.gpu
def test_recycled_events_keep_their_meaning(backend):
    side = backend.new_stream("out")
    target, source = backend.empty(64 * MB), backend.host_empty(64 * MB)
    for value in range(1, 30):
        source.fill_(value)
        backend.copy(target, source, side)
        backend.wait(backend.current_stream(), backend.record(side), "x")
        total = target[::MB].sum()
        backend.wait(side, backend.record(backend.current_stream()), "y")
        assert int(total) == value * 64


@pytest.mark.gpu
def test_memory_figures_versions_and_random_state(backend):
    backend.reset_peak()
    before = backend.allocated()
    buffer = backend.empty(32 * MB)
    assert backend.allocated() - before >= 32 * MB <= backend.peak()
    version = buffer._version
    host = backend.host_empty(32 * MB)
    backend.copy(buffer, host, backend.current_stream())
    backend.synchronize()
    assert buffer._version == version
    state = backend.rng_state()
    first = torch.rand(5, device=backend.device)
    backend.set_rng_state(state)
    assert torch.equal(torch.rand(5, device=backend.device), first)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        backend.empty(backend.limit() * 2)
    assert backend.is_out_of_memory(caught.value)
    assert backend.describe()["memory_bytes"] == backend.limit() > 0


@pytest.mark.gpu
def test_a_host_buffer_of_an_odd_size_costs_no_more_than_its_pages(backend):
    gc.collect()
    runtime, registered = torch.cuda.cudart(), []
    noting = types.SimpleNamespace(
        cudaHostRegister=lambda a, n, f: registered.append(n) or runtime.cudaHostRegister(a, n, f),
        cudaHostUnregister=runtime.cudaHostUnregister,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", lambda: noting)
        buffer = backend.host_empty(33 * MB + 5)
    assert registered == [33 * MB + 5] and buffer.is_pinned()
    del buffer

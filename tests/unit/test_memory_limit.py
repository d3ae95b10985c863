"""`Backend.limit_memory`: the CPU really refuses, accelerators are asked to by torch's own memory fraction."""

import gc
import os
import shutil
import types
import warnings

import pytest
import torch

from mindspeed_mem.device import DeviceError, get_backend, limited_cpu
from mindspeed_mem.device.accelerator import AcceleratorBackend
from mindspeed_mem.device.cuda import CudaBackend
from mindspeed_mem.device.limited_cpu import CompilerError, LimitedMemory
from mindspeed_mem.device.npu import NpuBackend
from mindspeed_mem.device.simulated import SimulatedBackend
from tests.guarding import settled

MB = 1 << 20
HOST = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture
def cpu():
    """The CPU backend; its limit, if a test sets one, is taken off again."""
    backend = get_backend("cpu")
    yield backend
    backend.limit_memory(None)
    assert backend.limit() is backend.allocated() is None


@pytest.fixture
def compiler():
    try:
        LimitedMemory()
    except CompilerError as error:
        pytest.skip(str(error))


def empty(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)


def counted_already():
    """What other tests have allocated under a limit and still hold counts, as it must."""
    gc.collect()
    return LimitedMemory().allocated


def test_the_cpu_refuses_what_is_beyond_the_limit(cpu, compiler):
    limit = counted_already() + 64 * MB
    cpu.limit_memory(limit)
    assert (cpu.limit(), cpu.room()) == (limit, limit - cpu.allocated())
    kept = empty(40 * MB)
    assert cpu.room() <= 24 * MB and cpu.peak() >= 40 * MB
    with pytest.raises(torch.OutOfMemoryError) as caught:
        empty(40 * MB)
    assert cpu.is_out_of_memory(caught.value) and cpu.bytes_wanted(caught.value) == 40 * MB
    del kept
    empty(40 * MB)


def test_a_limit_can_be_changed_and_taken_off(cpu, compiler):
    before = counted_already()
    cpu.limit_memory(before + 64 * MB)
    kept = empty(10 * MB)
    counted = settled(cpu)
    cpu.limit_memory(before + 32 * MB)
    assert cpu.limit() == before + 32 * MB and cpu.allocated() == counted  # it goes on counting
    with pytest.raises(torch.OutOfMemoryError):
        empty(40 * MB)
    cpu.limit_memory(None)
    assert cpu.limit() is cpu.allocated() is None
    empty(40 * MB)
    cpu.limit_memory(before + 16 * MB)  # what was made under the first limit is still counted
    assert cpu.allocated() >= before + kept.nbytes


def test_host_memory_stays_outside(cpu, compiler):
    cpu.limit_memory(counted_already() + 8 * MB)
    before = settled(cpu)
    with cpu.on_host(), limited_cpu.on_host():
        host = [empty(16 * MB), cpu.host_empty(16 * MB)]
    assert cpu.allocated() == before and len(host) == 2


def test_without_a_limit_on_host_changes_nothing(cpu):
    with limited_cpu.on_host(), cpu.on_host():
        assert empty(MB).numel() == MB


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_works_in_host_memory(cpu, compiler):
    """A data loader's, say."""
    cpu.limit_memory(counted_already() + 8 * MB)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that a fork leaves behind
        child = os.fork()
    if child == 0:
        try:
            os._exit(0 if empty(16 * MB).numel() == 16 * MB else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(torch.OutOfMemoryError):
        empty(16 * MB)


def test_without_a_compiler_the_limit_is_a_number(cpu, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    limited_cpu._library.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="limit is not enforced: .* needs a C\\+\\+ compiler"):
            cpu.limit_memory(8 * MB)
    finally:
        limited_cpu._library.cache_clear()
    assert cpu.limit() == 8 * MB and cpu.allocated() is cpu.peak() is cpu.room() is None
    assert empty(16 * MB).numel() == 16 * MB


def test_a_simulated_device_knows_its_limit():
    backend = SimulatedBackend()
    backend.limit_memory(8 * MB)
    with backend.tracker():
        kept = empty(3 * MB)
    assert (backend.limit(), backend.room()) == (8 * MB, 8 * MB - kept.nbytes)


@pytest.mark.parametrize("nbytes", [0, -5, HOST + 1])
def test_impossible_limits_are_refused(cpu, nbytes):
    with pytest.raises(DeviceError, match=f"got {nbytes} bytes; this host has {HOST} bytes: give 1 to {HOST}"):
        cpu.limit_memory(nbytes)
    assert cpu.limit() is None


class Device(types.SimpleNamespace):
    """torch.cuda's memory figures as a stand-in has them: what is asked of it, and what follows."""

    def __init__(self, total, free, reserved, allocated):
        super().__init__(total=total, free=free, reserved=reserved, allocated=allocated, fraction=1.0)

    def current_device(self):
        return 0

    def get_device_properties(self, index):
        return types.SimpleNamespace(total_memory=self.total, pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=1)

    def mem_get_info(self):
        return self.free, self.total

    def memory_reserved(self):
        return self.reserved

    def memory_allocated(self):
        return self.allocated

    def empty_cache(self):
        self.free += self.reserved - self.allocated
        self.reserved = self.allocated

    def set_per_process_memory_fraction(self, fraction, index):
        assert isinstance(fraction, float) and 0 <= fraction <= 1 and index == 0
        self.fraction = fraction

    def memory_stats(self):
        return {}


class Telling(Device):
    """As newer torch does, it also says which fraction is in force: of whole bytes, which is what it keeps."""

    def get_per_process_memory_fraction(self, index):
        return int(self.fraction * self.total) / self.total


class StandIn(CudaBackend):
    """NVIDIA's, on another module."""

    def __init__(self, module):
        AcceleratorBackend.__init__(self, module)

    def describe(self):
        return {}


class StandInNpu(StandIn):
    type, driver_full, perhaps_full = "npu", NpuBackend.driver_full, NpuBackend.perhaps_full


GB = 1 << 30


@pytest.mark.parametrize("kind", [Device, Telling])
@pytest.mark.parametrize("total", [150_754_820_096, 64 * GB, 85_899_345_919])
def test_an_accelerators_limit_is_exact_to_the_byte(kind, total):
    module = kind(total=total, free=total - 2 * GB, reserved=GB, allocated=GB // 2)
    backend = StandIn(module)
    assert backend.limit() == total
    for nbytes in (GB, 3 * GB + 7, 10 * GB + 1, 42_949_672_961, total - 1, total):
        backend.limit_memory(nbytes)
        assert backend.limit() == int(module.fraction * total) == nbytes
    backend.limit_memory(None)
    assert backend.limit() == total and module.fraction == 1.0


@pytest.mark.parametrize("kind", [Device, Telling])
def test_room_is_what_driver_and_limit_leave(kind):
    module = kind(total=80 * GB, free=70 * GB, reserved=8 * GB, allocated=5 * GB)
    backend = StandIn(module)
    assert backend.room() == 73 * GB
    backend.limit_memory(20 * GB)
    assert backend.room() == 15 * GB
    module.free = 2 * GB  # somebody else's
    assert backend.room() == 5 * GB
    module.reserved, module.allocated = 20 * GB, 19 * GB
    assert backend.room() == GB
    backend.limit_memory(10 * GB)  # less than is in use: what is only kept goes back to the driver
    assert (module.reserved, backend.room()) == (19 * GB, 0)


def test_a_fraction_that_somebody_else_has_set_is_seen():
    module = Telling(total=80 * GB, free=70 * GB, reserved=0, allocated=0)
    module.fraction = 0.25
    assert StandIn(module).limit() == StandIn(module).room() == 20 * GB


def test_an_accelerator_refuses_impossible_limits():
    module = Device(total=80 * GB, free=70 * GB, reserved=0, allocated=0)
    for nbytes in (0, 80 * GB + 1):
        with pytest.raises(DeviceError, match=f"got {nbytes} bytes; cuda 0 has {80 * GB} bytes"):
            StandIn(module).limit_memory(nbytes)
    assert module.fraction == 1.0


def test_a_reserve_is_left_to_what_asks_the_driver_itself():
    module = Telling(total=80 * GB, free=78 * GB, reserved=GB, allocated=GB // 2)
    backend = StandIn(module)
    backend.keep_reserve()
    assert backend.limit() == 78 * GB and backend.room() == 78 * GB - GB // 2
    module.free = 70 * GB  # communicators have been made
    backend.keep_reserve()
    assert backend.limit() == 70 * GB and backend.nominal_limit() == 80 * GB
    small = StandIn(Telling(total=8 * GB, free=8 * GB, reserved=0, allocated=0))
    small.keep_reserve()
    assert small.limit() == 8 * GB - GB // 2
    none_left = StandIn(Telling(total=80 * GB, free=GB // 2, reserved=0, allocated=0))
    none_left.keep_reserve()
    assert none_left.limit() == 80 * GB


@pytest.mark.parametrize("kind", [Device, Telling])
def test_the_reserve_is_known_again_whatever_the_fraction_loses_and_goes_with_what_needed_it(kind):
    total = 150_754_820_096
    for taken in range(11 * GB, 11 * GB + 200):  # a byte is lost in some of these
        backend = StandIn(kind(total=total, free=total - taken, reserved=0, allocated=0))
        backend.keep_reserve()
        assert backend.nominal_limit() == total and total - taken - GB - 1 <= backend.limit() <= total - taken - GB
    backend.lift_reserve()
    assert backend.limit() == total
    backend.limit_memory(10 * GB)
    backend.lift_reserve()
    assert backend.limit() == 10 * GB


@pytest.mark.parametrize("kind", [Device, Telling])
def test_a_limit_that_somebody_has_asked_for_is_kept_whatever_reserve_it_leaves(kind):
    backend = StandIn(kind(total=80 * GB, free=80 * GB, reserved=0, allocated=0))
    for nbytes in (10 * GB, 80 * GB):
        backend.keep_reserve()
        backend.limit_memory(nbytes)
        backend.keep_reserve()
        assert backend.limit() == backend.nominal_limit() == nbytes
    backend.limit_memory(None)
    backend.keep_reserve()
    assert backend.limit() == 79 * GB


FULL = [
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 4194304 bytes",
    "HIP error: out of memory",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDA error: cudaErrorMemoryAllocation",
    "CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY",
    "CUDA error: CURAND_STATUS_ALLOCATION_FAILED",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "HIP error: hipErrorOutOfMemory",
    "CUDA error: rocblas_status_memory_error when calling `rocblas_gemm_ex`",
    "miopen error: miopenStatusAllocFailed",
]
FULL_NPU = [
    "NPU out of memory. Tried to allocate 2.00 GiB",
    "NPU function error: call aclnnMatmul failed, error code is 207001",
    "ACL stream synchronize failed: ACL_ERROR_RT_MEMORY_ALLOCATION",
    "EI0007: Failed to allocate resource[DeviceMemory] with info [size:209715200 Byte]",
    "[Malloc][Mem]errNo[0x0000000005010003] aclrtMallocWithCfg failed, Reason: out of memory, return[207001]",
]
HCCL = "HCCL function error: HcclAllReduce, error code is 3"


def test_what_libraries_say_when_the_driver_has_no_memory_is_out_of_memory():
    module = Device(total=80 * GB, free=GB // 4, reserved=79 * GB, allocated=70 * GB)
    backend = StandIn(module)
    assert [text for text in FULL if not backend.is_out_of_memory(RuntimeError(text))] == []
    assert backend.is_out_of_memory(torch.distributed.DistBackendError(FULL[3]))
    assert backend.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    other = [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("rank 1 ran out of device memory: 5 bytes of device memory are needed in aten.mm"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        RuntimeError("DataLoader worker (pid 5) is killed by signal: Killed. It may be out of memory"),
        ValueError(FULL[0]),
    ]
    assert [error for error in other if backend.is_out_of_memory(error)] == []


def test_what_an_npus_libraries_say():
    module = Device(total=64 * GB, free=GB // 4, reserved=63 * GB, allocated=60 * GB)
    backend = StandInNpu(module)
    assert [text for text in FULL_NPU if not backend.is_out_of_memory(RuntimeError(text))] == []
    assert not backend.is_out_of_memory(RuntimeError(FULL[0]))  # another device's
    assert not StandIn(module).is_out_of_memory(RuntimeError(FULL_NPU[1]))
    other = [
        "NPU function error: call aclrtSynchronizeStream failed, error code is 507011",
        "HCCL timeout",
        HCCL + "04",
    ]
    assert [text for text in other if backend.is_out_of_memory(RuntimeError(text))] == []
    assert backend.is_out_of_memory(RuntimeError(HCCL))
    module.free = 20 * GB
    assert not backend.is_out_of_memory(RuntimeError(HCCL))  # host memory, or another reason


def test_a_handle_that_could_not_be_made_is_out_of_memory_only_where_the_driver_has_little():
    module = Device(total=80 * GB, free=GB // 4, reserved=79 * GB, allocated=70 * GB)
    error = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    assert StandIn(module).is_out_of_memory(error)
    module.free = 20 * GB
    assert not StandIn(module).is_out_of_memory(error)


def test_what_the_allocator_keeps_can_be_given_back_and_its_retries_are_counted():
    module = Device(total=80 * GB, free=GB, reserved=70 * GB, allocated=60 * GB)
    backend = StandIn(module)
    assert backend.give_back() == 10 * GB and backend.give_back() == 0 and module.free == 11 * GB
    assert backend.allocation_retries() == 0  # nothing allocated yet
    module.memory_stats = lambda: {"num_alloc_retries": 4}
    assert backend.allocation_retries() == 4
    assert get_backend("cpu").give_back() == get_backend("cpu").allocation_retries() == 0


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ({"CUDA": "max_split_size_mb:512, expandable_segments: True"}, None),
        ({"": "expandable_segments:True"}, None),
        ({"": "max_split_size_mb:512"}, "PYTORCH_ALLOC_CONF=max_split_size_mb:512,expandable_segments:True"),
        (
            {"CUDA": "pin_memory_expandable_segments:True", "": "expandable_segments:True"},
            "PYTORCH_CUDA_ALLOC_CONF=pin_memory_expandable_segments:True,expandable_segments:True",
        ),
    ],
)
def test_a_setting_against_memory_in_pieces_is_named_where_it_is_absent(monkeypatch, settings, advice):
    from mindspeed_mem.device.cuda import CudaBackend

    for name in CudaBackend.allocator_variables:
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(f"PYTORCH_{name}_ALLOC_CONF" if name else "PYTORCH_ALLOC_CONF", value)
    monkeypatch.setattr(CudaBackend, "foreign_allocator", lambda self: None)
    assert CudaBackend().against_pieces() == advice
    monkeypatch.setattr(CudaBackend, "foreign_allocator", lambda self: "another")
    assert CudaBackend().against_pieces() is None


def test_the_pci_address_is_written_as_the_kernel_does():
    module = Device(total=GB, free=GB, reserved=0, allocated=0)
    assert StandIn(module).pci_address() == "0000:3b:01.0"
    module.get_device_properties = lambda index: types.SimpleNamespace(total_memory=GB)
    assert StandIn(module).pci_address() is None


@pytest.mark.gpu
def test_a_gpu_refuses_what_is_beyond_the_limit():
    backend = get_backend("cuda")
    torch.cuda.empty_cache()
    before = settled(backend)
    try:
        backend.limit_memory(before + 512 * MB)
        assert backend.limit() == before + 512 * MB and backend.room() <= 512 * MB
        kept = backend.empty(256 * MB)
        with pytest.raises(torch.OutOfMemoryError):
            backend.empty(512 * MB)
        assert backend.room() <= 256 * MB and kept.is_cuda
    finally:
        backend.limit_memory(None)
    assert backend.limit() == torch.cuda.get_device_properties(0).total_memory
    backend.empty(512 * MB)
    address = backend.pci_address()
    assert address is None or os.path.exists(f"/sys/bus/pci/devices/{address}") or not os.path.exists("/sys/bus/pci")


@pytest.mark.gpu
def test_a_gpu_keeps_a_reserve_counts_retries_and_gives_back():
    backend = get_backend("cuda")
    torch.cuda.empty_cache()
    retries = backend.allocation_retries()
    try:
        backend.keep_reserve()
        assert 0 < backend.limit() < torch.cuda.get_device_properties(0).total_memory
        backend.limit_memory(torch.cuda.memory_reserved() + 512 * MB)  # other tests may have left pieces of blocks
        kept = [backend.empty(100 * MB) for _ in range(4)]
        del kept
        backend.empty(300 * MB)  # in fixed segments it fits only once the pieces are given back
        assert (backend.allocation_retries() > retries) == (backend.against_pieces() is not None)
        assert backend.give_back() >= 300 * MB
    finally:
        backend.limit_memory(None)

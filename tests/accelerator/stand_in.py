"""Makes the accelerator ``torch.cuda`` (in a CPU build of torch) or ``torch.npu`` (with a ``torch_npu``).

A process has one, from its start to its end, and must not have imported torch before: torch asks only once whether
there is CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.accelerator import process_group

CAPABILITY = (9, 0)


def start(kind: str, library: Path, gib: float = 2.0) -> None:
    """Load the accelerator into this process.

    Args:
        kind: "cuda" or "npu".
        library: what `tests.accelerator.building.library` has made.
        gib: memory of each of its two devices.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the accelerator has to be loaded before torch is imported")
    os.environ.update(ACCELERATOR_KIND=kind, ACCELERATOR_GIB=str(gib))
    _load_libraries_of_torch()
    ctypes.CDLL(str(library))
    import torch

    if kind == "npu":
        torch.utils.rename_privateuse1_backend("npu")
        module = types.ModuleType("torch.npu")
        sys.modules["torch.npu"] = module
        torch._register_device_module("npu", module)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        npu = types.ModuleType("torch_npu")
        npu.__version__ = torch.__version__.split("+")[0]
        npu.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
        npu._C = types.SimpleNamespace(_npu_getCurrentStream=_number_of_current_stream)
        sys.modules["torch_npu"] = npu
    else:
        module = torch.cuda
        torch.version.cuda = "12.8"
        torch.backends.cuda.is_built = lambda: True
        torch._C._cuda_getDevice = torch.accelerator.current_device_index
        torch._C._cuda_getAllocatorBackend = lambda: "native"
        torch._C._cuda_getCurrentStream = _number_of_current_stream
        module.graphs._cuda_isCurrentStreamCapturing = lambda: False  # it has no graphs
        torch.UntypedStorage.resize_ = _resizing(torch.UntypedStorage.resize_)
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # there is nothing to generate code for
    for name, member in _members(kind).items():
        setattr(module, name, member)
    if kind == "cuda":
        for name in ("memory", "random", "streams"):
            part = getattr(module, name)
            for member in _members(kind).keys() & vars(part).keys():
                setattr(part, member, getattr(module, member))
    torch.ops.accelerator.initialise()
    process_group.install(kind)


def _number_of_current_stream(device: int) -> tuple[int, int, int]:
    import torch

    stream = torch.accelerator.current_stream(device)
    return stream.stream_id, stream.device_index, stream.device_type


@contextlib.contextmanager
def lagging(compute: int = 0, side: int = 0, random: int = 0, seed: int = 0) -> Iterator[None]:
    """Inside, each piece of work starts so many microseconds late, on default and on side streams; `random`: up to so
    many more."""
    import torch

    torch.ops.accelerator.set_lags(compute, side, random, seed)
    try:
        yield
    finally:
        torch.ops.accelerator.set_lags(0, 0, 0, 0)


@contextlib.contextmanager
def promised() -> Iterator[None]:
    """Inside, the host may not wait for the device, nor ask the driver for memory, nor pin any: that raises."""
    import torch

    torch.ops.accelerator.promise(True)
    try:
        yield
    finally:
        torch.ops.accelerator.promise(False)
        check()


def counters() -> dict[str, int]:
    """What has been counted since `reset_counters`: operators, copies, host synchronisations, allocations."""
    import torch

    return dict(torch.ops.accelerator.counters())


def reset_counters() -> None:
    """Let all `counters` start again at 0."""
    import torch

    torch.ops.accelerator.reset_counters()


def check() -> None:
    """Raise RuntimeError for what went wrong where nothing could be raised."""
    import torch

    faults = torch.ops.accelerator.faults()
    if faults:
        raise RuntimeError("accelerator: " + "; ".join(faults))


def _load_libraries_of_torch() -> None:
    folder = Path(importlib.machinery.PathFinder.find_spec("torch").origin).parent / "lib"
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)


def _resizing(native: Any) -> Any:
    """torch's own refuses CUDA storages in a CPU build."""
    import torch

    def resize_(self, size: int) -> Any:
        if self.device.type != "cuda":
            return native(self, size)
        whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        torch.ops.accelerator.resize_storage(whole, size)
        return self

    return resize_


def _members(kind: str) -> dict[str, Any]:
    """What torch.cuda and torch.npu have and this accelerator can do."""
    import torch

    own = torch.ops.accelerator

    def index(device: Any = None) -> int:
        if device is None:
            return torch.accelerator.current_device_index()
        if isinstance(device, int):
            return device if device >= 0 else torch.accelerator.current_device_index()
        found = torch.device(device).index
        return torch.accelerator.current_device_index() if found is None else found

    def figures(device: Any = None) -> dict[str, int]:
        return dict(own.memory_figures(index(device)))

    class Stream(torch.Stream):
        def __new__(cls, device=None, priority=0, **known):
            if "stream_id" in known:
                return super().__new__(cls, **known)
            return super().__new__(cls, device=torch.device(kind, index(device)), priority=priority)

        def __hash__(self):
            return hash((self.stream_id, self.device_index))

        def __eq__(self, other):
            same = isinstance(other, torch.Stream)
            return same and (other.stream_id, other.device_index) == (self.stream_id, self.device_index)

        def wait_event(self, event):
            event.wait(self)

        def wait_stream(self, stream):
            self.wait_event(Stream.record_event(stream))

        def record_event(self, event=None):
            event = Event() if event is None else event
            event.record(self)
            return event

    class Event:
        """Holds a torch.Event: its own methods take exactly that type, and no class derived from it."""

        def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
            self.native = torch.Event(device=torch.device(kind), enable_timing=enable_timing, blocking=blocking)
            self.times = enable_timing

        def record(self, stream=None):
            self.native.record(torch.accelerator.current_stream() if stream is None else stream)

        def wait(self, stream=None):
            self.native.wait(torch.accelerator.current_stream() if stream is None else stream)

        def query(self):
            return self.native.query()

        def synchronize(self):
            self.native.synchronize()

        def elapsed_time(self, other):
            if not (self.times and other.times):
                raise RuntimeError("both events must be created with enable_timing=True")
            return self.native.elapsed_time(other.native)

    def as_stream(stream: torch.Stream) -> Stream:
        return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)

    def current_stream(device: Any = None) -> Stream:
        return as_stream(torch.accelerator.current_stream(index(device)))

    def default_stream(device: Any = None) -> Stream:
        found = torch.accelerator.current_stream(index(device))
        return Stream(stream_id=0, device_index=found.device_index, device_type=found.device_type)

    @contextlib.contextmanager
    def stream(entered: torch.Stream | None) -> Iterator[None]:
        if entered is None:
            yield
            return
        before, device = torch.accelerator.current_stream(entered.device_index), index()
        torch.accelerator.set_stream(entered)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_device_index(device)

    class OfDevice:
        def __init__(self, device):
            self.wanted = index(device)

        def __enter__(self):
            self.before = index()
            torch.accelerator.set_device_index(self.wanted)

        def __exit__(self, *exc):
            torch.accelerator.set_device_index(self.before)

    class Properties:
        name, major, minor = "accelerator of the tests", *CAPABILITY
        total_memory = figures(0)["total"]
        multi_processor_count = 1
        pci_domain_id = pci_bus_id = pci_device_id = 0

    fractions = {0: 1.0, 1: 1.0}

    def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
        fractions[index(device)] = fraction
        own.set_limit(index(device), int(fraction * Properties.total_memory))

    def memory_stats(device: Any = None) -> dict[str, int]:
        now = figures(device)
        return {
            "num_alloc_retries": now["retries"],
            "num_ooms": now["out_of_memory"],
            "allocation.all.current": now["blocks"],
            "allocated_bytes.all.current": now["allocated"],
            "allocated_bytes.all.peak": now["peak"],
            "reserved_bytes.all.current": now["reserved"],
            "reserved_bytes.all.peak": now["peak_reserved"],
        }

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        now = figures(device)
        return now["total"] - now["reserved"], now["total"]

    def generator(device: Any = None) -> torch.Generator:
        return own.default_generator(index(device))

    class Runtime:  # of CUDA
        cudaHostRegister = staticmethod(lambda address, nbytes, flags: own.host_register(address, nbytes))
        cudaMemGetInfo = staticmethod(mem_get_info)

        @staticmethod
        def cudaHostUnregister(address: int) -> int:
            own.host_unregister(address)
            return 0

    def manual_seed_all(seed: int) -> None:
        for device in fractions:
            generator(device).manual_seed(seed)

    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "stream": stream,
        "set_stream": torch.accelerator.set_stream,
        "synchronize": lambda device=None: torch.accelerator.synchronize(index(device)),
        "device": OfDevice,
        "current_device": index,
        "set_device": lambda device: torch.accelerator.set_device_index(index(device)),
        "device_count": lambda: len(fractions),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "get_device_properties": lambda device=None: Properties,
        "get_device_name": lambda device=None: Properties.name,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "memory_allocated": lambda device=None: figures(device)["allocated"],
        "max_memory_allocated": lambda device=None: figures(device)["peak"],
        "memory_reserved": lambda device=None: figures(device)["reserved"],
        "max_memory_reserved": lambda device=None: figures(device)["peak_reserved"],
        "reset_peak_memory_stats": lambda device=None: own.reset_peak(index(device)),
        "memory_stats": memory_stats,
        "memory_stats_as_nested_dict": lambda device=None: {"num_alloc_retries": figures(device)["retries"]},
        "empty_cache": lambda: own.empty_cache(),
        "ipc_collect": lambda: None,
        "mem_get_info": mem_get_info,
        "set_per_process_memory_fraction": set_per_process_memory_fraction,
        "get_per_process_memory_fraction": lambda device=None: fractions[index(device)],
        "get_rng_state": lambda device=None: generator(device).get_state(),
        "set_rng_state": lambda state, device=None: generator(device).set_state(state),
        "get_rng_state_all": lambda: [generator(device).get_state() for device in fractions],
        "set_rng_state_all": lambda states: [generator(i).set_state(s) for i, s in enumerate(states)],
        "manual_seed": lambda seed: generator().manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "initial_seed": lambda: generator().initial_seed(),
        "default_generators": tuple(generator(device) for device in fractions),
        "cudart": lambda: Runtime,
    }

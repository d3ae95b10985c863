"""Gloo ranks for tests: processes that start once per pytest session, when first needed, and take case after case.

    def case(tp):                                  # a top-level function of an importable module
        with parallel(tp=tp):
            return float(train_step(build_gpt("dense")).loss)

    losses = on_ranks(2, case, 2)                  # what each rank returned, in rank order

Ranks apply the CPU patches, then import megatron.core, then take their first case. With `device="cuda"` or "npu" they
are other processes, in which tests.accelerator stands in for that device, and nothing is patched. Each case gets a
process group of its own, which is the default one. An exception on a rank is raised here as `RankError` with its
traceback; a rank that dies or does not answer in time has its stack printed into the error, and all ranks of that case
are replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import fnmatch
import functools
import gc
import importlib
import inspect
import io
import itertools
import multiprocessing
import os
import pickle
import pkgutil
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, forkserver, popen_forkserver
from pathlib import Path
from typing import Any
from unittest import mock

MOST_THREADS = 150  # what a trained model leaves behind costs time even when idle: then a new process is cheaper
GRACE = 10  # seconds that the other ranks have after one has failed
NEEDED = """torch._dynamo megatron.core.dist_checkpointing megatron.core.distributed megatron.core.models.gpt
megatron.core.models.gpt.gpt_layer_specs megatron.core.optimizer megatron.core.pipeline_parallel""".split()
"""What nearly every case imports."""
FORKED = multiprocessing.get_context("forkserver")
REAL = os.environ.get("TESTS_ON")
"""The real device that all ranks take (`--on`), else None."""
_ranks: defaultdict[str | None, list[_Rank]] = defaultdict(list)  # by device
_servers: dict[str | None, Server] = {}
_folder: Path | None = None
_store: Any = None  # where ranks find each other: faster than files, which they would ask again and again
_serial = itertools.count()


Answer = tuple[bool, Any, bool]
"""Whether it went well, the pickled result or the error, and whether a model is left behind."""


class RankError(AssertionError):
    """A case failed on a rank; the message holds the traceback or, for a rank that was stopped, its stack."""


def on_ranks(
    size: int, function: Callable, *args: Any, timeout: float = 180, device: str | None = None, **kwargs: Any
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on `size` ranks at once; returns their results in rank order.

    Function, arguments and results are pickled, tensors by value, those of a device as the host's. The process group
    gives up after `timeout` seconds. On the accelerator (`device`: "cuda", "npu") a fault that nobody has raised by the
    end of the case fails it.
    """
    if REAL is not None:
        device = _real(size)
    while len(_ranks[device]) < size:
        _ranks[device].append(_start(device))
    ranks = _ranks[device][:size]
    case = pickle.dumps((function, args, kwargs))
    meeting = f"group{next(_serial)}", _store.port
    for number, rank in enumerate(ranks):
        with contextlib.suppress(OSError):  # dead already: found below
            rank.pipe.send_bytes(pickle.dumps((number, size, meeting, timeout, case)))
    answers = _answers(ranks, timeout)
    if any(answer is None for answer in answers):
        silent = "\n".join(ranks[number].last_words(number) for number in range(size) if answers[number] is None)
        _stop(ranks)
    else:
        silent = ""
        for rank in ranks:  # only now: a rank that leaves its group early would break the others' last operations
            rank.pipe.send_bytes(b"leave")
        alive = [answer is not None and answer[2] for answer in answers]
        _stop([rank for rank, left in zip(ranks, alive, strict=True) if left or rank.threads() > MOST_THREADS])
    errors = [answer[1] for answer in answers if answer is not None and not answer[0]]
    if errors and device:  # its streams may wait for each other for ever
        _stop([rank for rank in ranks if rank in _ranks[device]])
    if errors or silent:
        raise RankError("\n".join([*errors, silent]))
    return [pickle.loads(answer[1]) for answer in answers]


def _real(size: int) -> str:
    """The device of these ranks, one each."""
    import pytest
    import torch

    if size > (there := torch.get_device_module(REAL).device_count()):
        pytest.skip(f"for {size} ranks with a device each, and there are {there}")
    return REAL


def take(device: str) -> None:
    """Let ranks that start from now on take this real device, and this process use reproducible kernels on it."""
    import torch

    global REAL
    REAL = device
    os.environ["TESTS_ON"] = os.environ["ACCELERATOR_KIND"] = device
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # takes time


@contextlib.contextmanager
def parallel(
    tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, seed: int = 1234, **more: Any
) -> Iterator[None]:
    """Megatron's parallel groups and random number tracker over the ranks of this case; what is left over is data
    parallel. ``more`` goes to ``parallel_state.initialize_model_parallel``.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from torch.distributed import distributed_c10d

    parallel_state.initialize_model_parallel(tp, pp, vpp, expert_model_parallel_size=ep, **more)
    try:
        torch.manual_seed(seed)
        seed_tracker(seed)
        yield
    finally:
        groups = [one for one in distributed_c10d._world.pg_map if one is not torch.distributed.group.WORLD]
        unset_num_microbatches_calculator()
        parallel_state.destroy_global_memory_buffer()
        parallel_state.destroy_model_parallel()
        parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None  # before 0.13 that leaves them, for the next layout
        for group in list(distributed_c10d._world.pg_map):  # their threads cost time, and a case may make hundreds
            if group is not torch.distributed.group.WORLD:
                torch.distributed.destroy_process_group(group)
        group = None
        ends = [threading.Thread(target=groups.pop) for _ in groups]  # each waits for its threads, up to 10 ms
        for end in ends:
            end.start()
        for end in ends:
            end.join()


def known(function: Callable, **given: Any) -> dict[str, Any]:
    """Those arguments that the installed version's function takes."""
    return {name: value for name, value in given.items() if name in inspect.signature(function).parameters}


def prepare(device: str | None = None) -> None:
    """What is the same on every rank before its first case."""
    import torch

    torch.set_num_threads(1)
    apply_cpu_patches(device)
    for module in NEEDED:
        importlib.import_module(module)
    gc.freeze()  # cases collect garbage all the time, which takes 0.2 s where it looks through all these modules


def share_one_loop() -> None:
    """Let all gloo groups of this process share one thread that waits for messages.

    Each has one of its own otherwise, which wakes up a hundred times a second, and Megatron makes dozens of groups: an
    eighth of all that tests on several ranks took of the processor.
    """
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    native, device = ProcessGroupGloo.__init__, functools.cache(ProcessGroupGloo.create_default_device)

    def init(self, store, rank, size, timeout=datetime.timedelta(minutes=30)) -> None:
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [device()], timeout
        native(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = init


def seed_tracker(seed: int) -> None:
    """Megatron's random number tracker, anew."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed as manual_seed

    manual_seed(seed, **known(manual_seed, force_reset_rng=True))


def apply_cpu_patches(device: str | None = None) -> list[str]:
    """Apply all CPU repairs in this process, for a `device` only those of a Megatron without TransformerEngine; returns
    the names of the patch modules."""
    from mindspeed_mem.patching import REGISTRY

    modules = patch_modules("cpu_*" if device is None else "cpu_megatron_core")
    REGISTRY.apply(modules)
    return modules


@contextlib.contextmanager
def applied(*patterns: str) -> Iterator[list[str]]:
    """The patch files that match, such as "sdpa_attention", applied on this rank and undone at the end; with them what
    makes the events for those that listen to passes."""
    from mindspeed_mem.patching import REGISTRY

    modules = patch_modules(*patterns)
    before = {patch.declared_by for patch in REGISTRY.patches if patch.status in ("waiting", "applied", "resting")}
    new = [module for module in (*patch_modules("pass_events"), *modules) if module not in before]
    REGISTRY.apply(new)
    try:
        yield modules
    finally:
        REGISTRY.undo(new)


def patch_modules(*patterns: str) -> list[str]:
    """The names of the modules of mindspeed_mem.patches that match these shell patterns, imported."""
    import mindspeed_mem.patches as patches

    names = [module.name for module in pkgutil.iter_modules(patches.__path__)]
    found = []
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        assert matching, f"no patch file matches {pattern!r}"
        found += matching
    return [importlib.import_module(f"{patches.__name__}.{name}").__name__ for name in dict.fromkeys(found)]


@dataclass
class _Rank:
    """One process and our end of its pipe."""

    process: multiprocessing.Process
    pipe: connection.Connection
    log: Path

    def threads(self) -> int:
        try:
            return len(os.listdir(f"/proc/{self.process.pid}/task"))
        except OSError:
            return 0

    def last_words(self, number: int) -> str:
        """Why it does not answer: the end of what it printed in this case, with its stack if it is alive."""
        self.process.join(0.5)
        state = "did not answer in time" if self.process.is_alive() else f"died ({self.process.exitcode})"
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        tail = self.log.read_text(errors="replace").splitlines()[-60:] if self.log.exists() else []
        return "\n".join([f"rank {number} {state}; the end of its output:", *tail])


class Server(forkserver.ForkServer):
    """Imports what ranks need once, after it has loaded the accelerator if they are to have it, and forks each of them.

    Python's own is one for all that a process starts.
    """

    read_signed = staticmethod(forkserver.read_signed)

    def __init__(self, device: str | None):
        super().__init__()
        self.set_forkserver_preload(["tests.rank_imports"])
        if device:
            from tests.accelerator import building

            os.environ.update(RANKS_DEVICE=device, RANKS_LIBRARY=str(building.library(device)))
        self.ensure_running()
        for name in ("RANKS_DEVICE", "RANKS_LIBRARY"):
            os.environ.pop(name, None)


def _process(device: str | None, *args: Any) -> multiprocessing.Process:
    """Not a daemon: daemons may not start processes, as distributed checkpoints do."""
    if REAL is not None and device:  # no process may be forked from one that has used it
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=args)
        process.start()
        return process
    if device not in _servers:
        _servers[device] = Server(device)
    process = FORKED.Process(target=_serve, args=args)
    with mock.patch.object(popen_forkserver, "forkserver", _servers[device]):
        process.start()
    return process


def _start(device: str | None) -> _Rank:
    global _folder, _store
    if _folder is None:
        from torch.distributed import TCPStore

        _folder, _store = Path(tempfile.mkdtemp(prefix="ranks")), TCPStore("127.0.0.1", 0, is_master=True)
        atexit.register(_finish)
    ours, theirs = FORKED.Pipe()
    log = _folder / f"process{next(_serial)}.log"
    process = _process(device, theirs, str(log), device)
    theirs.close()
    return _Rank(process, ours, log)


def _answers(ranks: list[_Rank], timeout: float) -> list[Answer | None]:
    """Each rank's answer; None from a dead or silent one."""
    answers: list[Answer | None] = [None] * len(ranks)
    waiting = {rank.pipe: index for index, rank in enumerate(ranks)}
    end = time.monotonic() + timeout
    while waiting and time.monotonic() < end:
        for pipe in connection.wait(list(waiting), max(0.0, end - time.monotonic())):
            index = waiting.pop(pipe)
            with contextlib.suppress(EOFError, OSError):
                answers[index] = pickle.loads(pipe.recv_bytes())
            if answers[index] is None or not answers[index][0]:
                end = min(end, time.monotonic() + GRACE)
    return answers


def _stop(ranks: list[_Rank]) -> None:
    """Kill these processes, and those that they started; the next case starts others."""
    for rank in ranks:
        rank.process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        rank.process.join()
        rank.pipe.close()
    for pool in _ranks.values():
        pool[:] = [rank for rank in pool if rank not in ranks]


def _finish() -> None:
    _stop([rank for pool in _ranks.values() for rank in pool])
    shutil.rmtree(_folder, ignore_errors=True)


def _serve(pipe: connection.Connection, log: str, device: str | None) -> None:
    """A rank's life: answer cases until the pipe closes. Distributed checkpoints leave processes that outlive it."""
    os.setpgrp()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    if REAL is not None:
        take(REAL)
    share_one_loop()
    prepare(device)
    with contextlib.suppress(EOFError):
        while True:
            case = pickle.loads(pipe.recv_bytes())
            os.truncate(log, 0)
            pipe.send_bytes(pickle.dumps(_answer(device, *case)))
            pipe.recv_bytes()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()


def _answer(
    device: str | None, number: int, size: int, meeting: tuple[str, int], timeout: float, case: bytes
) -> Answer:
    import torch
    import torch.distributed as dist

    from mindspeed_mem.device import get_backend

    environment = dict(os.environ)
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    try:
        limit = datetime.timedelta(seconds=timeout)
        if device:
            torch.get_device_module(device).set_device(number % torch.get_device_module(device).device_count())
        backend = get_backend(device or "cpu").collectives
        name, port = meeting
        store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, timeout=limit))
        dist.init_process_group(backend, store=store, rank=number, world_size=size, timeout=limit)
        function, args, kwargs = pickle.loads(case)
        result = _pickled(function(*args, **kwargs))
        if device:
            torch.get_device_module(device).synchronize()  # raises what happened on streams
            if REAL is None:
                sys.modules["tests.accelerator.stand_in"].check()
        well = True
    except BaseException:
        well, result = False, f"rank {number} of {size}:\n{traceback.format_exc()}"
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    if "tests.models" in sys.modules:
        sys.modules["tests.models"].forget_routing()
    apply_cpu_patches(device)  # a case that configures the pack has undone them at its end
    gc.collect()
    gc.freeze()  # what is left by now stays
    return well, result, _model_is_alive()


def _model_is_alive() -> bool:
    """Whether layers are known that a case has left behind, as megatron-core's distributed optimizer with overlap does:
    the next case would find them."""
    regions = sys.modules.get("mindspeed_mem.activation.regions")
    return regions is not None and bool(regions.tagged_layers())


def _storage(content: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(content), weights_only=False)


def _pickled(result: Any) -> bytes:
    """With tensors of a device as the host's."""
    import torch

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            if isinstance(value, torch.UntypedStorage | torch.TypedStorage):
                # megatron-core 0.18 puts a function of its own there, which needs triton in whoever reads it.
                return _storage, value.__reduce__()[1]
            return NotImplemented

    target = io.BytesIO()
    Pickler(target).dump(result)
    return target.getvalue()


def _die_with_parent() -> None:
    connection.wait([multiprocessing.parent_process().sentinel])
    os.killpg(0, signal.SIGKILL)

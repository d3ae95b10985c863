"""What ranks tell each other: objects, numbers, parts of a tensor. One rank alone needs no group."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mindspeed_mem.device import get_backend

logger = logging.getLogger(__name__)
Number = TypeVar("Number", int, float)
PATIENCE = 60
"""Seconds after which ranks that wait for others say so."""
_WAITING = (
    "rank %s has waited %s s for what the other ranks say. If it does not go on, some rank was started without the "
    "flags of this package that this one has, or hangs elsewhere: give all ranks the same"
)


class Alone:
    """Stands for the process group where there is none: one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def is_initialized() -> bool:
    """Whether there are ranks at all."""
    return dist.is_available() and dist.is_initialized()


def number() -> int:
    """Of this rank; 0 without others."""
    return dist.get_rank() if is_initialized() else 0


def count() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if is_initialized() else 1


def gather(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The object `mine` of all ranks of `group` (None: of all there are), in their order, on all of them. Collective.

    Nothing is sent where there is one.
    """
    if not is_initialized() or dist.get_world_size(group) == 1:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    with _told_while_waiting():
        dist.all_gather_object(everyone, mine, group=group)
    return everyone


@contextlib.contextmanager
def _told_while_waiting() -> Iterator[None]:
    """A rank that was started without our flags never comes: it knows nothing of us, so whoever waits says so."""
    told = threading.Timer(PATIENCE, logger.warning, (_WAITING, number(), PATIENCE))
    told.daemon = True
    told.start()
    try:
        yield
    finally:
        told.cancel()


def to_first(mine: Any) -> list[Any]:
    """The same of all ranks, on rank 0; empty elsewhere. For what would be large if every rank had it. Collective."""
    if not is_initialized() or dist.get_world_size() == 1:
        return [mine]
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone, dst=0)
    return everyone or []


def collectives() -> int | None:
    """How many collectives this rank has begun in groups of several ranks; None where nobody counts them."""
    if not is_initialized():
        return 0
    try:
        groups = [group for group in dist.distributed_c10d._world.pg_map if group.size() > 1]
        return sum(group._get_sequence_number_for_group() for group in groups)  # type: ignore[attr-defined]  # no stub
    except (AttributeError, RuntimeError):
        return None


def combined(numbers: Sequence[Number], op: Any, group: Any, device: torch.device | str) -> list[Number]:
    """`numbers` of all ranks of `group`, combined by `op` element by element. Collective.

    Args:
        numbers: all whole, and exact in int64; or in fp64 where `device` has it.
        op: of torch.distributed.ReduceOp.
        group: torch's, `Alone`, or None for this rank alone.
        device: on which the ranks' collectives work; gloo's work on the host.
    """
    if group is None or group.size() == 1 or not numbers:
        return list(numbers)
    gloo = dist.get_backend(group) == "gloo"
    device = torch.device("cpu" if gloo else device)
    whole = all(isinstance(number, int) for number in numbers)
    real = torch.float64 if gloo or get_backend(device.type).sums_float64 else torch.float32
    held = torch.tensor(numbers, dtype=torch.int64 if whole else real, device=device)
    dist.all_reduce(held, op=op, group=group)
    return held.tolist()


def reduce_scatter(own: torch.Tensor, whole: torch.Tensor, group: Any) -> dist.Work:
    """Start to sum `whole` [n] over the ranks into `own` [n / ranks], which may be this rank's part of it."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    return getattr(dist, name)(own, whole, group=group, async_op=True)


def all_gather(whole: torch.Tensor, own: torch.Tensor, group: Any) -> None:
    """Fill `whole` [n] with the parts `own` [n / ranks] of all ranks."""
    if group.size() == 1:
        if own.data_ptr() != whole.data_ptr():
            whole.copy_(own)
        return
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(whole, own, group=group)


def leave() -> None:
    """The end of a script: take the ranks down together, if that was not done. Collective."""
    if is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    let_gloo_finish()


def leave_at_exit() -> None:
    """When this process ends, take the ranks down together, unless the script has done it: until then it may use its
    groups. Where another rank has failed, nobody waits for it long."""
    atexit.unregister(_leave)
    atexit.register(_leave)


def _leave() -> None:
    if is_initialized() and dist.get_backend() == "gloo":
        with contextlib.suppress(RuntimeError):  # another rank has failed: do not wait for it
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=10))  # else its last messages may be lost
        dist.destroy_process_group()
    let_gloo_finish()


def let_gloo_finish(seconds: float = 5.0) -> None:
    """Wait until gloo's threads sleep, for at most so many seconds.

    After a collective, when nobody waits for it any more, they let go of its tensors, and that takes the GIL: a thread
    that asks for it when the interpreter has ended aborts the process. `destroy_process_group` joins them only where
    nobody holds the group; meshes of torch and globals of Megatron do.
    """
    end, before = time.monotonic() + seconds, None
    while time.monotonic() < end:
        seen = _gloo_threads()
        if seen is None:
            return time.sleep(0.1)
        if seen == before and all("S (sleeping)" in states for states in seen):
            return None
        before = seen
        time.sleep(0.002)  # whoever waits for the GIL has it now, and has run when we look again
    return None


def _gloo_threads() -> list[tuple[str, ...]] | None:
    """What the system says of each: what it does, and how often it was taken up; None where it does not say."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return None
    found = []
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):  # one that has just ended
            lines = (task / "status").read_text().splitlines()
            if lines[0].endswith("pt_gloo_runloop"):
                found.append(tuple(line.partition(":")[2].strip() for line in lines if line.startswith(_TOLD)))
    return found


_TOLD = ("Pid", "State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")

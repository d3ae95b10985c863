"""The accelerator's process groups, under the names "nccl" and "hccl": see ``csrc/process_group.h``."""

from __future__ import annotations

import types
from datetime import timedelta
from typing import Any


def install(kind: str) -> None:
    """Let `torch.distributed` have them; torch is imported here."""
    import torch
    from torch._C._distributed_c10d import Backend
    from torch.distributed import distributed_c10d as c10d

    def options(backend: Any) -> types.SimpleNamespace:
        """Torch gives Python none of a backend that it does not know; a timeout is all that somebody reads."""
        if backend.name() not in ("nccl", "hccl"):
            raise AttributeError("options")
        return types.SimpleNamespace(_timeout=timedelta(milliseconds=backend.memory_stats()["timeout"]))

    Backend.options = property(options)

    def made(name: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """A Backend of C++, which torch itself registers in its process group."""
        holder = c10d.ProcessGroup(store, rank, size)
        gloo = c10d.ProcessGroupGloo(store, rank, size, timeout)
        holder._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, gloo)
        milliseconds = int(timeout.total_seconds() * 1000)
        torch.ops.accelerator.add_to_group(holder.boxed(), name, milliseconds)
        return holder._get_backend(torch.device(kind))

    if kind == "npu":

        def hccl(given: Any, options: Any) -> Any:
            return made("hccl", given.store, given.group_rank, given.group_size, given.timeout)

        c10d.Backend.register_backend("hccl", hccl, extended_api=True, devices=["npu"])
        return

    class Options:
        """What torch and Megatron set of NCCL's options."""

        def __init__(self, is_high_priority_stream: bool = False):
            self.is_high_priority_stream = is_high_priority_stream
            self.config = types.SimpleNamespace()
            self._timeout = c10d.default_pg_timeout

    class Class(type):
        def __call__(cls, store: Any, rank: int, size: int, options: Options) -> Any:
            return made("nccl", store, rank, size, options._timeout)

        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, Backend) and one.name() == "nccl"

    stand_in = Class("ProcessGroupNCCL", (), {"Options": Options})
    c10d.ProcessGroupNCCL = torch.distributed.ProcessGroupNCCL = stand_in
    c10d._NCCL_AVAILABLE = True
    torch.cuda.nccl.version = lambda: (2, 27, 0)  # torch names it in errors
    if c10d.default_pg_nccl_timeout is None:
        c10d.default_pg_nccl_timeout = timedelta(minutes=10)

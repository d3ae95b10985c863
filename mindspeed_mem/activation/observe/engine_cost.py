"""What the engine itself takes of the host for each tensor that is swapped and each operator that runs again.

`benchmarks/engine_cost.py` found how many times as long as the operation below, on layers that are next to nothing but
host's time; how fast this process is today, that operation says: one small product that torch records, with hooks of
Python around what it saves, forward and backward.
"""

from __future__ import annotations

import statistics
import time

import torch

from mindspeed_mem.activation import hot_path
from mindspeed_mem.activation.observe.rank_profile import HostCost
from mindspeed_mem.device import Backend

MOVED, RERUN = (7.0, 2.0), (25.0, 7.0)
"""Of a tensor and of an operator, in such operations: with the hot path in Python, and in C++."""
_CHAIN, _ROUNDS = 50, 15


def measure_host_cost(backend: Backend) -> HostCost:
    """In whole microseconds. Where the device computes by itself, nothing: the host has time to spare there, as long as
    layers are not so small that it limits them."""
    if not backend.is_host:
        return HostCost()
    native, seconds = int(hot_path.native is not None), operation_seconds()
    moved, rerun = (round(times[native] * seconds, 6) for times in (MOVED, RERUN))
    return HostCost(moved_seconds=moved, rerun_seconds=rerun)


def operation_seconds() -> float:
    """Of this thread, for one such operation: the median of a few chains of them, 20 ms in all."""
    return statistics.median(_chain() for _ in range(_ROUNDS)) / _CHAIN


def _chain() -> float:
    def same(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    begin = time.thread_time()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(same, same):
        factor = torch.ones(8, requires_grad=True)
        value = factor
        for _ in range(_CHAIN):
            value = value * factor
        torch.autograd.grad(value.sum(), factor)
    return time.thread_time() - begin

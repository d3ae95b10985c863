"""What `auto` predicts beside what its plans do when they run, and how long it searches: for `parallel.py`."""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from timing import interleaved
from torch import nn

from mindspeed_mem import parallel

DEPTHS = (2, 4, 8, 16, 32)
WHOLE = (None, None, None)
LINEARS = ("q", "k", "v", "out", "fc1", "fc2")
COLUMNS, ROWS = ("q", "k", "v", "fc1"), ("out", "fc2")


def _weights(**strategies: Any) -> dict[str, Any]:
    return {f"*.{name}": {"parameter_plan": {"weight": one}} for name, one in strategies.items()}


def _linears(names: Sequence[str], ins: tuple, outs: tuple | None = None) -> dict[str, Any]:
    row = {"in_strategy": ins} | ({"out_strategy": (outs,)} if outs else {})
    return {f"*.{name}:linear": row for name in names}


def _input(*strategy: Any) -> dict[str, Any]:
    return {"": {"in_strategy": (strategy,)}}


UNSPLIT = _weights(**dict.fromkeys(LINEARS, (None, None)))
GIVEN = {
    "searched": _input(*WHOLE),
    "batch": _input("tp", None, None) | UNSPLIT | _linears(LINEARS, (("tp", None, None), (None, None))),
    "columns and rows": _input(*WHOLE)
    | _weights(**dict.fromkeys(COLUMNS, ("tp", None)), **dict.fromkeys(ROWS, (None, "tp")))
    | _linears(COLUMNS, (WHOLE, ("tp", None)))
    | _linears(ROWS, ((None, None, "tp"), (None, "tp")), WHOLE),
    "all whole": _input(*WHOLE) | UNSPLIT | _linears(LINEARS, (WHOLE, (None, None)), WHOLE),
    "columns, gathered": _input(*WHOLE)
    | _weights(**dict.fromkeys(LINEARS, ("tp", None)))
    | _linears(LINEARS, (WHOLE, ("tp", None)), WHOLE),
    "rows, summed": _input(*WHOLE)
    | _weights(**dict.fromkeys(LINEARS, (None, "tp")))
    | _linears(LINEARS, ((None, None, "tp"), (None, "tp")), WHOLE),
}
"""Rows that make a plan, by its name; what they leave open is searched."""


def measured(build: Callable[[int], nn.Module], x: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Plans with what they are predicted to take and send, and what they do. Collective."""
    mesh, machine = parallel.mesh("cpu", tp=dist.get_world_size()), _machine(dist.get_world_size())
    plain = build(1)
    plans = {name: parallel.auto(plain, x, mesh, given=given, machine=machine) for name, given in GIVEN.items()}
    models = {name: parallel.semi_auto(copy.deepcopy(plain), mesh, plan) for name, plan in plans.items()}
    current, rows = [""], {}

    @contextlib.contextmanager
    def setting(name: str):
        current[0] = name
        models[name].zero_grad(set_to_none=True)
        yield

    def step() -> None:
        models[current[0]](x).square().mean().backward()

    for name in models:
        with setting(name), parallel.recording() as report:
            step()
        predicted = {"predicted_ms": 1e3 * plans[name].seconds, "predicted_bytes": sum(plans[name].bytes_sent.values())}
        rows[name] = predicted | {"bytes": sum(report.sent().values())}
    for name, found in interleaved(list(models), setting, step, rounds, dist.barrier).items():
        rows[name]["ms"] = 1e3 * statistics.median(found)
    pair = [[row[key] for row in rows.values()] for key in ("predicted_ms", "ms")]
    figures = {"tflops": machine.tflops, "memory_gbps": machine.memory_gbps, "launch_us": machine.launch_us}
    figures |= {"gbps": machine.gbps, "latency_us": machine.latency_us}
    return {"machine": figures, "plans": rows, "spearman": spearman(*pair)}


def _machine(ranks: int) -> parallel.Machine:
    """Of this machine as it is now, on all ranks at once; the first rank's figures, on all."""
    square, large, small = torch.randn(512, 512), torch.randn(2**20), torch.randn(8)
    taken = {
        "product": _seconds(lambda: square @ square),
        "copy": _seconds(lambda: large.mul(2.0)),
        "large": _seconds(lambda: dist.all_reduce(large)),
        "small": _seconds(lambda: dist.all_reduce(small)),
    }
    every: list[Any] = [taken]
    dist.broadcast_object_list(every)
    taken = every[0]
    sent = large.nbytes * 2 * (ranks - 1) / ranks
    return parallel.Machine(
        tflops=2 * 512**3 / taken["product"] / 1e12,
        memory_gbps=2 * large.nbytes / taken["copy"] / 1e9,
        gbps=sent / max(taken["large"] - taken["small"], 1e-6) / 1e9,
        latency_us=1e6 * taken["small"],
        launch_us=100.0,  # of a DTensor's operator
    )


def _seconds(run: Callable[[], Any], times: int = 15) -> float:
    found = []
    for _ in range(times):
        dist.barrier()
        begun = time.perf_counter()
        run()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """How alike the two orders are, 1: the same."""
    ranks = [[sorted(values).index(value) for value in values] for values in (one, other)]
    return statistics.correlation(*map(list, ranks))


def searching(block: Callable[[], nn.Module], x: torch.Tensor) -> list[dict[str, Any]]:
    """Seconds of CPU that `auto` takes for 2 to 32 of these blocks. Collective."""
    rows = []
    for depth in DEPTHS:
        model, mesh = nn.Sequential(*(block() for _ in range(depth))), parallel.mesh("cpu", tp=dist.get_world_size())
        begun = time.process_time()
        parallel.auto(model, x, mesh, device_memory_gib=16)
        seconds = time.process_time() - begun
        nodes = len(torch.export.export(model, (x,), strict=False).run_decompositions().graph.nodes)
        rows.append({"layers": depth, "nodes": nodes, "seconds": seconds, "ms_per_node": 1e3 * seconds / nodes})
    return rows


def table(found: dict[str, Any], searched: Sequence[dict[str, Any]]) -> str:
    """Both for people."""
    lines = [f"{'plan':20} {'predicted ms':>12} {'ms':>8} {'predicted bytes':>16} {'bytes sent':>12}"]
    for name, row in found["plans"].items():
        lines.append(
            f"{name:20} {row['predicted_ms']:12.1f} {row['ms']:8.1f} {row['predicted_bytes']:16} {row['bytes']:12}"
        )
    lines.append(f"order predicted and measured: Spearman {found['spearman']:.2f}")
    for row in searched:
        lines.append(
            f"auto for {row['layers']} layers, {row['nodes']} nodes: {row['seconds']:.1f} s of CPU, "
            f"{row['ms_per_node']:.1f} ms a node"
        )
    return "\n".join(lines)

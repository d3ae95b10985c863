"""What `auto` predicts beside what its plans do when they run, and how long it searches: for `parallel.py`."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from timing import interleaved
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

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
BATCH, SEQUENCE = ("tp", None, None), (None, "tp", None)
ALONE = (WHOLE, (None, None))


def _pairs(columns: Sequence[str], rows: Sequence[str], between: tuple = WHOLE) -> dict[str, Any]:
    """Columns of the first, rows of the second of each pair; the others whole."""
    others = [name for name in LINEARS if name not in (*columns, *rows)]
    weights = dict.fromkeys(columns, ("tp", None)) | dict.fromkeys(rows, (None, "tp"))
    return (
        _weights(**weights, **dict.fromkeys(others, (None, None)))
        | _linears(columns, (WHOLE, ("tp", None)))
        | _linears(rows, ((None, None, "tp"), (None, "tp")), between)
        | _linears(others, ALONE, WHOLE)
    )


GIVEN = {
    "searched": _input(*WHOLE),
    "batch": _input(*BATCH) | UNSPLIT | _linears(LINEARS, (BATCH, (None, None))),
    "batch, weights gathered": _input(*BATCH)
    | _weights(**dict.fromkeys(LINEARS, ("tp", None)))
    | _linears(LINEARS, (BATCH, (None, None))),
    "batch, outputs gathered": _input(*WHOLE) | UNSPLIT | _linears(LINEARS, (BATCH, (None, None)), WHOLE),
    "sequence": _input(*SEQUENCE) | UNSPLIT | _linears(LINEARS, (SEQUENCE, (None, None)), SEQUENCE),
    "columns and rows": _input(*WHOLE) | _pairs(COLUMNS, ROWS),
    "the same, sequence": _input(*SEQUENCE) | _pairs(COLUMNS, ROWS, SEQUENCE),
    "MLP alone": _input(*WHOLE) | _pairs(("fc1",), ("fc2",)),
    "attention alone": _input(*WHOLE) | _pairs(("q", "k", "v"), ("out",)),
    "all whole": _input(*WHOLE) | UNSPLIT | _linears(LINEARS, ALONE, WHOLE),
    "columns, gathered": _input(*WHOLE)
    | _weights(**dict.fromkeys(LINEARS, ("tp", None)))
    | _linears(LINEARS, (WHOLE, ("tp", None)), WHOLE),
    "rows, summed": _input(*WHOLE)
    | _weights(**dict.fromkeys(LINEARS, (None, "tp")))
    | _linears(LINEARS, ((None, None, "tp"), (None, "tp")), WHOLE),
}
"""Rows that make a plan, by its name; what they leave open is searched."""


def taking_turns(models: Mapping[str, nn.Module], loss: Callable[[str], torch.Tensor]) -> tuple[Callable, Callable]:
    """For `interleaved`: what puts one of the models in place, and a step of that one."""
    current = [""]

    @contextlib.contextmanager
    def setting(name: str):
        current[0] = name
        models[name].zero_grad(set_to_none=True)
        yield

    return setting, lambda: loss(current[0]).backward()


def planned(
    build: Callable[[int], nn.Module], x: torch.Tensor, machine: parallel.Machine
) -> tuple[dict[str, nn.Module], Callable, Callable, dict[str, dict[str, Any]]]:
    """The models of all plans, split, to take turns; with what plans are predicted to take and send, and what they
    sent. Collective."""
    mesh, plain = parallel.mesh("cpu", tp=dist.get_world_size()), build(1)
    plans = {name: parallel.auto(plain, x, mesh, given=given, machine=machine) for name, given in GIVEN.items()}
    models = {name: parallel.semi_auto(copy.deepcopy(plain), mesh, plan) for name, plan in plans.items()}
    setting, step = taking_turns(models, lambda name: models[name](x).square().mean())
    rows: dict[str, dict[str, Any]] = {}
    for name, plan in plans.items():
        with setting(name), parallel.recording() as report:
            step()
        predicted = {"predicted_ms": 1e3 * plan.seconds, "predicted_bytes": sum(plan.bytes_sent.values())}
        rows[name] = predicted | {"bytes": sum(report.sent().values())}
    return models, setting, step, rows


def measured(build: Callable[[int], nn.Module], x: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Plans with what they are predicted to take and send, and what they do. Collective."""
    machine = _machine(x)
    models, setting, step, rows = planned(build, x, machine)
    for name, found in interleaved(list(models), setting, step, rounds, dist.barrier).items():
        rows[name]["ms"] = 1e3 * statistics.median(found)
    pair = [[row[key] for row in rows.values()] for key in ("predicted_ms", "ms")]
    return {"machine": dataclasses.asdict(machine), "plans": rows, "spearman": spearman(*pair)}


CHAIN, TURNS = 16, 25


def _machine(x: torch.Tensor) -> parallel.Machine:
    """Of this machine as it is now, on all ranks at once; the first rank's figures, on all.

    A product with its backward, as DTensor redistributes tensors like `x`, and the host's time of a linear layer: by
    turns, since whoever shares the machine comes and goes; and sending after a product, when caches hold something else
    and ranks are not quite at the same place, as in a step.
    """
    mesh, small = parallel.mesh("cpu", tp=dist.get_world_size()), torch.ones(8, 8, 8)
    rows, weight = x.flatten(0, -2), torch.randn(x.shape[-1], x.shape[-1], requires_grad=True)
    chain = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(CHAIN)))
    chain = parallel.semi_auto(chain, mesh, {"": {"in_strategy": ((None, None, None),)}})
    leaf = rows.clone().requires_grad_()
    moves = {
        "all_reduce": (Partial(), Replicate()),
        "all_gather": (Shard(0), Replicate()),
        "reduce_scatter": (Partial(), Shard(0)),
    }

    def sends(one: torch.Tensor, name: str) -> Callable[[], Any]:
        before, after = moves[name]
        part = one.chunk(mesh.size())[mesh.get_rank()].contiguous() if before.is_shard() else one
        tensor = DTensor.from_local(part, mesh, [before], run_check=False)
        return lambda: (rows @ constant, tensor.redistribute(placements=[after]))

    constant = weight.detach()
    runs: dict[Any, Callable[[], Any]] = {
        "product": lambda: (leaf @ weight).sum().backward(),
        "before": lambda: rows @ constant,
        "add": lambda: rows.add(rows),
        "launch": lambda: chain(small).sum().backward(),
    }
    runs |= {(name, one is small): sends(one, name) for name in moves for one in (x, small)}
    turns = [{what: _seconds(run) for what, run in runs.items()} for _ in range(TURNS)]
    taken = {what: statistics.median(turn[what] for turn in turns) for what in runs}
    every: list[Any] = [taken]
    dist.broadcast_object_list(every)
    taken = every[0]
    share = x.nbytes * (mesh.size() - 1) / mesh.size()
    sent = dict.fromkeys(moves, share) | {"all_reduce": 2 * share}
    per_byte = {name: max(taken[name, False] - taken[name, True], 1e-6) / sent[name] for name in moves}
    return parallel.Machine(
        tflops=6 * rows.numel() * x.shape[-1] / taken["product"] / 1e12,
        memory_gbps=3 * rows.nbytes / taken["add"] / 1e9,
        gbps=1 / per_byte["all_reduce"] / 1e9,
        latency_us=1e6 * max(statistics.median(taken[name, True] for name in moves) - taken["before"], 0.0),
        launch_us=1e6 * taken["launch"] / CHAIN / 3,  # forward, and twice that backward
        slower={name: one / per_byte["all_reduce"] for name, one in per_byte.items()},
    )


def _seconds(run: Callable[[], Any], times: int = 5) -> float:
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
    lines = [f"{'plan':24} {'predicted ms':>12} {'ms':>8} {'predicted bytes':>16} {'bytes sent':>12}"]
    for name, row in found["plans"].items():
        lines.append(
            f"{name:24} {row['predicted_ms']:12.1f} {row['ms']:8.1f} {row['predicted_bytes']:16} {row['bytes']:12}"
        )
    lines.append(f"order predicted and measured: Spearman {found['spearman']:.2f}")
    for row in searched:
        lines.append(
            f"auto for {row['layers']} layers, {row['nodes']} nodes: {row['seconds']:.1f} s of CPU, "
            f"{row['ms_per_node']:.1f} ms a node"
        )
    return "\n".join(lines)

"""Chunk ZeRO beside Megatron's distributed optimizer, its optimizer offload, and FSDP2: time, memory, traffic, losses.

    python benchmarks/chunk_zero.py                                   # CPU: 2 gloo ranks
    python benchmarks/chunk_zero.py --device cuda                     # as many NCCL ranks as there are GPUs
    python benchmarks/chunk_zero.py --json results.json --page results.md --picture results.png

All variants train the same GPTModel of megatron-core with AdamW. First each is built alone, and the memory, the traffic
and the losses of its first steps are taken. Then steps are timed: every round runs all variants in an order of its own,
in the same processes; models stay built if all of them fit, else each is built anew for its turn (--rebuild).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from chunk_page import BASE, goal_lines, goals, page, table  # noqa: E402

SHAPES = {  # layers, hidden, heads, ffn, sequence, micro-batch, micro-batches, vocabulary
    "cpu": (4, 512, 8, 1376, 256, 1, 2, 512),
    "device": (8, 4096, 32, 11008, 4096, 1, 2, 32000),
}
SHAPE = ("layers", "hidden", "heads", "ffn", "seq_length", "micro_batch_size", "micro_batches", "vocab")
LARGEST_CHUNK = 32 * 2**20
"""Elements: the pack's default."""
WARM_UP = 3
"""Steps before a step is measured: optimizer states are made, and the order of uses is recorded, in the first ones."""
ROOM = 0.6
"""Of the memory there is, at most, for all variants' models at once."""


def main() -> None:
    given = _arguments()
    on_ranks(given.ranks or (2 if given.device == "cpu" else _devices(given.device)), work, given)


def on_ranks(ranks: int, function: Callable[..., None], *arguments: Any) -> None:
    """Call ``function(rank, ranks, meeting, *arguments)`` in a process for each rank; `meeting`: a file to meet at.

    Raises SystemExit if one of them fails, which ends the others.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "group")
        processes = [context.Process(target=function, args=(n, ranks, meeting, *arguments)) for n in range(ranks)]
        for process in processes:
            process.start()
        waiting = list(processes)
        while waiting:
            waiting = [process for process in waiting if process.is_alive()]
            if any(process.exitcode for process in processes if process.exitcode is not None):
                for process in waiting:  # they wait for one that has failed
                    process.terminate()
            time.sleep(0.2)
    if any(process.exitcode for process in processes):
        raise SystemExit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"), default="cpu")
    parser.add_argument("--ranks", type=int, help="default: 2 on a CPU, else as many as there are devices")
    for name in SHAPE:
        parser.add_argument("--" + name.replace("_", "-"), type=int, metavar="N")
    parser.add_argument(
        "--chunk-elements", type=int, help="of a bucket or chunk; default: a quarter of a layer's, at most 32Mi"
    )
    parser.add_argument(
        "--device-memory-mib", type=int, default=256, help="what a CPU is taken for, where the pack asks; default 256"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--minutes",
        type=float,
        help="begin no round that would end later than so long after the start, and no variant after half of that",
    )
    parser.add_argument("--only", help="only variants whose names contain one of these, separated by ;")
    parser.add_argument("--rebuild", action="store_true", help="build each model anew for each timed step")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--page", type=Path, help="write a page of Markdown there")
    parser.add_argument("--picture", type=Path, help="draw throughput over memory there (PNG or SVG)")
    given = parser.parse_args()
    shape = SHAPES["cpu" if given.device == "cpu" else "device"]
    given.shape = {n: getattr(given, n) or v for n, v in zip(SHAPE, shape, strict=True)}
    return given


def chunk_elements(shape: dict[str, int]) -> int:
    """A quarter of a layer's parameters, or fewer: a multiple of the hidden size."""
    hidden = shape["hidden"]
    quarter = (4 * hidden + 3 * shape["ffn"] + 2) // 4 * hidden
    return min(quarter, LARGEST_CHUNK // hidden * hidden)


def _devices(name: str) -> int:
    from mindspeed_mem.device import get_backend

    return int(str(get_backend(name).describe()["count"]))


def work(rank: int, ranks: int, meeting: str, given: argparse.Namespace) -> None:
    """One rank."""
    import torch.distributed as dist

    job = start(rank, ranks, meeting, given)
    from chunk_variants import variants

    chosen = variants()
    if given.only:
        words = given.only.split(";")
        chosen = {n: v for n, v in chosen.items() if n == BASE or any(word in n for word in words)}
    rows, failed = measured(job, chosen, given.minutes)
    chosen = {name: variant for name, variant in chosen.items() if name in rows}
    timed(job, chosen, rows, given)
    if rank == 0:
        _write(job, rows, failed, ranks, given)
    dist.barrier()
    dist.destroy_process_group()


def start(rank: int, ranks: int, meeting: str, given: argparse.Namespace):
    """Join the other ranks; returns the `Job`. Of ``given``: device, device_memory_mib, shape, chunk_elements."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    import mindspeed_mem.megatron_adaptor as mem  # before megatron
    from mindspeed_mem.device import get_backend
    from mindspeed_mem.zero.core.shard_memory import device_of

    logging.getLogger("mindspeed_mem").setLevel(logging.WARNING)
    backend = get_backend(given.device)
    mem.configure({"device": given.device, "sdpa_attention": True})
    from megatron.core import parallel_state
    from sharded_gpt import Job
    from two_memories import TwoMemories

    if backend.is_host:
        torch.set_num_threads(1)
        backend.limit = lambda: given.device_memory_mib * 2**20  # the pack's buffers are small beside a device's memory
    else:
        backend.use_device_of_rank()
    groups = "gloo" if backend.is_host else f"cpu:gloo,{backend.tensor_type}:{backend.collectives}"
    dist.init_process_group(groups, init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel()
    elements = given.chunk_elements or chunk_elements(given.shape)
    hidden = given.shape["hidden"]
    return Job(
        backend=backend,
        device=device_of(backend),
        memories=TwoMemories(backend),
        shape=given.shape,
        chunk_elements=-(-elements // hidden) * hidden,
    )


# ---- memory, traffic, losses
def measured(job, chosen: dict, minutes: float | None = None) -> tuple[dict[str, dict], dict[str, str]]:
    """Name -> figures without times; and why a peer has none. Collective; on rank 0 those of all ranks."""
    import torch.distributed as dist
    from timing import late, reproducible

    rows, failed = {}, {}
    for name, variant in chosen.items():
        if minutes is not None and rows and _agreed(late(minutes / 2)):
            failed[name] = "there was no time left"
            continue
        with _counted(job.backend), reproducible(job.backend.type):
            try:
                mine = _one(job, variant)
            except Exception as error:
                if not variant.peer:
                    raise
                mine = f"{type(error).__name__}: {error}".splitlines()[0]
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        if any(isinstance(one, str) for one in everyone):
            failed[name] = next(one for one in everyone if isinstance(one, str))
            continue
        row = {key: max(one[key] for one in everyone) for key in everyone[0] if key != "losses"}
        losses = [one["losses"] for one in everyone]
        reference = losses if name == BASE else rows[BASE]["losses"]
        rows[name] = row | {"peer": variant.peer, "exact": variant.exact, "losses": losses}
        rows[name] |= {"same": losses == reference, "off": _off(losses, reference)}
    return rows, failed


def _off(losses: list[list[float]], reference: list[list[float]]) -> float:
    """The largest relative difference."""
    pairs = ((a, b) for mine, other in zip(losses, reference, strict=True) for a, b in zip(mine, other, strict=True))
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)


@contextlib.contextmanager
def _counted(backend):
    """A CPU's memory is counted inside."""
    from mindspeed_mem.device.limited_cpu import LimitedMemory

    if not backend.is_host:
        yield
        return
    with LimitedMemory() as memory:
        backend.attach_ledger(memory)
        try:
            yield
        finally:
            backend.attach_ledger(None)


def _one(job, variant) -> dict:
    from two_memories import Traffic

    backend = job.backend
    gc.collect()
    backend.synchronize()
    before = backend.allocated()
    backend.reset_peak()
    training = variant.make(job)
    losses = []
    with training.active():
        for _ in range(WARM_UP):
            losses += training.step()
        found = {"building_bytes": backend.peak() - before}
        gc.collect()
        backend.reset_peak()
        losses += training.step()
        backend.synchronize()
        gc.collect()
        found |= {"device_bytes": backend.peak() - before, "resting_bytes": backend.allocated() - before}
        with Traffic(job.memories) as traffic:
            losses += training.step()
    if training.runtime is not None:
        report = training.runtime.report()
        found |= {"chunks": report.chunks, "budget": report.budget or 0, "host_bytes": report.host_bytes}
        found |= {"peak_bytes": report.counts.peak_bytes, "over_budget": report.counts.over_budget}
    del training
    gc.collect()
    return found | traffic.figures() | {"losses": losses}


# ---- times
def timed(job, chosen: dict, rows: dict[str, dict], given: argparse.Namespace) -> None:
    """Add the times of all variants to `rows`. Collective."""
    import torch.distributed as dist
    from timing import interleaved, summary, warm_up

    kept, rebuild = {}, given.rebuild or not _fit(job, rows)
    cpu: dict[str, list[float]] = {name: [] for name in chosen}
    current = None

    @contextlib.contextmanager
    def setting(name: str):
        nonlocal current
        current = kept.get(name) or _warm(job, chosen[name])
        if not rebuild:
            kept[name] = current
        with current.active():
            before = time.process_time()
            yield
            cpu[name].append(time.process_time() - before)
        current = None
        if rebuild:
            gc.collect()

    def synchronize() -> None:
        job.backend.synchronize()
        dist.barrier()

    if not rebuild:
        for name, variant in chosen.items():
            kept[name] = _warm(job, variant)
    gc.collect()
    gc.freeze()
    how = {"warm": warm_up(job.backend), "minutes": given.minutes, "agreed": _agreed}
    seconds = interleaved(list(chosen), setting, lambda: current.step(), given.rounds, synchronize, **how)
    given.rounds = len(seconds[BASE])
    gc.unfreeze()
    slowest = {name: _over_ranks(values, max) for name, values in seconds.items()}
    for name, figures in summary(slowest, BASE).items():
        rows[name] |= figures
        if job.backend.is_host:
            rows[name]["cpu_ms"] = 1e3 * statistics.median(_over_ranks(cpu[name][1:], sum))  # the first is not timed


def _agreed(mine: bool) -> bool:
    """What rank 0 thinks."""
    import torch.distributed as dist

    answer = [mine]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def _warm(job, variant):
    training = variant.make(job)
    with training.active():
        for _ in range(WARM_UP):
            training.step()
    return training


def _over_ranks(values: list[float], join) -> list[float]:
    import torch.distributed as dist

    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values)
    return [join(one) for one in zip(*everyone, strict=True)]


def _fit(job, rows: dict[str, dict]) -> bool:
    """Whether all models can be there at once, by what rests of each; the same on all ranks."""
    from mindspeed_mem.device import host_memory

    needed = sum(row["resting_bytes"] for row in rows.values()) + max(row["device_bytes"] for row in rows.values())
    on_host = len(rows) * max(row["resting_bytes"] for row in rows.values())  # none rests on more
    host = (host_memory.available() or 0) // host_memory.ranks_here()
    if job.backend.is_host:
        fits = needed + on_host / 2 < ROOM * host
    else:
        fits = needed < ROOM * (job.backend.room() or 0) and on_host < ROOM * host
    return _agreed(fits)


# ---- results
def _write(job, rows: dict[str, dict], failed: dict[str, str], ranks: int, given: argparse.Namespace) -> None:
    from timing import machine

    record = {"benchmark": "chunk_zero", "machine": machine(job.backend.type), "device": job.backend.type}
    results = {str(path) for path in (given.json, given.page, given.picture)} | {"--json", "--page", "--picture"}
    words = [word for word in sys.argv[1:] if word not in results]
    record |= {"command": f"python benchmarks/chunk_zero.py {shlex.join(words)}", "ranks": ranks}
    record |= {"rounds": given.rounds, "shape": given.shape, "chunk_elements": job.chunk_elements}
    record |= {"variants": rows, "failed": failed}
    print(table(rows), *(f"not run: {name}: {reason}" for name, reason in failed.items()), sep="\n")
    print(*goal_lines(goals(rows, failed)), sep="\n", flush=True)
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    if given.page:
        given.page.write_text(page(record))
    if given.picture:
        from picture import draw

        drawn = {name: {**row, "device_bytes_at_peak": row["device_bytes"]} for name, row in rows.items()}
        title = f"{ranks} ranks, {given.shape['layers']} layers, hidden {given.shape['hidden']}, {job.backend.type}"
        draw(drawn, given.picture, title, base=BASE, peers="Megatron, FSDP2")


if __name__ == "__main__":
    main()

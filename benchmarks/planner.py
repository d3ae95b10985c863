"""How long the planner takes, and what its plans are predicted to gain: ``python benchmarks/planner.py``.

Needs neither Megatron nor a device. Plans are estimates from FLOPs (mindspeed_mem/adaptive/problem/from_shape.py); only
the times of the planner are measured here. ``--growth``: how these times grow with layers, stages, virtual stages,
groups, kinds of layers and micro-batches. Goals, in seconds of CPU: 1 for 96 layers of 12 groups on 8 stages, 2 for 128
layers of 16, for 3 virtual stages and for 60 kinds of layers, none above 5; a simulation of 512 micro-batches on 64
stages in 0.2; memory below 200 MiB.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import resource
import statistics
import time
from pathlib import Path

from mindspeed_mem.adaptive import Problem, Search, simulate
from mindspeed_mem.adaptive.problem import from_shape
from mindspeed_mem.adaptive.problem.definition import GIB
from mindspeed_mem.adaptive.problem.shape import Degrees, Machine, Shape
from mindspeed_mem.adaptive.search.baselines import full_recompute, keep_all
from mindspeed_mem.adaptive.search.search import WITHOUT_SWAP
from mindspeed_mem.adaptive.search.simulation import Simulated

LLAMA = {"swiglu": True, "normalization": "RMSNorm", "rope": True, "bias": False}
CASES = {
    "7B shape, 32 layers, 1 stage": (
        Shape(
            num_layers=32,
            hidden_size=4096,
            num_attention_heads=32,
            seq_length=4096,
            micro_batch_size=4,
            ffn_hidden_size=11008,
            num_query_groups=32,
            kv_channels=128,
            **LLAMA,
        ),
        Degrees(data=8, micro_batches=8, distributed_optimizer=True),
        Machine(memory_bytes=80 * GIB, link_gbps=50),
    ),
    "70B shape, 80 layers, TP 8, 4 stages": (
        Shape(
            num_layers=80,
            hidden_size=8192,
            num_attention_heads=64,
            seq_length=4096,
            micro_batch_size=4,
            ffn_hidden_size=28672,
            num_query_groups=8,
            kv_channels=128,
            **LLAMA,
        ),
        Degrees(tensor=8, pipeline=4, data=8, micro_batches=32, sequence_parallel=True, distributed_optimizer=True),
        Machine(memory_bytes=24 * GIB, link_gbps=25),
    ),
    "175B shape, 96 layers, TP 8, 8 stages": (
        Shape(
            num_layers=96,
            hidden_size=12288,
            num_attention_heads=96,
            seq_length=8192,
            micro_batch_size=1,
            ffn_hidden_size=49152,
            num_query_groups=96,
            kv_channels=128,
        ),
        Degrees(tensor=8, pipeline=8, data=8, micro_batches=32, sequence_parallel=True, distributed_optimizer=True),
        Machine(memory_bytes=28 * GIB, link_gbps=25),
    ),
    **{
        f"7B shape, 16 layers, 105 GB, {tflops} TFLOP/s, {link} GB/s": (
            Shape(
                num_layers=16,
                hidden_size=4096,
                num_attention_heads=32,
                seq_length=8192,
                micro_batch_size=4,
                ffn_hidden_size=11008,
                num_query_groups=32,
                kv_channels=128,
                vocab_size=32000,
                untied=True,
                **LLAMA,
            ),
            Degrees(micro_batches=1),
            Machine(memory_bytes=105 * 10**9, link_gbps=link, tflops=tflops, memory_gbps=3600),
        )
        for tflops, link in ((700, 50), (742, 25))
    },
    "175B shape, slow link, less memory": None,
    "175B shape, slow link, 12 groups": None,
}


def problems() -> dict[str, Problem]:
    found = {name: from_shape.problem(*case) for name, case in CASES.items() if case is not None}
    large = found["175B shape, 96 layers, TP 8, 8 stages"]
    link = dataclasses.replace(large.link, out=12.0, back=12.0)
    found["175B shape, slow link, less memory"] = slow = dataclasses.replace(large, link=link, device_limit=26 * GIB)
    found["175B shape, slow link, 12 groups"] = _twelve(slow)
    return found


def _twelve(problem: Problem) -> Problem:
    return _with_groups(problem, 12)


def _with_groups(problem: Problem, count: int) -> Problem:
    """Every layer with so many groups: the largest are cut into parts, each of which is decided on its own."""
    kind = problem.classes[0]
    groups = list(kind.groups)
    while len(groups) < count:
        largest = max(groups, key=lambda group: group.bytes if not group.from_previous else 0)
        place, half = groups.index(largest), largest.bytes // 2
        seconds = largest.recompute_seconds / 2
        parts = [dataclasses.replace(largest, bytes=largest.bytes - half, recompute_seconds=seconds)]
        parts.append(
            dataclasses.replace(largest, name=f"{largest.name} {len(groups)}", bytes=half, recompute_seconds=seconds)
        )
        groups[place : place + 1] = parts
    return dataclasses.replace(problem, classes=(dataclasses.replace(kind, groups=tuple(groups)),))


GROWTH = {
    "layers": [{"layers": n} for n in (16, 32, 64, 96, 128)],
    "stages": [{"stages": n} for n in (1, 2, 4, 8, 16)],
    "virtual stages": [{"virtual": n} for n in (1, 2, 3)],
    "groups of a layer": [{"groups": n} for n in (9, 12, 16)],
    "kinds of layers": [{"layers": 60, "stages": 4, "kinds": n} for n in (1, 10, 30, 60)],
    "large": [{"layers": 128, "groups": 16}],
}
"""Of 96 layers of 12 groups on 8 stages with 32 micro-batches, unless it says otherwise."""
SIMULATED = [(8, 64), (16, 128), (32, 256), (64, 512), (64, 2048)]
"""Stages and micro-batches, with two layers on each stage."""


def of_size(
    layers: int = 96, stages: int = 8, virtual: int = 1, groups: int = 12, kinds: int = 1, micro_batches: int = 32
) -> Problem:
    """A problem of that size, with 45 % of the device memory that its activations would take."""
    shape = dataclasses.replace(CASES["175B shape, 96 layers, TP 8, 8 stages"][0], num_layers=layers)
    degrees = Degrees(
        tensor=8,
        pipeline=stages,
        virtual=virtual,
        data=8,
        micro_batches=micro_batches,
        sequence_parallel=True,
        distributed_optimizer=True,
    )
    problem = _with_groups(from_shape.problem(shape, degrees, Machine(memory_bytes=10**12, link_gbps=25)), groups)
    problem = _of_kinds(problem, kinds)
    kept = keep_all(problem)
    static = [stage.static_bytes + stage.temporary_bytes for stage in problem.stages]
    room = [round(own + 0.45 * (peak - own)) for own, peak in zip(static, kept.peaks, strict=True)]
    return dataclasses.replace(problem, device_limit=max(room))


def _of_kinds(problem: Problem, count: int) -> Problem:
    """The layers in turn of so many kinds, which differ in their bytes."""
    if count == 1:
        return problem
    [kind] = problem.classes
    classes = []
    for number in range(count):
        groups = [dataclasses.replace(one, bytes=one.bytes + number * 2**16) for one in kind.groups]
        classes.append(dataclasses.replace(kind, name=f"{kind.name} {number}", groups=tuple(groups)))
    stages = []
    for stage in problem.stages:
        parts = [
            dataclasses.replace(
                part, layers=tuple(classes[(part.first_layer + n) % count].name for n in range(len(part.layers)))
            )
            for part in stage.parts
        ]
        stages.append(dataclasses.replace(stage, parts=tuple(parts)))
    return dataclasses.replace(problem, classes=tuple(classes), stages=tuple(stages))


def growth(repeats: int) -> dict[str, list[dict]]:
    """Prints and returns CPU seconds of each search and simulation."""
    found: dict[str, list[dict]] = {}
    for name, sizes in GROWTH.items():
        for size in sizes:
            _, cpus, _ = measure(of_size(**size), repeats)
            row = size | {"cpu_seconds": round(statistics.median(cpus), 3)}
            found.setdefault(name, []).append(row)
            print(
                f"{name} | {', '.join(f'{key} {n}' for key, n in size.items())} | {row['cpu_seconds']:.2f}", flush=True
            )
    for stages, micro_batches in SIMULATED:
        problem = of_size(layers=2 * stages, stages=stages, micro_batches=micro_batches)
        plan, cpus = Search(problem).keep_all, []
        for _ in range(repeats):
            cpu = time.process_time()
            simulate(problem, plan)
            cpus.append(time.process_time() - cpu)
        row = {"stages": stages, "micro_batches": micro_batches, "cpu_seconds": round(statistics.median(cpus), 4)}
        found.setdefault("simulation", []).append(row)
        print(f"simulation | stages {stages}, micro-batches {micro_batches} | {row['cpu_seconds']:.3f}", flush=True)
    return found


def measure(problem: Problem, repeats: int) -> tuple[list[float], list[float], Search]:
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        search = Search(problem)
        search.best()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return walls, cpus, search


def _gain(full: float, other: Simulated | None) -> str:
    return "-" if other is None else f"{100 * (full / other.seconds - 1):+.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--growth", action="store_true", help="how the times grow instead")
    parser.add_argument("--json", type=Path, help="file for the figures of --growth")
    given = parser.parse_args()
    if given.growth:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = growth(given.repeats)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"memory of the process: {most:.0f} MiB at most, {before / 1024:.0f} before the first search")
        if given.json:
            of = {"machine": f"{platform.processor() or platform.machine()}, CPU", "date": time.strftime("%Y-%m-%d")}
            given.json.write_text(json.dumps(of | {"peak_rss_mib": round(most), "growth": found}, indent=1) + "\n")
        return
    head = ("case", "wall s", "CPU s", "step s", "over full", "without swap", "under keep-all", "peak GiB", "limit GiB")
    print(" | ".join(head))
    for name, problem in problems().items():
        full, kept = full_recompute(problem).seconds, keep_all(problem).seconds
        walls, cpus, search = measure(problem, given.repeats)
        found = search.best()
        seconds, peak = found.simulated.seconds, max(found.simulated.peaks)
        figures = (
            f"{statistics.median(walls):.2f}",
            f"{statistics.median(cpus):.2f}",
            f"{seconds:.3f}",
            f"{100 * (full / seconds - 1):+.1f} %",
            _gain(full, found.rivals.get(WITHOUT_SWAP)),
            f"{100 * (1 - kept / seconds):.2f} %",
            f"{peak / GIB:.2f}",
            f"{problem.device_limit / GIB:.2f}",
        )
        print(" | ".join([name, *figures]), flush=True)


if __name__ == "__main__":
    main()

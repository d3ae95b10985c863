"""How long the planner takes, and what its plans are predicted to gain: ``python benchmarks/planner.py``.

Needs neither Megatron nor a device. The goal is a second for 96 layers of 12 groups on 8 stages. Plans are estimates
from FLOPs (mindspeed_mem/adaptive/problem/from_shape.py); only the times of the planner are measured here.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

from mindspeed_mem.adaptive import Problem, Search
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
    """Every layer with 12 groups: the largest are cut into parts, each of which is decided on its own."""
    kind = problem.classes[0]
    groups = list(kind.groups)
    while len(groups) < 12:
        largest = max(groups, key=lambda group: group.bytes if not group.from_previous else 0)
        place, half = groups.index(largest), largest.bytes // 2
        seconds = largest.recompute_seconds / 2
        parts = [dataclasses.replace(largest, bytes=largest.bytes - half, recompute_seconds=seconds)]
        parts.append(
            dataclasses.replace(largest, name=f"{largest.name} {len(groups)}", bytes=half, recompute_seconds=seconds)
        )
        groups[place : place + 1] = parts
    return dataclasses.replace(problem, classes=(dataclasses.replace(kind, groups=tuple(groups)),))


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
    given = parser.parse_args()
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

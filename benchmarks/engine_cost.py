"""What the engine takes of the host for each tensor that is swapped and each operator that runs again, beyond watching.

    python benchmarks/engine_cost.py --rounds 15          # about a minute on a CPU
    python benchmarks/engine_cost.py --json engine.json

The layers are next to nothing but the host's time, as in host_cost.py. They are profiled as
--adaptive-memory-optimization does it; then plans that swap or recompute all that they can, and some of it, run
interleaved, every tensor through handles in all of them, as there. What such a plan's step takes longer than keeping
everything, less what the planner says of that without the engine, is the engine's own. So much for each tensor and each
operator as comes nearest for all plans together is printed last, also in the operations by which
`mindspeed_mem/activation/observe/engine_cost.py` has it for predictions. Times are the process's own on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import statistics
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import mindspeed_mem.megatron_adaptor as mem  # noqa: E402  before megatron

from capped import Bench, count_memory  # noqa: E402  # isort: skip
import variants  # noqa: E402
from adaptive import problem_of  # noqa: E402
from timing import interleaved, machine  # noqa: E402

from mindspeed_mem.activation import engine as engines  # noqa: E402
from mindspeed_mem.activation import hot_path  # noqa: E402
from mindspeed_mem.activation.observe.engine_cost import operation_seconds  # noqa: E402
from mindspeed_mem.activation.observe.rank_profile import HostCost  # noqa: E402
from mindspeed_mem.adaptive import Plan, Problem, StagePlan, simulate  # noqa: E402
from mindspeed_mem.adaptive.search.plan_file import memory_config, sections  # noqa: E402
from mindspeed_mem.device import get_backend  # noqa: E402
from mindspeed_mem.plan import load_memory_config  # noqa: E402

SHAPE = (4, 64, 4, 128, 16, 1, 3, 128)
PARTS = {"swap": "S", "recompute": "R"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shape", type=int, nargs=8, metavar="N", help="layers hidden heads ffn seq mbs n_mb vocab")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    args.device, args.dtype = "cpu", "fp32"
    logging.getLogger("mindspeed_mem").setLevel(logging.WARNING)
    count_memory(get_backend("cpu"))
    backend, model, step, shape = variants.set_up(args, {"cpu": SHAPE}, {"recompute_config": {"recompute": True}})
    bench = Bench(backend, model, step, shape["layers"])
    problem = problem_of(bench.profile(), shape["micro_batches"], bench.whole)
    problem = dataclasses.replace(problem, host=HostCost())
    plans = plans_of(problem)
    setting = watching(model, backend, {name: sections(memory_config(problem, one)) for name, one in plans.items()})
    for name in plans:  # what is tried in the first steps is no part of it
        with setting(name):
            step()
            step()
    gc.collect()
    gc.freeze()
    operation = [operation_seconds()]
    seconds = interleaved(list(plans), setting, step, args.rounds, backend.synchronize, time.process_time, warm=1)
    operation.append(operation_seconds())
    rows = rows_of(problem, plans, seconds)
    each = fitted(rows)
    unit = 1e6 * statistics.mean(operation)
    print(f"the engine's hot path is in {'Python' if hot_path.native is None else 'C++'}; an operation {unit:.1f} us")
    kept = 1e3 * simulate(problem, plans["keep"]).seconds, 1e3 * statistics.median(seconds["keep"])
    print("a step that keeps everything, watched: predicted {:.1f} ms, measured {:.1f} ms".format(*kept))
    print(f"{'plan':24} {'tensors':>8} {'operators':>9} {'engine us':>10} {'fitted':>8}")
    for name, (moved, rerun, took) in rows.items():
        print(f"{name:24} {moved:>8} {rerun:>9} {took:>10.0f} {moved * each[0] + rerun * each[1]:>8.0f}")
    for what, one in zip(("tensor", "operator"), each, strict=True):
        print(f"each {what}: {one:.0f} us, {one / unit:.1f} operations")
    if args.json:
        found = {"operation_us": unit, "moved_us": each[0], "rerun_us": each[1], "native": hot_path.native is not None}
        found |= dict(zip(("kept_predicted_ms", "kept_measured_ms"), kept, strict=True))
        record = {"benchmark": "engine_cost", "machine": machine("cpu"), "rounds": args.rounds, "shape": shape}
        args.json.write_text(json.dumps(record | found | {"plans": rows}, indent=1) + "\n")


def plans_of(problem: Problem) -> dict[str, Plan]:
    """Everything kept; then all swapped or recomputed, and every second group and every third."""
    found = {"keep": plan_of(problem, "S", 0, 1)}
    for name, letter in PARTS.items():
        found |= {f"{name} all": plan_of(problem, letter, 1, 1)}
        for step in (2, 3):
            found |= {f"{name} {at + 1} of {step}": plan_of(problem, letter, step, at) for at in range(step)}
    return found


def plan_of(problem: Problem, letter: str, step: int, at: int) -> Plan:
    """Every group whose number leaves `at` when divided by `step`; step 1: all, 0: none."""
    [stage], texts = problem.stages, []
    for place, name in enumerate(stage.parts[0].layers):
        text = ""
        for number, group in enumerate(problem.class_of[name].groups):
            able = group.swappable if letter == "S" else group.recompute_seconds is not None
            chosen = able and step and (step == 1 or number % step == at)
            text += "-" if group.from_previous and not place else letter if chosen else "K"
        texts.append(text)
    return Plan(stages=(StagePlan(parts=(tuple(texts),)),))


def watching(model, backend, plans: dict[str, dict]) -> variants.Settings:
    """These memory configurations, with every tensor through handles in all of them."""
    variants.PATCHES = mem.patch_modules(["pass_events", "activation_*", "recompute_*", "survive_*"])
    setting = variants.Settings(model, backend, {name: variants.Variant({}) for name in plans})
    for name, plan in plans.items():
        setting.engines[name] = engines.start(load_memory_config(plan), backend, survive=True)
        setting.engines[name].in_force.num_layers = len(model.decoder.layers)
    engines.stop()
    return setting


def rows_of(
    problem: Problem, plans: dict[str, Plan], seconds: dict[str, list[float]]
) -> dict[str, tuple[int, int, float]]:
    """Of each plan, in one micro-batch: tensors moved, operators run again, and microseconds of the engine's own."""
    kept = simulate(problem, plans["keep"]).seconds
    rows = {}
    for name, plan in plans.items():
        counts = {"S": 0, "R": 0}
        [part] = problem.stages[0].parts
        for text, layer in zip(plan.stages[0].parts[0], part.layers, strict=True):
            for letter, group in zip(text, problem.class_of[layer].groups, strict=True):
                each = {"S": group.tensors, "R": len(group.recompute_operators or group.operators)}
                counts |= {letter: counts[letter] + each[letter]} if letter in counts else {}
        pairs = zip(seconds[name], seconds["keep"], strict=True)
        took = statistics.median(one - base for one, base in pairs) - (simulate(problem, plan).seconds - kept)
        rows[name] = (counts["S"], counts["R"], 1e6 * took / problem.pipeline.micro_batches)
    return rows


def fitted(rows: dict[str, tuple[int, int, float]]) -> tuple[float, float]:
    """Microseconds of each tensor, and of each operator: no plan here has both."""
    moved, rerun = (
        sum(row[at] * row[2] for row in rows.values()) / sum(row[at] ** 2 for row in rows.values()) for at in (0, 1)
    )
    return moved, rerun


if __name__ == "__main__":
    main()

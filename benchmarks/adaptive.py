"""Under one memory cap: the adaptive plan beside Megatron's recompute, tuned by hand, and beside keeping everything.

    python benchmarks/adaptive.py                           # CPU, small layers
    python benchmarks/adaptive.py --device cuda             # 16 7B-shaped layers, sequence 8192, cap 105 GB
    python benchmarks/adaptive.py --caps 0.3,80GB --json results.json --picture results.png --trace profile.json
    python benchmarks/adaptive.py --replay profile.json     # no model, no device: predictions only

The model is profiled as --adaptive-memory-optimization does it, and for each cap planned twice: recompute only, and
everything. What a plan's step takes more or less than predicted corrects the problem, and it is planned again, three
times at most. Then all policies run interleaved in one process on one model, all but the first under the cap,
which the device (on a CPU: its allocator) enforces. Times (on the CPU: of the process, one thread) are medians of the
ratios to keeping everything in the same round; the step is forward and backward without an optimizer, so that nothing
dilutes them. Bytes are what a step of its own held at most above its start. A device's allocator has expandable
segments, unless its variable says otherwise: without, gigabytes under the cap are lost between blocks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
import time
from pathlib import Path

for _device in ("CUDA", "NPU") if "PYTORCH_ALLOC_CONF" not in os.environ else ():  # before torch is there
    os.environ.setdefault(f"PYTORCH_{_device}_ALLOC_CONF", "expandable_segments:True")

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from policies import ADAPTIVE, FULL, KEEP_ALL, RECOMPUTE_ONLY, Policy, by_hand, planned  # noqa: E402
from policy_table import predictions, table  # noqa: E402

from mindspeed_mem.adaptive import InfeasibleError, Problem  # noqa: E402
from mindspeed_mem.adaptive.problem import profile_file  # noqa: E402
from mindspeed_mem.adaptive.search.plan_table import engine_time  # noqa: E402

SHAPES = {  # layers, hidden, heads, ffn, sequence, micro-batch, micro-batches, vocabulary
    "cpu": (4, 1024, 16, 2752, 1024, 1, 1, 512),
    "device": (16, 4096, 32, 11008, 8192, 4, 1, 32000),
}
CAPS = {"cpu": "0.3,0.6", "device": "105GB"}
ABSENT_STATES = {"cpu": 0, "device": 14}
MARGIN = {"cpu": 0.0, "device": 0.02}
_TRIES = 3


def main() -> None:
    given = _arguments()
    if given.replay:
        replay(given.replay, given.caps or CAPS["cpu"])
    else:
        measure(given)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "npu"), default="auto")
    parser.add_argument("--shape", type=int, nargs=8, metavar="N", help="layers hidden heads ffn seq mbs n_mb vocab")
    parser.add_argument(
        "--caps",
        help="shares of the gap between full recompute's and keep-all's peak, or sizes of everything such as 105GB; "
        "default 0.3,0.6 on a CPU, else 105GB",
    )
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), default="bf16", help="fp32: for CPUs that have no instructions for bf16"
    )
    parser.add_argument(
        "--absent-states",
        type=float,
        metavar="BYTES",
        help="bytes per parameter that a training would hold and this benchmark does not (fp32 gradients and "
        "parameters, Adam's states): taken off a cap given as a size; default 14, on a CPU 0",
    )
    parser.add_argument("--margin", type=float, help="share of the cap not planned with; default 0.02, on a CPU 0")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--minutes", type=float, help="begin no round that would end later, from the start")
    parser.add_argument(
        "--finalists",
        type=int,
        metavar="N",
        help="of Megatron's ways try once the 2 N that are predicted to be fastest under the cap, and compare only the "
        "fastest N of them (and full recompute); default: all",
    )
    parser.add_argument("--losses", type=int, default=3, help="steps of training whose losses are compared")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--picture", type=Path, help="draw throughput over memory there (PNG or SVG)")
    parser.add_argument("--trace", type=Path, help="write the profile there, for --replay and for the plan command")
    parser.add_argument("--replay", type=Path, help="predict from this profile instead of running anything")
    return parser.parse_args()


def caps_of(text: str, low: int, high: int, absent: int = 0) -> dict[str, int]:
    """Name -> bytes of everything, less ``absent``, for caps as in --caps; shares are of the gap from low to high."""
    found = {}
    for word in text.split(","):
        try:
            size = word.upper().endswith("GB")
            number = float(word[:-2] if size else word)
        except ValueError:
            raise SystemExit(f"--caps takes numbers from 0 to 1 and sizes such as 105GB, not {word!r}") from None
        found[word] = round(number * 1e9) - absent if size else round(low + number * (high - low))
    return found


# ---- without a model
def replay(source: Path, caps: str) -> None:
    """Print what the planner predicts of all policies under these caps of a recorded profile."""
    problem = profile_file.read(source).problem
    policies = by_hand(problem)
    low, high = (max(policies[name].predicted.peaks) for name in (FULL, KEEP_ALL))
    for name, cap in caps_of(caps, low, high).items():
        rows = predictions(problem, policies | plans(problem, cap, 0.0), cap)
        print(f"cap {name}: {cap / 2**20:.1f} MiB, predicted", table(rows), "", sep="\n")


def plans(problem: Problem, cap: int, margin: float) -> dict[str, Policy]:
    """Both of the planner's policies, as far as there is one that fits."""
    found = {}
    for name, swap in ((RECOMPUTE_ONLY, False), (ADAPTIVE, True)):
        one = planned(problem, round((1 - margin) * cap), swap)
        if isinstance(one, InfeasibleError):
            print(f"{name}: {one}")
        else:
            found[name] = one
    return found


# ---- with one
def measure(given: argparse.Namespace) -> None:
    import mindspeed_mem.megatron_adaptor  # noqa: F401  before megatron

    from capped import Bench, count_memory  # isort: skip
    from timing import machine, progress
    from variants import set_up

    from mindspeed_mem.device import get_backend

    logging.getLogger("mindspeed_mem").setLevel(logging.WARNING)  # not every plan that is tried
    backend = get_backend(None if given.device == "auto" else given.device)
    count_memory(backend)
    backend, model, step, shape = set_up(given, SHAPES, {"recompute_config": {"recompute": True}})
    bench = Bench(backend, model, step, shape["layers"])
    progress("a model is there")
    kind = "cpu" if backend.is_host else "device"
    absent = ABSENT_STATES[kind] if given.absent_states is None else given.absent_states
    margin = MARGIN[kind] if given.margin is None else given.margin
    absent *= sum(parameter.numel() for parameter in model.parameters())
    problem = problem_of(bench.profile(), shape["micro_batches"], bench.whole)
    progress("its profile is taken")
    for line in engine_time(problem):
        print(line)
    if given.trace:
        facts = {"machine": machine(backend.type), "model": shape}
        profile_file.write(profile_file.Profile(problem=problem, **facts), given.trace)
    policies = by_hand(problem)
    setting = bench.settings({name: policies[name] for name in (KEEP_ALL, FULL)}, None)
    low, high = (bench.peak(setting, name) for name in (FULL, KEEP_ALL))
    if low is None or high is None:
        raise SystemExit("the whole device does not suffice for keeping everything: give a smaller --shape")
    clock = time.process_time if backend.is_host else time.perf_counter
    record = {
        "benchmark": "adaptive",
        "machine": machine(backend.type),
        "rounds": given.rounds,
        "shape": shape | {"dtype": given.dtype},
    }
    record |= {"static_bytes": bench.static, "margin": margin, "host": dataclasses.asdict(problem.host), "caps": {}}
    for name, cap in caps_of(given.caps or CAPS[kind], low, high, round(absent)).items():
        rows = under_cap(bench, problem, policies, cap, margin, given, clock)
        print(f"cap {name}: {(cap - bench.static) / 2**20:.1f} MiB above the step's start", table(rows), "", sep="\n")
        record["caps"][name] = {"bytes": cap, "policies": rows}
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    if given.picture:
        _draw(
            record, given.picture, "{layers} layers, hidden {hidden}, sequence {seq}, ".format(**shape) + backend.type
        )


def problem_of(profile, micro_batches: int, whole: int) -> Problem:
    """The planning problem of one rank's profile."""
    from mindspeed_mem.adaptive.problem import from_profile
    from mindspeed_mem.adaptive.problem.definition import Pipeline

    return from_profile.problem([profile], Pipeline(micro_batches=micro_batches), whole, None)


def under_cap(bench, problem: Problem, policies: dict[str, Policy], cap: int, margin: float, given, clock) -> dict:
    """Name -> figures of each policy; those that the cap does not suffice for have no times."""
    from timing import progress

    if given.finalists:
        policies = promising(policies, cap, 2 * given.finalists)
    policies, tries = policies | plans(problem, cap, margin), {}
    for name in [name for name in (RECOMPUTE_ONLY, ADAPTIVE) if name in policies]:
        policies[name], tries[name] = _corrected(bench, problem, name, policies[name], cap, margin)
    progress("plans are found")
    rows = predictions(problem, policies, cap)
    setting = bench.settings(policies, None)
    peaks = {name: (bench.peak(setting, name), bench.allocator()) for name in rows}
    setting = bench.settings(policies, cap, uncapped=(KEEP_ALL,))  # whose engines have host buffers of their own
    for name, row in rows.items():
        peak, allocator = peaks[name]
        row |= allocator | {"fits": name == KEEP_ALL, "plans_tried": tries.get(name, 0)}
        if peak is not None:
            row["device_bytes_at_peak"] = peak - bench.static
            row["fits"] |= peak <= cap and bench.peak(setting, name) is not None  # the second: also when fragmented
    progress("peaks are measured")
    fitting = [name for name, row in rows.items() if row["fits"]]
    slow: list[str] = []
    if given.finalists:
        once = bench.times(setting, fitting, KEEP_ALL, 1, clock)
        by_hand = [name for name in once if rows[name]["peer"] and name not in (KEEP_ALL, FULL)]
        slow = sorted(by_hand, key=lambda name: once[name]["median_ms"])[given.finalists :]
        fitting = [name for name in once if name not in slow]
    reference = bench.losses(setting, KEEP_ALL, given.losses)
    for name in fitting:
        losses = bench.losses(setting, name, given.losses)
        rows[name]["same"] = None if None in (losses, reference) else losses == reference
    progress("losses are compared")
    setting.stalls.clear()
    timed = bench.times(setting, fitting, KEEP_ALL, given.rounds, clock, given.minutes)
    for name in rows.keys() - timed.keys():
        rows[name]["fits"] &= name in slow
    for name, times in timed.items():
        steps = (times["rounds"] + 1) * (1 + bench.warm)
        rows[name] |= times | {"stall_ms_per_step": 1e3 * setting.stalls[name] / steps}
    return rows


def promising(policies: dict[str, Policy], cap: int, most: int) -> dict[str, Policy]:
    """Keeping everything, full recompute, and so many others that are predicted to be the fastest within the cap, or
    five percent beyond it: predictions are not exact."""
    others = {name: one for name, one in policies.items() if name not in (KEEP_ALL, FULL)}
    near = [name for name, one in others.items() if max(one.predicted.peaks) <= 1.05 * cap]
    chosen = {KEEP_ALL, FULL, *sorted(near, key=lambda name: others[name].predicted.seconds)[:most]}
    return {name: policies[name] for name in policies if name in chosen}


def _corrected(bench, problem: Problem, name: str, policy: Policy, cap: int, margin: float) -> tuple[Policy, int]:
    """The best plan whose step fits, of a few: after each the problem takes up what its peak is off the prediction. And
    how many there were."""
    tries: list[tuple[int, float, Policy]] = []
    while True:
        peak = bench.peak(bench.settings({name: policy}, None), name)
        tries.append((max(0, bench.whole if peak is None else peak - cap), policy.predicted.seconds, policy))
        if peak is None or len(tries) == _TRIES:
            break
        [stage] = problem.stages
        more = stage.temporary_bytes + peak - max(policy.predicted.peaks)
        problem = dataclasses.replace(problem, stages=(dataclasses.replace(stage, temporary_bytes=max(0, more)),))
        again = planned(problem, round((1 - margin) * cap), swap=name == ADAPTIVE)
        if isinstance(again, InfeasibleError) or any(again.plan == other.plan for *_, other in tries):
            break
        policy = dataclasses.replace(again, corrected=True)
    return min(tries, key=lambda one: one[:2])[2], len(tries)


def _draw(record: dict, target: Path, title: str) -> None:
    from picture import draw

    rows = {}
    for cap, one in record["caps"].items():
        for name, row in one["policies"].items():
            if "median_of_ratios" in row:
                rows.setdefault(name if row["peer"] else f"{name}, cap {cap}", row)
    draw(rows, target, title)


if __name__ == "__main__":
    main()

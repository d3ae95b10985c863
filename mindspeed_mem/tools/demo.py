"""``python -m mindspeed_mem demo``: the example's small GPT without the package and with it, side by side.

It trains by the examples that come with the package, each time in a process of its own, as a user would start them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import mindspeed_mem
from mindspeed_mem import output, requirements
from mindspeed_mem.command_line import whole
from mindspeed_mem.report import page, page_data
from mindspeed_mem.report.units import mib

DESCRIPTION = """\
Trains a small GPT for some steps (on the source text of Python's standard library; nothing is downloaded):
without this package, with Megatron's full recompute, with activation swap, and on the CPU also with less
memory than the model wants, left to the planner. Prints what each takes and whether the numbers are the
same; metrics, logs and a page of the runs with the package stay in --folder. About a minute on two cores.
"""
MODEL = """--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --init-method-std 0.06
--attention-dropout 0 --hidden-dropout 0 --transformer-impl local --sdpa-attention --micro-batch-size 4
--global-batch-size 16 --lr 3e-3 --min-lr 3e-4 --weight-decay 0.1 --split 95,5,0 --log-interval 10""".split()
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
SHARE = 0.6
"""Of the device memory that the run without the package takes: what the planner is given."""
BYTES = 16
"""Of a parameter in fp32 with its gradient and Adam's two moments."""
_SHOWN = ("swap", "adaptive")
"""The runs that the page shows."""
FEWEST = 12
"""Steps that a plan takes to settle, and some after it."""


class Variant(NamedTuple):
    """One way to train."""

    name: str
    title: str
    flags: list[str]


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", default="auto", metavar="NAME", help="cpu, cuda or npu (auto: what is there)")
    command.add_argument("--steps", default="20", metavar="N", help="optimizer steps of each run (20)")
    command.add_argument("--folder", default="mindspeed_mem_demo", help="for metrics and logs (mindspeed_mem_demo)")


def main(given: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    wrong: list[str] = []
    steps = whole("--steps", given.steps, wrong) or FEWEST
    if steps < FEWEST:
        wrong.append(f"--steps: got {steps}, must be at least {FEWEST}: a plan takes some to settle")
    missing = requirements.absent() or _without_megatron()
    examples = folder_of_examples()
    if missing is None and examples is None:
        missing = "the examples are not installed with this package; install it anew, or use a checkout"
    if missing is None:
        from mindspeed_mem.device import DeviceError, get_backend

        try:
            backend = get_backend(given.device)
            given.device, given.on_host = backend.type, backend.is_host
        except DeviceError as error:
            wrong.append(f"--device: {error}")
    if missing is not None or wrong:
        print("mindspeed_mem demo:", *(f"  {reason}" for reason in [*([missing] if missing else []), *wrong]),
              sep="\n", file=sys.stderr)  # fmt: skip
        return 2 if wrong else 1
    assert examples is not None
    return _train(examples, Path(given.folder), given.device, given.on_host, steps)


def folder_of_examples() -> Path | None:
    """Where the examples lie: inside an installed package, or beside that of a checkout."""
    return next((at for at in (Path(base) / "examples" for base in mindspeed_mem.__path__) if at.is_dir()), None)


def _without_megatron() -> str | None:
    if importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None:
        return None
    return f"megatron-core is not installed: {sys.executable} -m pip install 'mindspeed-mem[megatron]'"


def _train(examples: Path, folder: Path, device: str, on_host: bool, steps: int) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    everything = examples / "configs" / "swap_everything.yaml"
    variants = [
        Variant("without", "without the package", []),
        Variant("full", "Megatron's full recompute", FULL),
        Variant("swap", "swap of all activations", ["--memory-config", str(everything)]),
    ]
    solver = requirements.without_solver()
    if on_host and solver is None:
        variants.append(Variant("adaptive", f"planned, in {SHARE:.0%} of the memory", []))
    runs: list[list[dict[str, Any]]] = []
    for place, (name, title, flags) in enumerate(variants, 1):
        if name == "adaptive":
            whole_peak = _optimizer_bytes(folder) + max(row["peak_activation_bytes"] for row in runs[0])
            flags = ["--adaptive-memory-optimization", "--device-memory-gib", f"{SHARE * whole_peak / 2**30:.6f}"]
        print(f"[{place}/{len(variants)}] {title}: {steps} steps on {device} ...", end=" ", flush=True)
        began = time.perf_counter()
        metrics, log = folder / f"{name}.jsonl", folder / f"{name}.log"
        length = ["--train-iters", str(steps), "--device", device, "--metrics-file", str(metrics)]
        if name in _SHOWN:
            flags = [*flags, "--memory-report", str(folder / name)]
        status = _run([sys.executable, str(examples / "pretrain_gpt.py"), *MODEL, *length, *flags], log)
        print(f"{time.perf_counter() - began:.0f} s" if status == 0 else "failed", flush=True)
        if status:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            print(f"{last}\nmindspeed_mem demo: this run ended with status {status}; its log is {log}", file=sys.stderr)
            return 1
        runs.append([json.loads(line) for line in metrics.read_text().splitlines()])
    same = _print_table([one.title for one in variants], runs)
    if solver is not None:
        print(f"not shown is the planner: {solver}")
    print(f"metrics and logs: {folder}/    the scripts to start from: {examples}/")
    print(_page(folder, {one.name: one.title for one in variants if one.name in _SHOWN}))
    return 0 if same else 1


def _page(folder: Path, titles: dict[str, str]) -> str:
    """Make the page, and say where it is."""
    if missing := page.missing():
        return f"no page: {missing}"
    runs = [page_data.read([folder / name, folder / f"{name}.jsonl"], title) for name, title in titles.items()]
    output.write(folder / "page.html", page.page(runs))
    return f"memory over a step, the plan, copies: open {folder}/page.html in a browser"


def _optimizer_bytes(folder: Path) -> int:
    found = re.search(r"^ ([\d,]+) parameters on rank 0$", (folder / "without.log").read_text(), re.MULTILINE)
    assert found is not None, "the example prints it"
    return BYTES * int(found[1].replace(",", ""))


def _run(command: list[str], log: Path) -> int:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment.setdefault("OMP_NUM_THREADS", "1")
    if not command[1].startswith(str(Path(mindspeed_mem.__file__).parent)):  # a checkout, which may not be installed
        path = [str(Path(mindspeed_mem.__file__).parents[1]), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    with open(log, "w") as output:
        return subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode


def _print_table(titles: list[str], runs: list[list[dict[str, Any]]]) -> bool:
    """Steady figures: of the second half of the steps. Returns whether the numbers of all runs are the same."""
    width = max(map(len, titles))
    heads = f"{'activations MiB':>15}  {'moved MiB':>9}  {'ms a step':>9}  {'last loss':>9}  the same bits"
    print(f"\n{'':{width}}  {heads}")
    same = True
    for title, rows in zip(titles, runs, strict=True):
        steady = rows[len(rows) // 2 :]
        peak, moved = (max(row[key] for row in steady) for key in ("peak_activation_bytes", "swapped_bytes"))
        milliseconds = sorted(row["step_ms"] for row in steady)[len(steady) // 2]
        numbers = [[(row["loss"], row["grad_norm"]) for row in one] for one in (rows, runs[0])]
        equal = numbers[0] == numbers[1]
        same = same and equal
        said = "" if rows is runs[0] else "yes" if equal else "NO"
        figures = f"{mib(peak):>15}  {mib(moved):>9}  {milliseconds:9.0f}  {rows[-1]['loss']:9.5f}"
        print(f"{title:{width}}  {figures}  {said}")
    print("\nthe same bits: losses and gradient norms of all steps. Memory of the host is not shown; times are of this")
    print("machine and this small model: they say nothing about others.")
    return same

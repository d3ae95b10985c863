"""`make compat`: what works on which megatron-core. Writes mindspeed_mem/compat.json and docs/versions.md.

    python -m tests.compat --folder .venv-compat --python python3.12 [--only 0.19.2 ...] [--features swap ...]

One environment per version: a folder with that megatron-core and nothing else, in front of one that all share (torch,
and what the tests need). In each the doctor runs, then the cases of each feature below: tests of this suite which
compare every bit with Megatron alone. A feature that the table of features refuses on a version has no cases there.

`make test-newest` runs a few of these cases with the newest version and the oldest, and writes nothing (`--quick`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mindspeed_mem import features, requirements
from mindspeed_mem.features import checking
from mindspeed_mem.features.rows import Feature
from tests.pages import table

ROOT = Path(__file__).resolve().parents[1]
TABLE, PAGE = ROOT / "mindspeed_mem" / "compat.json", ROOT / "docs" / "versions.md"
SHARED = ("wrapt", "PyYAML", "numpy", "scipy", "psutil", "packaging", "pytest", "hypothesis")
OF_TORCH = ("filelock", "typing_extensions", "setuptools", "sympy", "networkx", "jinja2", "fsspec")
"""What torch depends on to run on the CPU: .ci/cpu-torch installs it alone."""
PYTHONS = ("python3.12", "python3.13")
"""Those that can have every version: megatron-core 0.17 needs 3.12."""
EXPERTS = "tests/numerics/test_recompute.py::test_expert_layers[alltoall, expert bias]"
FEATURES: dict[str, tuple[str, list[str], list[str]]] = {
    "swap": (
        "--memory-config",
        [f"tests/numerics/test_swap.py::test_every_policy_on_every_kind_of_model[{kind}]" for kind in ("dense", "moe")],
        ["tests/numerics/test_swap.py::test_every_layout[PP2]"],
    ),
    "recompute": (
        "--select-recompute",
        [
            "tests/numerics/test_recompute.py::test_other_kinds_of_model[dropout]",
            EXPERTS,
        ],
        ["tests/numerics/test_recompute_layouts.py::test_every_layout[PP2]"],
    ),
    "survival of out-of-memory": (
        "--survive-oom",
        [
            "tests/memory/test_survive_oom.py::test_with_less_and_less_memory_every_bit_is_the_same[moe]",
            "tests/memory/test_survive_oom.py::test_a_second_attempt_after_shared_experts_that_were_left_half_way",
        ],
        ["tests/memory/test_survive_oom.py::test_one_rank_alone_lacks_memory[pipeline]"],
    ),
    "adaptive plans": (
        "--adaptive-memory-optimization",
        ["tests/memory/test_adaptive_run.py::test_training_is_bit_identical_and_settles[dense-{'layers': 4}]"],
        ["tests/memory/test_adaptive_run.py::test_ranks_settle_together[pp2]"],
    ),
    "pipeline stages": (
        "--pipeline-stages",
        [],
        [
            f"tests/numerics/test_pipeline_stages.py::test_uneven_stages_train_to_the_same_bits[{one}]"
            for one in ("pp2", "pp2-vpp2")
        ],
    ),
    "cap on micro-batches": (
        "--max-inflight-microbatches",
        [],
        [
            f"tests/numerics/test_pipeline_cap.py::test_bit_identical_to_megatrons_schedule[{one}]"
            for one in ("pp2", "pp2-vpp2")
        ],
    ),
    "chunk ZeRO": (
        "--chunk-zero-stage",
        ["tests/numerics/test_chunk_zero.py::test_other_numbers_of_ranks[1]"],
        [f"tests/numerics/test_chunk_zero.py::test_two_ranks[{one}]" for one in ("kinds", "options")],
    ),
    "optimizer parallelism": (
        "--optimizer-parallel",
        ["tests/distributed/test_optimizer_parallel_megatron.py::test_one_rank_keeps_its_own_optimizer"],
        [
            f"tests/distributed/test_optimizer_parallel_megatron.py::test_megatron_trains_to_the_same_bits[{one}]"
            for one in ("fp32-dp2", "fp16-dp2")
        ],
    ),
    "split backward": (
        "--split-backward",
        ["tests/numerics/test_split_backward.py::test_every_kind_of_model[bf16]"],
        ["tests/numerics/test_split_backward.py::test_every_layout[fp32]"],
    ),
    "zero bubble": (
        "--pipeline-schedule zb",
        [],
        [
            f"tests/numerics/test_pipeline_cap.py::test_gradients_of_weights_in_idle_time_are_bit_identical[{one}]"
            for one in ("dropout-pp2", "pp2-vpp2")
        ],
    ),
    "zero bubble in a V": (
        "--pipeline-schedule v",
        [],
        ["tests/numerics/test_pipeline_v.py::test_two_stages[fp32]"],
    ),
    "Adam on the host": (
        "--host-optimizer-step",
        [],
        ["tests/numerics/test_chunk_placement.py::test_the_host_steps_what_rests_there"],
    ),
    "attention by SDPA": (
        "--sdpa-attention",
        [f"tests/numerics/test_sdpa.py::test_equals_megatrons_own[{one}]" for one in ("grouped", "dropout")],
        ["tests/numerics/test_sdpa.py::test_a_model_trains_alike[2-dropout-True-layout3]"],
    ),
    "traces": (
        "--memory-trace",
        [f"tests/memory/test_trace.py::{one}" for one in ("test_swapped_steps", "test_second_runs")],
        [],
    ),
}
"""By feature: its flag, and the cases on one rank and on two."""
QUICK = (
    "tests/numerics/test_swap.py::test_every_layout[PP2]",
    "tests/numerics/test_recompute.py::test_other_kinds_of_model[dropout]",
    "tests/memory/test_adaptive_run.py::test_training_is_bit_identical_and_settles[dense-{'layers': 4}]",
    "tests/numerics/test_pipeline_cap.py::test_bit_identical_to_megatrons_schedule[pp2]",
    "tests/numerics/test_chunk_zero.py::test_other_numbers_of_ranks[1]",
)
"""Of these cases, those that CI runs."""
LESS = {
    ("0.12.1", "recompute"): (
        EXPERTS,
        "patterns that name code between two markers, which that version lacks, do nothing",
    ),
}
"""Of a feature on a version: the case that is left out, and why it works all the same."""
_ASK = """
import json, platform, torch
from tests.compat import FEATURES, refusal
refused = {name: refusal(flag) for name, (flag, *_) in FEATURES.items()}
print(json.dumps([platform.python_version(), torch.__version__.partition("+")[0], refused]))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-compat", help="where the environments go")
    parser.add_argument("--python", help=f"3.12 or newer (default: {' or '.join(PYTHONS)}, on PATH or of pyenv)")
    parser.add_argument("--torch", default=_pinned_torch(), metavar="VERSION")
    parser.add_argument("--only", nargs="+", metavar="VERSION")
    parser.add_argument("--features", nargs="+", choices=FEATURES, help="these rows; the others keep what they say")
    parser.add_argument("--quick", action="store_true", help="a few cases with the newest and the oldest; no table")
    parser.add_argument("--install", action="store_true", help="only make the environments")
    given = parser.parse_args()
    tested = list(requirements.TESTED["megatron-core"])
    versions = given.only or ([tested[-1], tested[0]] if given.quick else tested)
    python = given.python or _python()
    if python is None:
        needs = f"megatron-core {versions[0]} needs Python 3.12, and none is found on PATH or among pyenv's versions"
        print(f"newest: {needs}; its tests are NOT RUN" if given.quick else needs)
        return not given.quick
    folder = given.folder.resolve()
    for version in versions:
        if why := _make(folder, python, given.torch, version):
            print(f"newest: {why}; its tests are NOT RUN" if given.quick else why)
            return not given.quick
    if given.install:
        return 0
    if given.quick:
        with ThreadPoolExecutor(2) as at_once:  # a version on each of two cores
            examined = at_once.map(lambda one: _examined(folder, one, QUICK), versions)
            return _shown(dict(zip(versions, examined, strict=True)))
    found = json.loads(TABLE.read_text()) if TABLE.is_file() else {}
    only = tuple(case for name in given.features or () for cases in FEATURES[name][1:] for case in cases)
    for version in versions:
        examined = _examined(folder, version, only)
        if only:
            examined["features"] = found[version]["features"] | examined["features"]
        found[version] = examined
        found = {one: found[one] for one in sorted(found, key=lambda v: [int(n) for n in v.split(".")])}
        TABLE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(found), encoding="utf-8")
        print(f"{version}: {json.dumps(found[version]['features'])}", flush=True)
    return _shown(found)


def row(flag: str) -> Feature:
    """Of the table of features: who says from which version on `flag`, or a value of it, can be had."""
    (found,) = (one for one in features.FEATURES if one.flag == flag.partition(" ")[0])
    return found if found.since or len(found.needs_features) != 1 else row(*found.needs_features)


def since(flag: str) -> str | None:
    """The first megatron-core that can carry `flag`, or a value of it; None: any."""
    return checking.V_SINCE if flag == "--pipeline-schedule v" else row(flag).since


def refusal(flag: str) -> str | None:
    """Why the megatron-core of this process cannot carry `flag`, or a value of it; None: it can."""
    return features.too_old(row(flag), flag.partition(" ")[2] or None)


def _shown(found: dict[str, Any]) -> int:
    """Say what fails; returns the exit status."""
    wrong = [
        f"{version}: {name}: {why}"
        for version, one in found.items()
        for name, why in (*one["features"].items(), ("doctor", one["doctor"]))
        if not why.startswith(("works", "refused"))
    ]
    print("\n".join(wrong) or f"nothing fails with megatron-core {', '.join(found)}", flush=True)
    return 1 if wrong else 0


def _pinned_torch() -> str:
    pins = (ROOT / "requirements-cpu.txt").read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix("torch==") for line in pins if line.startswith("torch=="))


def _python() -> str | None:
    """A Python that can have every version; None: there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    of_pyenv = [str(path) for name in PYTHONS for path in pyenv.glob(f"{name.removeprefix('python')}*/bin/python")]
    for one in (sys.executable, *filter(None, map(shutil.which, PYTHONS)), *of_pyenv):
        # One on PATH may be a stub of a version manager that does not run.
        check = [one, "-c", "import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info < (3, 14))"]
        if subprocess.run(check, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return one
    return None


def _make(folder: Path, python: str, torch: str, version: str) -> str | None:
    """Make the environment of a megatron-core where it is not there yet; returns why it cannot be made."""
    shared, own = folder / "shared", folder / version
    run, made = shared / "bin" / "python", shared / "made"
    pip = [str(run), "-m", "pip", "install", "--quiet", "--no-warn-conflicts"]
    wanted = "\n".join((torch, *SHARED, *OF_TORCH))
    if not made.is_file() or made.read_text(encoding="utf-8") != wanted:
        subprocess.run([python, "-m", "venv", "--clear", str(shared)], check=True)
        for command in ([str(ROOT / ".ci" / "cpu-torch"), str(run), torch], [*pip, *SHARED, *OF_TORCH]):
            if subprocess.run(command, check=False).returncode:
                return f"torch {torch} or what it needs cannot be installed here"
        made.write_text(wanted, encoding="utf-8")
    if not (own / "megatron").is_dir():
        command = [*pip, "--no-deps", "--target", str(own), f"megatron-core=={version}"]
        if subprocess.run(command, check=False).returncode:
            return f"megatron-core {version} cannot be installed here"
    return None


def _examined(folder: Path, version: str, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """What works on a version, by all cases or by those named."""
    own, run = folder / version, [str(folder / "shared" / "bin" / "python")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{own}", "OMP_NUM_THREADS": "1", "MINDSPEED_MEM_DEVICE": "cpu"}

    def ask(*command: str) -> str:
        done = subprocess.run([*run, *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(done.stdout, flush=True)
        return done.stdout

    doctor = json.loads(ask("-m", "mindspeed_mem", "doctor", "--json"))
    python, torch, refused = json.loads(ask("-c", _ASK).splitlines()[-1])
    cases = {name: [*one, *two] for name, (_, one, two) in FEATURES.items() if not refused[name]}
    less = {name: what for (version, name), what in LESS.items() if version == own.name}
    cases |= {name: [case for case in cases[name] if case != left_out] for name, (left_out, _) in less.items()}
    if only:
        cases = {name: left for name, some in cases.items() if (left := [case for case in some if case in only])}
    report = own / "report.xml"
    report.unlink(missing_ok=True)
    wanted = [case for some in cases.values() for case in some]
    if wanted:  # pytest would take none for all
        ask("-m", "pytest", "-q", "--sweep", f"--junitxml={report}", *wanted)
    outcomes = _outcomes(report)
    results = {}
    for name in FEATURES:
        if only and name not in cases and not refused[name]:
            continue
        failed = [case for case in cases.get(name, ()) if outcomes.get(_short(case)) != "passed"]
        results[name] = f"refused: {refused[name]}" if refused[name] else ": ".join(("works", *less.get(name, ())[1:]))
        if failed:
            results[name] = "fails: " + ", ".join(f"{_short(case)} {outcomes.get(_short(case))}" for case in failed)
    problems = doctor["problems"]
    return {
        "python": python,
        "torch": torch,
        "doctor": "works" if not problems else f"{len(problems)} wrong: {'; '.join(problems)}",
        "features": results,
    }


def _short(case: str) -> str:
    return case.rpartition("/")[2]


def _outcomes(report: Path) -> dict[str, str]:
    found = {}
    for case in ElementTree.parse(report).iter("testcase") if report.is_file() else ():
        bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found[f"{case.get('classname', '').rpartition('.')[2]}.py::{case.get('name')}"] = bad[0] if bad else "passed"
    return found


_INTRODUCTION = """\
# Versions of megatron-core

In each of these the doctor found nothing wrong, and every feature that works trained small models to the same bits as
Megatron alone (attention by SDPA and Adam on the host: up to rounding), on one rank and on two, on a CPU. megatron-core
0.17 and newer need Python 3.12 or newer.
`make compat` makes this page; what holds for the version that is installed is part of what this prints:

```console
$ python -m mindspeed_mem doctor
```
""".split("\n")
_END = """\
On any other version the pack says once that no test has run with it. `python -m mindspeed_mem doctor` then names each
patched symbol whose source is none of those that its patch was read against, and a symbol whose parameters are others
is refused.

By hand, the doctor and a few of these cases: Python 3.10 with megatron-core 0.16.1 and torch 2.13 (from a wheel), and
Python 3.13 with megatron-core 0.19.2 and torch 2.15.
""".split("\n")


def page(found: dict[str, Any]) -> str:
    """The page that shows the table."""
    rows = {what: [one[what] for one in found.values()] for what in ("python", "torch")}
    rows |= {
        f"{name} (`{flag}`)": [one["features"].get(name, "not run") for one in found.values()]
        for name, (flag, *_) in FEATURES.items()
    }
    return "\n".join([*_INTRODUCTION, *table(found, rows), "", *_END])


if __name__ == "__main__":
    sys.exit(main())

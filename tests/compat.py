"""`make compat`: what works on which megatron-core. Writes mindspeed_mem/compat.json and docs/versions.md.

    python -m tests.compat --folder .venv-compat --python python3.12 [--only 0.19.2 ...]

One environment per version: a folder with that megatron-core and nothing else, in front of one that all share (torch,
and what the tests need). In each the doctor runs, then the cases of each feature below: tests of this suite which
compare every bit with Megatron alone. A feature that the table of features refuses on a version has no cases there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from mindspeed_mem import requirements

ROOT = Path(__file__).resolve().parents[1]
TABLE, PAGE = ROOT / "mindspeed_mem" / "compat.json", ROOT / "docs" / "versions.md"
SHARED = ("wrapt", "PyYAML", "numpy", "scipy", "psutil", "packaging", "pytest", "hypothesis")
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
        ["tests/memory/test_survive_oom.py::test_with_less_and_less_memory_every_bit_is_the_same[moe]"],
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
}
LESS = {
    ("0.12.1", "recompute"): (
        EXPERTS,
        "patterns that name code between two markers, which that version lacks, do nothing",
    ),
}
"""Of a feature on a version: the case that is left out, and why it works all the same."""
_ASK = """
import json, platform, sys, torch
from mindspeed_mem import features
refused = {one.flag: features.too_old(one) for one in features.FEATURES}
print(json.dumps([platform.python_version(), torch.__version__.partition("+")[0], refused]))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-compat", help="where the environments go")
    parser.add_argument("--python", default=sys.executable, help="3.12 or newer: megatron-core 0.17 needs it")
    parser.add_argument("--torch", default="torch==2.13.0")
    parser.add_argument("--only", nargs="+", default=list(requirements.TESTED["megatron-core"]), metavar="VERSION")
    given = parser.parse_args()
    found = json.loads(TABLE.read_text()) if TABLE.is_file() else {}
    for version in given.only:
        run = _environment(given.folder.resolve(), given.python, given.torch, version)
        found[version] = _examined(given.folder.resolve() / version, run)
        found = {one: found[one] for one in sorted(found, key=lambda v: [int(n) for n in v.split(".")])}
        TABLE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(found), encoding="utf-8")
        print(f"{version}: {json.dumps(found[version]['features'])}", flush=True)
    wrong = [
        f"{version}: {name}: {why}"
        for version, one in found.items()
        for name, why in (*one["features"].items(), ("doctor", one["doctor"]))
        if not why.startswith(("works", "refused"))
    ]
    print("\n".join(wrong) or "nothing fails", flush=True)
    return 1 if wrong else 0


def _environment(folder: Path, python: str, torch: str, version: str) -> list[str]:
    """What runs Python with this megatron-core, made where it is not there yet."""
    shared, own = folder / "shared", folder / version
    run = str(shared / "bin" / "python")
    pip = [run, "-m", "pip", "install", "--quiet"]
    if not (shared / "made").is_file():
        subprocess.run([python, "-m", "venv", str(shared)], check=True)
        subprocess.run([*pip, torch, *SHARED], check=True)
        (shared / "made").touch()
    if not (own / "megatron").is_dir():
        subprocess.run([*pip, "--no-deps", "--target", str(own), f"megatron-core=={version}"], check=True)
    return [run]


def _examined(own: Path, run: list[str]) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{own}", "OMP_NUM_THREADS": "1", "MINDSPEED_MEM_DEVICE": "cpu"}

    def ask(*command: str) -> str:
        done = subprocess.run([*run, *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        return done.stdout

    doctor = json.loads(ask("-m", "mindspeed_mem", "doctor", "--json"))
    python, torch, refused = json.loads(ask("-c", _ASK).splitlines()[-1])
    cases = {name: [*one, *two] for name, (flag, one, two) in FEATURES.items() if not refused[flag]}
    less = {name: what for (version, name), what in LESS.items() if version == own.name}
    cases |= {name: [case for case in cases[name] if case != left_out] for name, (left_out, _) in less.items()}
    report = own / "report.xml"
    report.unlink(missing_ok=True)
    ask("-m", "pytest", "-q", f"--junitxml={report}", *(case for some in cases.values() for case in some))
    outcomes = _outcomes(report)
    features = {}
    for name, (flag, *_) in FEATURES.items():
        failed = [case for case in cases.get(name, ()) if outcomes.get(_short(case)) != "passed"]
        features[name] = f"refused: {refused[flag]}" if refused[flag] else ": ".join(("works", *less.get(name, ())[1:]))
        if failed:
            features[name] = "fails: " + ", ".join(f"{_short(case)} {outcomes.get(_short(case))}" for case in failed)
    problems = doctor["problems"]
    return {
        "python": python,
        "torch": torch,
        "doctor": "works" if not problems else f"{len(problems)} wrong: {'; '.join(problems)}",
        "features": features,
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
Megatron alone, on one rank and on two, on a CPU. megatron-core 0.17 and newer need Python 3.12 or newer.
`make compat` makes this page; what holds for the version that is installed is part of what this prints:

```console
$ python -m mindspeed_mem doctor
```
""".split("\n")
_END = """\
On any other version the pack says once that no test has run with it. `python -m mindspeed_mem doctor` then names each
patched symbol whose source is none of those that its patch was read against, and a symbol whose parameters are others
is refused.
""".split("\n")


def page(found: dict[str, Any]) -> str:
    """The page that shows the table."""
    reasons: list[str] = []

    def cell(text: str) -> str:
        word, _, why = text.partition(": ")
        if why and why not in reasons:
            reasons.append(why)
        return f"{word} ({reasons.index(why) + 1})" if why else word

    lines = [*_INTRODUCTION, f"| | {' | '.join(found)} |", f"|---{'|---' * len(found)}|"]
    for what in ("python", "torch"):
        lines.append(f"| {what} | {' | '.join(one[what] for one in found.values())} |")
    for name, (flag, *_) in FEATURES.items():
        lines.append(f"| {name} (`{flag}`) | {' | '.join(cell(one['features'][name]) for one in found.values())} |")
    lines += ["", *(f"{number}. {why}" for number, why in enumerate(reasons, 1)), ""] if reasons else [""]
    return "\n".join([*lines, *_END])


if __name__ == "__main__":
    sys.exit(main())

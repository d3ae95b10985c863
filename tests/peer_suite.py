"""`make peer-suite MEGATRON_LM=PATH`: Megatron-LM's own unit tests beside our features. Writes docs/peer-suite.md.

    python -m tests.peer_suite PATH [--only test_attention.py ...] [--features swap ...]

Each listed file of tests/unit_tests runs on CPU ranks, in processes of its own, with the CPU patches alone and with
each feature; outcomes are compared test by test. A test that fails without features is none for the CPU, and counts as
such. Every other difference is a defect, or explained in EXPLAINED. Files that are not run this time stay in the table
(tests/peers/peer-suite.json).
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path

from tests.megatron_lm import PEERS, ROOT, swap_plan, version_of
from tests.pages import table

TABLE, PAGE = PEERS / "peer-suite.json", ROOT / "docs" / "peer-suite.md"
FEATURES = {
    "swap everything": ["--memory-config", "plan.json"],
    "recompute everything": ["--recompute-layers", "all"],
    "survival": ["--survive-oom"],
    "cap on micro-batches": ["--max-inflight-microbatches", "1"],
    "chunk ZeRO": ["--chunk-zero-stage", "3"],
}
_PIPELINES, _CHUNKS = ("cap on micro-batches",), ("chunk ZeRO",)
_ACTIVATIONS = ("swap everything", "recompute everything", "survival")
FILES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "transformer/test_transformer_block.py": (1, "", _ACTIVATIONS),
    "transformer/test_transformer_layer.py": (1, "", _ACTIVATIONS),
    "transformer/test_attention.py": (1, "", _ACTIVATIONS),
    "transformer/test_attention_no_rope.py": (1, "", _ACTIVATIONS),
    "transformer/test_multi_token_prediction.py": (1, "", _ACTIVATIONS),
    "transformer/moe/test_moe_layer.py": (1, "", _ACTIVATIONS),
    "transformer/moe/test_routers.py": (1, "", _ACTIVATIONS),
    "models/test_heterogeneous_gpt_model.py": (1, "", _ACTIVATIONS),
    "ssm/test_mamba_block.py": (1, "", _ACTIVATIONS),
    "tensor_parallel/test_random.py": (1, "", _ACTIVATIONS),
    "tensor_parallel/test_layers.py": (1, "", _ACTIVATIONS),
    "distributed/test_finalize_model_grads.py": (2, "", _CHUNKS),
    "test_checkpointing.py": (1, "", _CHUNKS),
    "distributed/test_param_and_grad_buffer.py": (1, "", _CHUNKS),
    "pipeline_parallel/test_schedules.py": (8, "order or custom", (*_ACTIVATIONS, *_PIPELINES, *_CHUNKS)),
}
"""The number of ranks that a file wants, which of its tests are left out (they take minutes), and the features that
have to do with it."""
EXPLAINED: dict[tuple[str, str], str] = {
    ("distributed/*::test_bucket_sizes*", "chunk ZeRO"): (
        "Buffers of no distributed optimizer are refused by name, and chunks decide the sizes of buckets."
    ),
    ("distributed/*::test_grad_sync*-False]", "chunk ZeRO"): (
        "Buffers of no distributed optimizer are refused by name."
    ),
}
"""By a pattern of "file::test" and a feature: why an outcome is another one."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="Megatron-LM's")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="files whose path has one of these words")
    parser.add_argument("--features", nargs="+", metavar="WORD", help="features whose name has one of these words")
    parser.add_argument("--logs", type=Path, help="keep what the runs printed in this folder")
    given = parser.parse_args()
    checkout = given.checkout.resolve()
    version = version_of(checkout)
    if version is None or not (checkout / "tests" / "unit_tests").is_dir():
        print(f"{checkout} is no checkout of Megatron-LM: it has no tests/unit_tests", file=sys.stderr)
        return 2
    found = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.is_file() else {}
    rows = found.setdefault(version, {})
    files = [file for file in FILES if not given.only or any(word in file for word in given.only)]
    for file in files:
        if not (checkout / "tests" / "unit_tests" / file).is_file():
            rows[file] = {"natively": "not there"}
    files = [file for file in files if rows.get(file, {}).get("natively") != "not there"]
    natively = outcomes(checkout, files, [], given.logs)
    passed = {file: sum(one == "passed" for one in natively[file].values()) for file in files}
    for file in files:
        rows.setdefault(file, {})["natively"] = f"{passed[file]} of {len(natively[file])} passed"
    for feature, flags in FEATURES.items():
        if given.features and not any(word in feature for word in given.features):
            continue
        with_it = [file for file in files if feature in FILES[file][2] and passed[file]]
        ours = outcomes(checkout, with_it, flags, given.logs)
        for file in with_it:
            rows[file][feature] = compared(file, feature, natively[file], ours[file])
            print(f"{version} {file}, {feature}: {rows[file][feature]}", flush=True)
        TABLE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(found), encoding="utf-8")
    return int(any(text.startswith("differs") for one in rows.values() for text in one.values()))


def outcomes(checkout: Path, files: list[str], flags: list[str], logs: Path | None) -> dict[str, dict[str, str]]:
    """By file and test, "passed", "skipped" or what went wrong, on the first rank where something did."""
    if not files:
        return {}
    path = [str(PEERS), str(checkout), str(ROOT), os.environ.get("PYTHONPATH", "")]  # `tests` is the checkout's
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(PEERS / "peer_files.py"), "--device", "cpu", *flags, "--"]
    command += [f"{FILES[file][0]}:{FILES[file][1]}:{checkout}/tests/unit_tests/{file}" for file in files]
    found: dict[str, dict[str, str]] = {}
    with contextlib.ExitStack() as leaving:
        if logs is None:
            folder = Path(leaving.enter_context(tempfile.TemporaryDirectory()))
        else:
            folder = logs / "_".join(flags or ["natively"]).replace("/", "_")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps(swap_plan()), encoding="utf-8")
        status = subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, check=False).returncode
        for number, file in enumerate(files):
            for report in sorted(folder.glob(f"{number}.*.xml")):
                for test, outcome in _read(report).items():
                    if found.setdefault(file, {}).get(test, "passed") in ("passed", "skipped"):
                        found[file][test] = outcome
            if len(list(folder.glob(f"{number}.*.xml"))) < FILES[file][0]:
                found[file] = {"the file as a whole": f"no report from all ranks, status {status}"}
    return found


def _read(report: Path) -> dict[str, str]:
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        if not bad or bad[0].tag == "skipped":
            found[name] = bad[0].tag if bad else "passed"
        else:
            found[name] = (bad[0].get("message") or bad[0].tag).partition("\n")[0][:200]
    return found


def compared(file: str, feature: str, natively: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """What a feature changes in the outcomes of a file's tests: "the same", "explained: why" or "differs: where".

    A test that passes nowhere is the same whatever it says: messages have addresses and numbers in them.
    """
    others = {
        test: ours.get(test, "not there")
        for test in {**natively, **ours}
        if (natively.get(test) == "passed") != (ours.get(test) == "passed")
    }
    reasons = {
        test: why
        for (pattern, one), why in EXPLAINED.items()
        for test in others
        if one == feature and fnmatch.fnmatchcase(f"{file}::{test.rpartition('::')[2]}", pattern)
    }
    defects = [f"{test} ({others[test]})" for test in others if test not in reasons]
    if defects:
        return f"differs: {'; '.join(defects)}"
    if reasons:
        return f"{len(reasons)} explained: {' '.join(dict.fromkeys(reasons.values()))}"
    return "the same"


_INTRODUCTION = """\
# Megatron-LM's unit tests beside our features

Files of Megatron-LM's `tests/unit_tests` on CPU ranks (`--device cpu`), without and with each feature, in processes of
their own: how many tests pass without, and whether each passes and fails alike with the feature. What does not pass
without a feature needs CUDA, TransformerEngine, its kernels or other numbers of ranks; where a test names
TransformerEngine's layer spec, it gets the local one, and a hybrid stack gets state-space layers of torch operators.
Survival runs without a memory limit: it watches, and nothing has to leave.

```console
$ make peer-suite MEGATRON_LM=../Megatron-LM
```
""".split("\n")


def page(found: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    """The page that shows the tables, the newest checkout first."""
    lines = list(_INTRODUCTION)
    for version in sorted(found, key=lambda one: [int(part) for part in one.split(".")], reverse=True):
        rows = {
            f"`{file}` ({FILES[file][0]} ranks)" if FILES[file][0] > 1 else f"`{file}`": [
                one["natively"],
                *(one.get(feature, "not run" if feature in FILES[file][2] else "") for feature in FEATURES),
            ]
            for file, one in ((file, found[version][file]) for file in FILES if file in found[version])
            if not one["natively"].startswith(("0 ", "not"))
        }
        lines += [f"## {version}", "", *table(["natively", *FEATURES], rows), ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())

"""`make peer-suite MEGATRON_LM=PATH`: Megatron-LM's own unit tests beside our features. Writes docs/peer-suite.md.

    python -m tests.peer_suite PATH [--only test_attention.py ...] [--features swap ...]

Each listed file of tests/unit_tests runs on CPU ranks, in processes of its own, with the CPU patches alone and with
each feature; outcomes are compared test by test. A test that fails without features is none for the CPU, and counts as
such. Every other difference is a defect, or explained in EXPLAINED. Files that are not run this time stay in the table
(tests/peers/peer-suite.json).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path

from tests.megatron_lm import PEERS, ROOT, last_words, swap_plan, version_of
from tests.megatron_lm import run as run_ranks
from tests.pages import table

TABLE, PAGE = PEERS / "peer-suite.json", ROOT / "docs" / "peer-suite.md"
LIMIT = 900
"""Seconds that a file may take."""
FEATURES = {
    "swap everything": ["--memory-config", "plan.json"],
    "recompute everything": ["--recompute-layers", "all"],
    "survival": ["--survive-oom"],
    "cap on micro-batches": ["--max-inflight-microbatches", "1"],
    "chunk ZeRO": ["--chunk-zero-stage", "3"],
}
_PIPELINES, _CHUNKS = ("cap on micro-batches",), ("chunk ZeRO",)
_ACTIVATIONS = ("swap everything", "recompute everything", "survival")
FILES: dict[str, tuple[int, tuple[str, ...]]] = {
    "transformer/test_transformer_block.py": (1, _ACTIVATIONS),
    "transformer/test_transformer_layer.py": (1, _ACTIVATIONS),
    "transformer/test_attention.py": (1, _ACTIVATIONS),
    "transformer/test_attention_no_rope.py": (1, _ACTIVATIONS),
    "transformer/test_mlp.py": (1, _ACTIVATIONS),
    "transformer/test_multi_latent_attention.py": (1, _ACTIVATIONS),
    "transformer/test_multi_token_prediction.py": (1, _ACTIVATIONS),
    "transformer/moe/test_moe_layer.py": (1, _ACTIVATIONS),
    "transformer/moe/test_routers.py": (1, _ACTIVATIONS),
    "transformer/moe/test_sequential_mlp.py": (1, _ACTIVATIONS),
    "models/test_gpt_model.py": (1, _ACTIVATIONS),
    "models/test_t5_model.py": (1, _ACTIVATIONS),
    "models/test_bert_model.py": (1, _ACTIVATIONS),
    "models/test_heterogeneous_gpt_model.py": (1, _ACTIVATIONS),
    "ssm/test_mamba_block.py": (1, _ACTIVATIONS),
    "tensor_parallel/test_random.py": (1, _ACTIVATIONS),
    "tensor_parallel/test_layers.py": (1, _ACTIVATIONS),
    "distributed/test_param_and_grad_buffer.py": (1, _CHUNKS),
    "distributed/test_distributed_data_parallel.py": (1, _CHUNKS),
    "test_optimizer.py": (1, _CHUNKS),
    "dist_checkpointing/test_optimizer.py": (1, _CHUNKS),
    "dist_checkpointing/models/test_gpt_model.py": (1, _ACTIVATIONS),
    "pipeline_parallel/test_schedules.py": (8, (*_ACTIVATIONS, *_PIPELINES, *_CHUNKS)),
}
"""The number of ranks that a file wants, and the features that have to do with it."""
EXPLAINED: dict[tuple[str, str], str] = {}
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
    for file, (ranks, features) in FILES.items():
        if given.only and not any(word in file for word in given.only):
            continue
        if not (checkout / "tests" / "unit_tests" / file).is_file():
            rows[file] = {"natively": "not there"}
            continue
        with tempfile.TemporaryDirectory() as folder:
            natively = outcomes(checkout, file, ranks, [], Path(folder), given.logs)
            passed = sum(one == "passed" for one in natively.values())
            rows.setdefault(file, {})["natively"] = f"{passed} passed"
            for feature in features if passed else ():
                if not given.features or any(word in feature for word in given.features):
                    ours = outcomes(checkout, file, ranks, FEATURES[feature], Path(folder), given.logs)
                    rows[file][feature] = compared(file, feature, natively, ours)
        print(f"{version} {file}: {json.dumps(rows[file])}", flush=True)
        TABLE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(found), encoding="utf-8")
    return int(any(text.startswith("differs") for one in rows.values() for text in one.values()))


def outcomes(
    checkout: Path, file: str, ranks: int, flags: list[str], folder: Path, logs: Path | None
) -> dict[str, str]:
    """By test, "passed", "skipped" or what went wrong, on the first rank where something did."""
    (folder / "plan.json").write_text(json.dumps(swap_plan()), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "peer_plugin", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(checkout), str(checkout / "tests" / "unit_tests" / file)]
    flags = ["--device", "cpu", *flags]
    environment = {
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(PEERS), str(checkout), str(ROOT), os.environ.get("PYTHONPATH")])
        ),
        "PEER_FLAGS": " ".join(flags),
        "PYTEST_ADDOPTS": "",
    }
    for path in folder.glob("report*.xml"):
        path.unlink()
    status, output = run_ranks(ranks, [*command, "--junitxml=report{rank}.xml"], environment, folder, LIMIT)
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        name = "_".join([file.replace("/", "_"), *flags[2:]]).replace("/", "_")
        (logs / f"{name}.log").write_text(output, encoding="utf-8")
    found: dict[str, str] = {}
    for rank in range(ranks):
        path = folder / f"report{rank}.xml"
        if not path.is_file():
            return {"the file as a whole": f"status {status}: {last_words(output)}"}
        for name, outcome in _read(path).items():
            if found.get(name, "passed") in ("passed", "skipped"):
                found[name] = outcome
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
        if one == feature and fnmatch.fnmatchcase(f"{file}::{test}", pattern)
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
their own: how many tests pass without, and whether each outcome is the same with the feature. What does not pass
without a feature needs CUDA, TransformerEngine or other numbers of ranks. `make peer-suite MEGATRON_LM=PATH` makes this
page.
""".split("\n")


def page(found: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    """The page that shows the tables, the newest checkout first."""
    lines = list(_INTRODUCTION)
    for version in sorted(found, key=lambda one: [int(part) for part in one.split(".")], reverse=True):
        rows = {
            f"`{file}` ({FILES[file][0]} ranks)" if FILES[file][0] > 1 else f"`{file}`": [
                one["natively"].replace(":", ","),
                *(one.get(feature, "") for feature in FEATURES),
            ]
            for file, one in found[version].items()
            if not one["natively"].startswith(("0 ", "not"))
        }
        lines += [f"## {version}", "", *table(["natively", *FEATURES], rows), ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())

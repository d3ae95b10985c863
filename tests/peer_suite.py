"""`make peer-suite MEGATRON_LM=PATH`: Megatron-LM's own unit tests beside our features. Writes docs/peer-suite.md.

    python -m tests.peer_suite PATH [--mindspeed PATH] [--only test_attention.py ...] [--features swap ...]

Each listed file of tests/unit_tests runs on CPU ranks, in processes of its own, with the CPU patches alone and with
each feature; outcomes are compared test by test. A test that fails without features is none for the CPU, and counts as
such. Every other difference is a defect, or explained in EXPLAINED. Files that are not run this time stay in the table
(tests/peers/peer-suite.json). With a checkout of MindSpeed (`MINDSPEED=PATH` for make) its unit tests that need no NPU
run as well, on that Megatron-LM and with stand-ins for what it imports (tests/beside_mindspeed.py).
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

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
FILES_OF_MINDSPEED: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "megatron/test_recompute.py": (8, "", _ACTIVATIONS),
    "megatron/test_dot_product_attention.py": (8, "", _ACTIVATIONS),
    "megatron/tensor_parallel/test_random.py": (8, "", _ACTIVATIONS),
    "megatron/tensor_parallel/test_layers.py": (8, "", _ACTIVATIONS),
    "megatron/tensor_parallel/test_cross_entropy.py": (8, "", _ACTIVATIONS),
    "megatron/tensor_parallel/test_mappings.py": (8, "", _ACTIVATIONS),
    "megatron/tensor_parallel/test_data.py": (8, "", _ACTIVATIONS),
    "megatron/tensor_parallel/test_tensor_parallel_utils.py": (8, "", _ACTIVATIONS),
    "megatron/test_parallel_state_ep_with_cp.py": (8, "", _CHUNKS),
    "megatron/test_distrib_optimizer.py": (8, "", _CHUNKS),
    "megatron/test_overlap_grad_reduce.py": (8, "", _CHUNKS),
    "megatron/test_overlap_param_gather.py": (8, "", _CHUNKS),
    "mindspeed/test_register_patches.py": (1, "", _ACTIVATIONS),
}
"""Those of its tests_extend/unit_tests that train or patch; the others are of fused operators."""
EXPLAINED: dict[tuple[str, str], str] = {
    ("distributed/*::test_bucket_sizes*", "chunk ZeRO"): (
        "`test_bucket_sizes`: chunks decide the sizes of buckets, "
        "and buffers of no distributed optimizer are refused by name."
    ),
    ("distributed/*::test_grad_sync*-False]", "chunk ZeRO"): (
        "`test_grad_sync` without a distributed optimizer: refused by name."
    ),
    ("distributed/*::test_grad_sync*-True]", "chunk ZeRO"): (
        "`test_grad_sync` with one: it fills whole gradients, which no rank has with stages 2 and 3."
    ),
    ("distributed/*::test_force_all_reduce*True]", "chunk ZeRO"): (
        "`test_force_all_reduce`: it asks for whole gradients, which is refused by name."
    ),
    ("megatron/test_distrib_optimizer.py::*", "chunk ZeRO"): (
        "With any feature: MindSpeed's patch then lies above the one that lets fp16 parameters be the host's."
    ),
}
"""By a pattern of "file::test" and a feature: why an outcome is another one."""


class Suite(NamedTuple):
    """Files of a checkout, the folder that they are in, and what their runs find in the environment."""

    name: str
    folder: Path
    files: Mapping[str, tuple[int, str, tuple[str, ...]]]
    environment: Mapping[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="Megatron-LM's")
    parser.add_argument("--mindspeed", type=Path, metavar="PATH", help="a checkout of MindSpeed: its tests, too")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="files whose path has one of these words")
    parser.add_argument("--features", nargs="+", metavar="WORD", help="features whose name has one of these words")
    parser.add_argument("--logs", type=Path, help="keep what the runs printed in this folder")
    given = parser.parse_args()
    suites = [of_megatron(given.checkout.resolve())]
    if given.mindspeed is not None:
        suites.append(of_mindspeed(given.mindspeed.resolve(), given.checkout.resolve()))
    if problems := [f"{one.folder} is not there" for one in suites if not one.folder.is_dir()]:
        print("\n".join(problems), file=sys.stderr)
        return 2
    found = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.is_file() else {}
    for suite in suites:
        files = [file for file in suite.files if not given.only or any(word in file for word in given.only)]
        compare(suite, files, given.features, given.logs, found)
    rows = [row for suite in suites for row in found.get(suite.name, {}).values()]
    return int(any(text.startswith("differs") for row in rows for text in row.values()))


def of_megatron(checkout: Path) -> Suite:
    """The unit tests of a checkout of Megatron-LM."""
    # `tests` is the checkout's
    path = os.pathsep.join([str(PEERS), str(checkout), str(ROOT)])
    return Suite(version_of(checkout) or "", checkout / "tests" / "unit_tests", FILES, {"PYTHONPATH": path})


def of_mindspeed(checkout: Path, megatron: Path) -> Suite:
    """The unit tests of a checkout of MindSpeed, on one of Megatron-LM."""
    setup = checkout / "setup.py"
    version = re.search(r"^__version__ = '(.+)'", setup.read_text(encoding="utf-8") if setup.is_file() else "", re.M)
    name = f"MindSpeed {version[1] if version else ''} on {version_of(megatron)}"
    path = os.pathsep.join([str(PEERS), str(ROOT), str(megatron), str(checkout)])
    environment = {"PYTHONPATH": path, "MINDSPEED": str(checkout)}
    return Suite(name, checkout / "tests_extend" / "unit_tests", FILES_OF_MINDSPEED, environment)


def compare(suite: Suite, files: list[str], features: list[str] | None, logs: Path | None, found: dict) -> None:
    """Run files of a suite without and with features, and write what becomes of them."""
    rows = found.setdefault(suite.name, {})
    for file in files:
        if not (suite.folder / file).is_file():
            rows[file] = {"natively": "not there"}
    files = [file for file in files if rows.get(file, {}).get("natively") != "not there"]
    natively = outcomes(suite, files, [], logs)
    passed = {file: sum(one == "passed" for one in natively[file].values()) for file in files}
    for file in files:
        rows.setdefault(file, {})["natively"] = f"{passed[file]} of {len(natively[file])} passed"
    for feature, flags in FEATURES.items():
        if features and not any(word in feature for word in features):
            continue
        with_it = [file for file in files if feature in suite.files[file][2] and passed[file]]
        ours = outcomes(suite, with_it, flags, logs)
        for file in with_it:
            rows[file][feature] = compared(file, feature, natively[file], ours[file])
            print(f"{suite.name} {file}, {feature}: {rows[file][feature]}", flush=True)
        TABLE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(found), encoding="utf-8")


def outcomes(suite: Suite, files: list[str], flags: list[str], logs: Path | None) -> dict[str, dict[str, str]]:
    """By file and test, "passed", "skipped" or what went wrong, on the first rank where something did."""
    if not files:
        return {}
    path = os.pathsep.join(filter(None, [suite.environment["PYTHONPATH"], os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "MINDSPEED": "", **suite.environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(PEERS / "peer_files.py"), "--device", "cpu", *flags, "--"]
    command += [f"{suite.files[file][0]}:{suite.files[file][1]}:{suite.folder / file}" for file in files]
    found: dict[str, dict[str, str]] = {}
    with contextlib.ExitStack() as leaving:
        if logs is None:
            folder = Path(leaving.enter_context(tempfile.TemporaryDirectory()))
        else:
            folder = logs / "_".join([suite.name, *(flags or ["natively"])]).replace("/", "_").replace(" ", "_")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps(swap_plan()), encoding="utf-8")
        status = subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, check=False).returncode
        for number, file in enumerate(files):
            for report in sorted(folder.glob(f"{number}.*.xml")):
                for test, outcome in _read(report).items():
                    if found.setdefault(file, {}).get(test, "passed") in ("passed", "skipped"):
                        found[file][test] = outcome
            if len(list(folder.glob(f"{number}.*.xml"))) < suite.files[file][0]:
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

Files of Megatron-LM's `tests/unit_tests`, run on CPU ranks (`--device cpu`) without any feature ("natively") and with
each. The first column says how many tests pass natively; the others say whether each test passes or fails as it does
natively. Tests that do not pass natively need CUDA, TransformerEngine, its kernels or other numbers of ranks. Where a
test names TransformerEngine's layer spec, it gets the local one, and a hybrid stack gets state-space layers of torch
operators. Survival runs without a memory limit: it watches, and nothing has to leave. Of MindSpeed's
`tests_extend/unit_tests`, those that are not about fused operators run, with stand-ins for what it imports of an NPU;
there, "natively" is MindSpeed without the pack.

```console
$ make peer-suite MEGATRON_LM=../Megatron-LM MINDSPEED=../MindSpeed
```
""".split("\n")


def page(found: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    """The page that shows the tables, Megatron-LM's newest checkout first."""
    lines = list(_INTRODUCTION)
    for name in sorted(found, key=lambda one: (" " not in one, one), reverse=True):
        known = FILES_OF_MINDSPEED if " " in name else FILES
        rows = {
            f"`{file}` ({known[file][0]} ranks)" if known[file][0] > 1 else f"`{file}`": [
                one["natively"],
                *(one.get(feature, "not run" if feature in known[file][2] else "") for feature in FEATURES),
            ]
            for file, one in ((file, found[name][file]) for file in known if file in found[name])
            if not one["natively"].startswith(("0 ", "not"))
        }
        lines += [f"## {name}", "", *table(["natively", *FEATURES], rows), ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())

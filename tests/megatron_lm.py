"""`make megatron-lm MEGATRON_LM=PATH`: Megatron-LM's own scripts by our features. Writes docs/megatron-lm.md.

    python -m tests.megatron_lm PATH [--only pretrain_gpt.py ...] [--features swap ...]

Each script trains a tiny model on CPU ranks as a user would start it, without and with each feature: the bits of each
rank's losses and gradient norms are compared. The checkout's megatron is used, not that of an installed megatron-core,
which only lends the compiled index builder of its data sets where the checkout has none. Outcomes of checkouts and
scripts that are not run this time stay in the table (tests/peers/megatron-lm.json).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.pages import table
from tests.worlds import apply_cpu_patches

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "tests" / "peers"
TABLE, PAGE = PEERS / "megatron-lm.json", ROOT / "docs" / "megatron-lm.md"
LIMIT = 900
"""Seconds that a run may take."""
COMMON = """--device cpu --transformer-impl local --num-layers 4 --hidden-size 32 --num-attention-heads 2
--seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 9 --lr 1e-3
--split 90,5,5 --log-interval 1 --eval-iters 1 --eval-interval 100 --num-workers 0 --distributed-backend gloo
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm --no-bias-gelu-fusion
--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion""".split()
_TOKENS = "--mock-data --tokenizer-type NullTokenizer --vocab-size 100".split()
_HYBRID = [*_TOKENS, *"--spec hybrid_layers stack --num-layers 8".split()]
_SENTENCES = (
    "--legacy-tokenizer --tokenizer-type BertWordPieceLowerCase --data-path text --vocab-file words.txt".split()
)
SCRIPTS = {
    "pretrain_gpt.py": (_TOKENS, "0.002"),
    "pretrain_mamba.py": (_HYBRID, "0.0015"),
    "pretrain_hybrid.py": (_HYBRID, "0.0015"),
    "pretrain_t5.py": ([*_SENTENCES, "--decoder-seq-length", "32", "--vocab-extra-ids", "20"], "0.004"),
    "pretrain_bert.py": (_SENTENCES, "0.002"),
}
"""Arguments, and GiB that are about two thirds of what a step takes."""
LAYOUTS = {"1 rank": (1, []), "PP2": (2, ["--pipeline-model-parallel-size", "2"]), "DP2": (2, [])}
_SHARDED = ["--use-distributed-optimizer"]


class Case(NamedTuple):
    """A feature in a layout; `plain`: what Megatron alone is given beside the layout; `effect`: what the output of a
    run with the feature shows, so that it did not merely do nothing."""

    feature: str
    layout: str
    given: list[str]
    effect: str
    plain: list[str] = []

    @property
    def name(self) -> str:
        return f"{self.feature}, {self.layout}"


_SOME = r"0*[.\d]*[1-9]\d*"
_OUT, _AGAIN = rf"\n +\d+ +{_SOME} ", rf"\n +\d+ +[.\d]+ +[.\d]+ +{_SOME} "  # of the report's lines
_SHORT = ["--device-memory-gib", "SHORT"]
CASES = [
    *(Case("swap everything", layout, ["--memory-config", "plan.json"], _OUT) for layout in ("1 rank", "PP2", "DP2")),
    *(Case("recompute everything", layout, ["--recompute-layers", "all"], _AGAIN) for layout in ("1 rank", "PP2")),
    Case("adaptive", "1 rank", ["--adaptive-memory-optimization", *_SHORT], r"(?s)settled on plan.*" + _OUT),
    *(Case("survival", layout, ["--survive-oom", *_SHORT], _OUT) for layout in ("1 rank", "PP2")),
    Case("cap on micro-batches", "PP2", ["--max-inflight-microbatches", "1"], ""),
    Case("pipeline stages", "PP2", ["--pipeline-stages", "1,3"], "", ["--pipeline-model-parallel-layout", "Et|tttL"]),
    *(
        Case("chunk ZeRO", layout, [*_SHARDED, "--chunk-zero-stage", "3"], "chunk", _SHARDED)
        for layout in ("1 rank", "DP2")
    ),
    Case("optimizer parallelism", "DP2", ["--optimizer-parallel", "sharding"], ""),
]


class Ended(NamedTuple):
    """Of a run: the exit status, what all ranks printed, and by rank the bits that they wrote."""

    status: int
    output: str
    bits: dict[str, list[str]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="Megatron-LM's")
    parser.add_argument("--only", nargs="+", metavar="SCRIPT", default=list(SCRIPTS))
    parser.add_argument("--features", nargs="+", metavar="WORD", help="only cases whose name has one of these words")
    parser.add_argument("--logs", type=Path, help="keep what the runs printed in this folder")
    given = parser.parse_args()
    checkout = given.checkout.resolve()
    version = version_of(checkout)
    if version is None:
        print(f"{checkout} is no checkout of Megatron-LM: it has no megatron/core/package_info.py", file=sys.stderr)
        return 2
    found = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.is_file() else {}
    cases = [one for one in CASES if not given.features or any(word in one.name for word in given.features)]
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for script in given.only:
            rows = found.setdefault(version, {}).setdefault(script, {})
            plain: dict[tuple, Ended] = {}
            for case in cases:
                if (checkout / script).is_file():
                    rows[case.name] = outcome(checkout, script, case, plain, Path(folder), given.logs)
                else:
                    rows[case.name] = "not there"
                print(f"{version} {script}, {case.name}: {rows[case.name]}", flush=True)
                TABLE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                PAGE.write_text(page(found), encoding="utf-8")
    texts = [text for script in given.only for text in found[version][script].values()]
    return int(any(text.startswith(("differs", "fails", "no effect")) for text in texts))


def version_of(checkout: Path) -> str | None:
    """What a checkout of Megatron-LM calls itself."""
    path = checkout / "megatron" / "core" / "package_info.py"
    if not path.is_file():
        return None
    source = path.read_text(encoding="utf-8")
    parts = [re.search(rf"^{name} = (\d+)", source, re.MULTILINE) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part[1] for part in parts if part)


def prepare(folder: Path) -> None:
    """Write the plan, and documents of several sentences with the words they consist of."""
    apply_cpu_patches()  # newer ones cannot be imported without
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    (folder / "plan.json").write_text(json.dumps(swap_plan()), encoding="utf-8")
    draw = random.Random(1)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(95))]
    (folder / "words.txt").write_text("\n".join(words), encoding="utf-8")
    builder = IndexedDatasetBuilder(get_bin_path(str(folder / "text")), dtype=numpy.int32)
    for _ in range(60):
        lengths = [draw.randint(4, 9) for _ in range(draw.randint(3, 6))]
        builder.add_document(torch.tensor([draw.randrange(5, 100) for _ in range(sum(lengths))]), lengths)
    builder.finalize(get_idx_path(str(folder / "text")))


def outcome(checkout: Path, script: str, case: Case, plain: dict[tuple, Ended], folder: Path, logs: Path | None) -> str:
    """What a feature does to a script: "same bits", "refused: why" and so on; `plain` keeps runs without features."""
    key = case.layout, *case.plain

    def end(given: list[str], name: str) -> Ended:
        ranks, layout = LAYOUTS[case.layout]
        own, short = SCRIPTS[script]
        given = [short if one == "SHORT" else one for one in given]
        more = [*own, *_pattern(checkout, script, case.layout), *layout, *given]
        ended = started(ranks, checkout, [str(checkout / script), *COMMON, *more], folder)
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
            (logs / f"{script} {name}.log").write_text(ended.output, encoding="utf-8")
        return ended

    if key not in plain:
        plain[key] = end(case.plain, " ".join(key).replace("/", " "))
    return compared(plain[key], end(case.given, case.name), case.effect)


def compared(plain: Ended, ours: Ended, effect: str) -> str:
    """How a run with a feature ended, beside one without."""
    if refusal := re.search(r"^mindspeed_mem: (.+(?:\n +.+|\n- .+)*)", ours.output, re.MULTILINE):
        if ours.status == 2:
            return f"refused: {' '.join(refusal[1].split())}"
    if plain.status:
        why = last_words(plain.output)
        return f"Megatron alone does not run: {why}" if ours.status else f"runs; Megatron alone does not: {why}"
    if ours.status:
        return f"fails: {last_words(ours.output)}"
    if ours.bits != plain.bits or not plain.bits:
        first = min((json.loads(mine)[0] for rank in plain.bits for mine in _apart(plain, ours, rank)), default=0)
        return f"differs: from iteration {first} on"
    return "same bits" if re.search(effect, ours.output) else "no effect"


def _apart(plain: Ended, ours: Ended, rank: str) -> list[str]:
    there = ours.bits.get(rank, [])
    return [line for number, line in enumerate(plain.bits[rank]) if there[number : number + 1] != [line]]


def last_words(output: str) -> str:
    """The exception that ended a run, or its last line."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line).strip() for line in output.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (errors or [line for line in lines if line] or ["nothing printed"])[-1][:300]


def _pattern(checkout: Path, script: str, layout: str) -> list[str]:
    if script not in ("pretrain_mamba.py", "pretrain_hybrid.py"):
        return []
    if not (checkout / "megatron" / "core" / "models" / "hybrid").is_dir():
        return ["--is-hybrid-model", "--hybrid-override-pattern", "M*-MM*-M"]
    return ["--hybrid-layer-pattern", "M*-M|M*-M" if layout == "PP2" else "M*-MM*-M"]


def started(ranks: int, checkout: Path, command: list[str], folder: Path) -> Ended:
    """Run a script on so many ranks to its end."""
    bits = folder / "bits"
    shutil.rmtree(bits, ignore_errors=True)
    bits.mkdir()
    path = os.pathsep.join(filter(None, [*map(str, (PEERS, ROOT, checkout)), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "mindspeed_mem", "run", *command]
    status, output = run(ranks, command, {"PYTHONPATH": path, "PEER_BITS": str(bits)}, folder, LIMIT)
    return Ended(status, output, {one.name: one.read_text().splitlines() for one in sorted(bits.iterdir())})


def run(
    ranks: int, command: list[str], environment: Mapping[str, str], folder: Path, seconds: float
) -> tuple[int, str]:
    """Run a command on so many ranks, each started by hand, in a folder; returns a status and what all printed.

    Ranks that wait for one that has failed are ended, and all after so many seconds. In the command "{rank}" is the
    number of the rank.
    """
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    world |= {"OMP_NUM_THREADS": 1, "CUDA_DEVICE_MAX_CONNECTIONS": 1}
    known = {**os.environ, **{name: str(value) for name, value in world.items()}, **environment}
    running = []
    for rank in map(str, range(ranks)):
        with open(folder / f"output{rank}", "w", encoding="utf-8") as output:
            running.append(
                subprocess.Popen(
                    [part.replace("{rank}", rank) for part in command],
                    env={**known, "RANK": rank, "LOCAL_RANK": rank},
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    until = time.monotonic() + seconds
    while any(one.poll() is None for one in running) and time.monotonic() < until:
        if any(one.poll() for one in running):
            until = min(until, time.monotonic() + 20)
        time.sleep(0.2)
    for one in running:
        one.kill()
        one.wait()
    status = next((one.returncode for one in running if one.returncode > 0), running[0].returncode)
    return status, "".join((folder / f"output{rank}").read_text(encoding="utf-8") for rank in range(ranks))


def swap_plan() -> dict[str, Any]:
    """A memory configuration that swaps all activations of all layers."""
    return {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": True}]}}


_INTRODUCTION = """\
# Megatron-LM's own scripts

Each unmodified script trained a tiny model for nine iterations and an evaluation on CPU ranks, without and with each
feature; "same bits" are those of every loss and gradient norm, and where a feature reports what it did, it did
something. State-space layers are a stand-in of torch operators, since the kernels of the real ones are CUDA's.

```console
$ make megatron-lm MEGATRON_LM=../Megatron-LM
```
""".split("\n")


def page(found: dict[str, Any]) -> str:
    """The page that shows the tables, the newest checkout first."""
    lines = list(_INTRODUCTION)
    for version in sorted(found, key=lambda one: [int(part) for part in one.split(".")], reverse=True):
        known = {one: found[version][one] for one in SCRIPTS if one in found[version]}
        scripts = {one: rows for one, rows in known.items() if set(rows.values()) != {"not there"}}
        rows = {case.name: [one.get(case.name, "not run") for one in scripts.values()] for case in CASES}
        absent = sorted(set(known) - set(scripts))
        lines += [f"## {version}", "", *table((f"`{one}`" for one in scripts), rows), ""]
        lines += [f"Not in this version: {', '.join(absent)}.", ""] if absent else []
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())

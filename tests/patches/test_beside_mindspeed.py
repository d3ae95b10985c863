"""Beside the real MindSpeed (MINDSPEED names a checkout): whoever is imported first, and after its repatch, the bits
are MindSpeed's own, and nothing of ours is lost. On the host and on the tests' accelerator as an NPU, with stand-ins
for what else MindSpeed needs."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator import building
from tests.examples.jobs import free_port

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif("MINDSPEED" not in os.environ, reason="MINDSPEED names no checkout of MindSpeed"),
]


def command(*arguments: str, **more: str) -> dict:
    search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK")}
    environment = {
        **clean,
        "PYTHONPATH": search,
        "OMP_NUM_THREADS": "1",
        "ACCELERATOR": str(building.library()),
        **more,
    }
    args = [sys.executable, "-W", "ignore", "-m", "tests.beside_mindspeed", *arguments]
    return {"args": args, "cwd": ROOT, "env": environment, "text": True}


def started(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(**command(*arguments), capture_output=True, timeout=300)


@functools.cache
def run(*arguments: str) -> dict:
    done = started(*arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def two_ranks(layout: str, *arguments: str) -> list[dict]:
    port = str(free_port())
    more = {
        "WORLD_SIZE": "2",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
        **({layout: "2"} if layout != "DP" else {}),
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ranks = [subprocess.Popen(**command("cpu", *arguments, RANK=str(rank), **more), **pipes) for rank in range(2)]
    try:
        printed = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), printed
    return [json.loads(out.splitlines()[-1]) for out, _ in printed]


@pytest.fixture
def plan(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text("swap_config: {swap: True, smallest_bytes: 0, layer_swap: [{layers: True, backward_prefetch: 1}]}")
    return str(file)


SHARDED = "--use-distributed-optimizer"
ALONE = {
    "survive": ["--survive-oom"],
    "adaptive": ["--adaptive-memory-optimization"],
    "cap": ["--max-inflight-microbatches", "1"],
    "split": ["--split-backward"],
    "zero bubble": ["--pipeline-schedule", "zb"],
    "chunks": [SHARDED, "--chunk-zero-stage", "3"],
    "chunks on the host": [SHARDED, "--chunk-zero-stage", "3", "--placement-policy", "host"],
}


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("order", ["ours", "theirs"])
@pytest.mark.parametrize("feature", ["swap", "recompute", *ALONE])
def test_training_keeps_its_bits_and_our_patches_stay(device, order, feature, plan):
    memory = {"swap": ["--memory-config", plan], "recompute": ["--recompute-layers", "all"]}
    flags = (memory | ALONE)[feature]
    sharded = [flag for flag in flags if flag == SHARDED]
    alone, found = run(device, "alone", *sharded), run(device, order, *flags)
    assert len(set(alone["before"])) == 2 and alone["theirs"] > 50
    assert found["before"] == found["after"] == alone["before"]
    assert not found["lost"] and found["in their list"] == ["mindspeed_mem"] and found["theirs"] >= alone["theirs"]
    assert {"swap": found["moved"], "recompute": found["again"]}.get(feature, True)


@pytest.mark.parametrize(
    ("layout", "order", "feature"),
    [
        ("PP", "ours", "swap"),
        ("PP", "theirs", "recompute"),
        ("PP", "ours", "cap"),
        ("PP", "theirs", "zero bubble"),
        ("TP", "ours", "swap"),
        ("TP", "theirs", "recompute"),
        ("DP", "ours", "chunks"),
        ("DP", "theirs", "chunks on the host"),
    ],
)
def test_two_ranks_keep_their_bits(layout, order, feature, plan):
    memory = {"swap": ["--memory-config", plan], "recompute": ["--recompute-layers", "all"]}
    flags = (memory | ALONE)[feature]
    sharded = [flag for flag in flags if flag == SHARDED]
    alone, found = two_ranks(layout, "alone", *sharded), two_ranks(layout, order, *flags)
    for one, other in zip(alone, found, strict=True):
        assert len(set(one["before"])) == 2 and not other["lost"]
        assert other["before"] == other["after"] == one["before"]
        assert {"swap": other["moved"], "recompute": other["again"]}.get(feature, True)


@pytest.mark.parametrize(
    "theirs",
    [
        "--schedules-method dualpipev",
        "--recompute-in-bubble",
        "--recompute-in-advance",
        "--moe-fb-overlap",
        "--moe-zero-memory level0",
        "--moe-unperm2-mem-optim-swap",
        "--smart-swap",
        "--swap-attention",
    ],
)
def test_what_decides_about_the_same_is_refused_before_anything_runs(theirs, plan):
    done = started("cpu", "ours", "--memory-config", plan, *theirs.split())
    flag = theirs.partition(" level")[0]
    assert done.returncode == 2 and f"--memory-config cannot be combined with {flag}: " in done.stderr
    assert not done.stdout

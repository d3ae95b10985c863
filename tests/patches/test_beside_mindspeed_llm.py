"""Beside the real MindSpeed-LLM (MINDSPEED_LLM and MINDSPEED name checkouts, Megatron-LM is on PYTHONPATH): whoever is
imported first, its script trains bit for bit as without us, on what MindSpeed-LLM has put there, and reports."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.jobs import free_port

ROOT = Path(__file__).parents[2]
CHECKOUT = os.environ.get("MINDSPEED_LLM", "")
MODEL = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --train-iters 3
--micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --min-lr 1e-5 --tokenizer-type NullTokenizer --vocab-size 8191
--mock-data --split 100,0,0 --eval-iters 0 --num-workers 0 --make-vocab-size-divisible-by 256 --use-mcore-models
--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion --no-masked-softmax-fusion
--no-persist-layer-norm --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --log-interval 1
""".split()
MAMBA = """
--spec mindspeed_llm.tasks.models.spec.mamba_spec layer_spec --mamba-num-groups 2 --mamba-state-dim 8 --mamba-head-dim 8
--mamba-chunk-size 8 --mamba-expand 2 --position-embedding-type none --normalization RMSNorm --bf16
""".split()
RANKS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT or "MINDSPEED" not in os.environ, reason="MINDSPEED_LLM names no checkout"),
]


@functools.cache
def run(order: str, script: str, cache: str, *flags: str) -> tuple[str, dict]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")}
    search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    more = {"PYTHONPATH": search, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    environment = {**clean, **RANKS, **more, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    arguments = [order, str(Path(CHECKOUT, script)), *MODEL, "--data-cache-path", cache, *flags]
    command = [sys.executable, "-W", "ignore", "-m", "tests.beside_mindspeed_llm", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("indices"))


@pytest.mark.parametrize("order", ["ours", "theirs", "run"])
def test_its_pretraining_keeps_its_bits_and_its_patches_and_reports(order, cache, tmp_path):
    _, alone = run("alone", "pretrain_gpt.py", cache)
    flags = ["--device", "cpu", "--recompute-layers", "all", "--memory-report", str(tmp_path)]
    printed, found = run(order, "pretrain_gpt.py", cache, *flags)
    assert len(set(alone["steps"])) == 3 and found["steps"] == alone["steps"]
    assert found["again"] and not found["lost"]
    assert found["gathers by"] == alone["gathers by"] == "communication_patch.py"
    assert printed.count("recomputed: the whole of layers 0-1") == 1 and (tmp_path / "index.html").exists()
    changed = [line for line in printed.splitlines() if "upstream changed" in line and "patches/cpu_" not in line]
    assert not changed


def test_swap_keeps_its_bits(cache, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("swap_config: {swap: True, smallest_bytes: 0, layer_swap: [{layers: True, backward_prefetch: 1}]}")
    _, alone = run("alone", "pretrain_gpt.py", cache)
    _, found = run("ours", "pretrain_gpt.py", cache, "--device", "cpu", "--memory-config", str(plan))
    assert len(set(alone["steps"])) == 3 and found["steps"] == alone["steps"]
    assert found["moved"] and not found["lost"]


def test_its_models_of_state_spaces_keep_their_bits(cache):
    pytest.importorskip("einops")
    _, alone = run("alone", "pretrain_mamba.py", cache, *MAMBA)
    _, found = run("theirs", "pretrain_mamba.py", cache, *MAMBA, "--device", "cpu", "--recompute-layers", "all")
    assert len(set(alone["steps"])) == 3 and found["steps"] == alone["steps"] and found["again"] and not found["lost"]

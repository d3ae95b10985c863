"""``python -m mindspeed_mem layout``: what it prints can be acted on."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_mem.__main__ import main
from mindspeed_mem.adaptive.problem import profile_file
from mindspeed_mem.plan import load_memory_config

ROOT = Path(__file__).parents[2]
SMALL = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 2048 --global-batch-size 16 --swiglu "
    "--vocab-size 32000 --untie-embeddings-and-output-weights --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --device-memory-gib {gib} --reserve-gib 0 "
    "--tflops 100 --memory-gbps 1000 --link-gbps 10 --tensor-gbps 100 --inter-node-gbps 10 --top 3 "
)
GROUPS = "--group-query-attention --num-query-groups 4 "
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --moe-layer-freq [0]+[1]*3 "
LATENT = "--multi-latent-attention --kv-lora-rank 128 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 "
CASES = {
    "dense": (2, GROUPS + "--devices 8"),
    "chunks": (2, "--devices 4 --fix zero=3,mbs=1"),
    "on the host": (2, "--devices 1 --fix zero=1,mbs=1"),
    "virtual stages": (
        1.0,
        GROUPS + "--devices 8 --devices-per-node 4 --fix tp=2,pp=2,vpp=2,mbs=1 --allow swap,recompute",
    ),
    "a shorter end": (4, "--num-layers 9 --devices 3 --fix pp=3,vpp=1,first=4,mbs=1 --allow none"),
    "shorter ends of virtual stages": (4, "--num-layers 12 --devices 4 --fix pp=4,vpp=2,last=2,mbs=1 --allow none"),
    "the loss as a layer": (4, "--num-layers 15 --devices 4 --fix pp=4,vpp=2,mbs=1 --allow none"),
    "embedding and loss as layers": (4, "--num-layers 14 --devices 4 --fix pp=4,vpp=2,first=3,mbs=1 --allow none"),
    "zb": (2, "--transformer-impl local --devices 2 --fix pp=2,vpp=1,mbs=1 --pipeline-schedules zb"),
    "v": (3, "--transformer-impl local --devices 2 --fix pp=2,mbs=1 --pipeline-schedules v"),
    "context": (2, "--devices 8 --fix cp=2,zero=0,mbs=1"),
    "experts": (2, EXPERTS + "--devices 8 --fix tp=2,ep=4,mbs=1 --allow recompute"),
    "latent": (2, LATENT + "--devices 4 --fix mbs=1 --allow none"),
    "fp8": (2, "--devices 4 --fp8-format hybrid --fix mbs=1,pp=2"),
    "precision": (2, "--devices 4 --use-precision-aware-optimizer --exp-avg-dtype bf16 --fix mbs=1,tp=1"),
    "a line": (2, "--devices 4 --fix mbs=1 --megatron '--fp16 --tensor-model-parallel-size 2 --micro-batch-size 7'"),
}


@pytest.fixture
def found(capsys):
    """Runs the command; returns its status and what it printed."""

    def run(words):
        status = main(["layout", *shlex.split(words)])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def line(out):
    """The printed command line, in words after the script."""
    (one,) = [row for row in out.splitlines() if "pretrain_gpt.py" in row and not row.startswith("written")]
    return shlex.split(one.partition("pretrain_gpt.py ")[2])


def value(words, name, default):
    return words[words.index(name) + 1] if name in words else default


@pytest.mark.parametrize("name", CASES)
def test_the_printed_line_is_read_back_as_the_same_layout(found, tmp_path, name):
    gib, more = CASES[name]
    status, out, err = found(SMALL.format(gib=gib) + more)
    assert status == 0, err
    words = line(out)
    devices = int(value(shlex.split(more), "--devices", 1))
    sizes = {
        size: int(value(words, f"--{size}-parallel-size", 1)) for size in ("tensor-model", "pipeline-model", "context")
    }
    data = devices // (sizes["tensor-model"] * sizes["pipeline-model"] * sizes["context"])
    trace = tmp_path / "profile.json"
    flags = shlex.join(words)
    given = ["--megatron", flags, "--data-parallel-size", str(data), "--device-memory-gib", "100", "--reserve-gib", "0"]
    assert main(["plan", *given, "--write-trace", str(trace)]) == 0
    profile = profile_file.read(trace)
    row = next(row for row in out.splitlines() if re.match(r"1 [a-z]+=", row)).split()
    best = row[1]
    shown = dict(entry.split("=") for entry in best.split(",") if "=" in entry)
    names = {
        "tp": "tensor",
        "cp": "context",
        "pp": "pipeline",
        "vpp": "virtual",
        "dp": "data",
        "zero": "chunk_zero_stage",
    }
    for short, field in names.items():
        assert profile.shapes[field] == int(shown.get(short, field not in ("chunk_zero_stage",))), short
    assert profile.model["micro_batch_size"] == int(shown["mbs"])
    stages = [sum(len(part.layers) for part in stage.parts) for stage in profile.problem.stages]
    if "first" in shown:
        assert (stages[0], stages[-1]) == (int(shown["first"]), int(shown["last"]))
    else:
        assert len(set(stages)) == 1
    if "experts" in name:
        assert (profile.shapes["expert"], profile.shapes["expert_tensor"]) == (4, int(shown.get("etp", 1)))
    assert profile.shapes["schedule"] == (name if name in ("zb", "v") else "1f1b")
    assert profile.shapes["sequence_parallel"] == (profile.shapes["tensor"] > 1)
    # What it said the plan needs is what `plan` says of the same layout.
    static = max(stage.static_bytes for stage in profile.problem.stages)
    peak = float(row[-4])
    assert static / 2**30 <= peak <= gib


MEGATRON = """
import json, os, sys
os.environ |= {"RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
sys.argv = ["pretrain_gpt.py", "--device", "cpu"]
import mindspeed_mem.megatron_adaptor
import megatron.training.arguments
megatron.training.arguments.get_device_arch_version = lambda: 9  # of a GPU, which is asked for it
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
for devices, words in json.load(sys.stdin):
    os.environ["WORLD_SIZE"] = str(devices)
    more = "--train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --no-rope-fusion"
    sys.argv = ["pretrain_gpt.py", *words, *more.split(), "--no-gradient-accumulation-fusion"]
    args = parse_args()
    validate_args(args)
    core_transformer_config_from_args(args)
    print("accepted", args.data_parallel_size)
"""


@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout of Megatron-LM")
def test_megatron_lm_accepts_every_printed_line(found):
    asked = []
    for gib, more in CASES.values():
        status, out, err = found(SMALL.format(gib=gib) + more)
        assert status == 0, err
        words = line(out)
        if "--memory-config" in words:  # a file of ours, which need not be there
            del words[words.index("--memory-config") :][:2]
            place = words.index("--memory-config")
            words = words[:place] + words[place + 2 :]
        asked.append((int(value(shlex.split(more), "--devices", 1)), words))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["MEGATRON_LM"]])}
    command = [sys.executable, "-W", "ignore", "-c", MEGATRON]
    text = json.dumps(asked)
    done = subprocess.run(command, env=environment, input=text, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("accepted") == len(CASES)


def test_the_table_says_what_is_best_and_where_the_time_goes(found):
    status, out, _ = found(SMALL.format(gib=1.0) + GROUPS + "--devices 8 --devices-per-node 4 --fix mbs=1,cp=1")
    assert status == 0
    rows = [row.split() for row in out.splitlines() if row[:2] in ("1 ", "2 ", "3 ")]
    layouts, spent = rows[:3], rows[3:6]
    seconds = [float(row[2]) for row in layouts]
    assert seconds == sorted(seconds)
    for row, parts, step in zip(layouts, spent, seconds, strict=True):
        assert float(row[5]) <= 1.0 and abs(sum(map(float, row[6:9])) - 100) <= 1
        assert sum(map(float, parts[1:])) == pytest.approx(step, rel=0.02)
        assert float(row[3]) == pytest.approx(16 * 2048 / step / 8, rel=0.01)
    assert "no other layout is faster, by these figures" in out
    assert "--memory-config" in line(out)
    assert "plan.yaml is not written yet: --memory-output plan.yaml does that" in out
    assert "\ntorchrun --nproc-per-node 4 --nnodes 2 ... " in out
    status, _, err = found(SMALL.format(gib=1.0) + GROUPS + "--devices 8 --fix mbs=1 --seconds 1e-9")
    assert status == 1 and "--seconds 1e-09 were over before any layout was planned" in err


def test_a_script_trains_with_the_layout_and_its_plan(found, tmp_path):
    script = tmp_path / "run.sh"
    words = (
        SMALL.format(gib=0.55) + GROUPS + "--devices 8 --devices-per-node 4 --allow swap,recompute "
        "--fix tp=2,pp=2,first=2,last=2,mbs=2"
    )
    status, out, err = found(f"{words} --output {script}")
    assert status == 0, err
    config = load_memory_config(tmp_path / "run.yaml")
    assert config.swap.op_swap or config.recompute is not None
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\nfor one in "$@"; do echo "$one"; done\n')
    torchrun.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NODE_RANK": "1", "MASTER_ADDR": "first"}
    done = subprocess.run([script, "--lr", "1e-4"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[:8] == "--nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr first".split()
    place = said.index("pretrain_gpt.py")
    assert said[place - 3 : place] == ["-m", "mindspeed_mem", "run"]
    assert said[place + 1 :] == [*line(out), "--lr", "1e-4"]
    assert said[said.index("--memory-config") + 1] == str(tmp_path / "run.yaml")
    status, out, _ = found(SMALL.format(gib=40) + f"--devices 1 --fix mbs=1 --memory-output {tmp_path / 'none.yaml'}")
    assert status == 0 and "everything is kept: nothing was written" in out and not (tmp_path / "none.yaml").exists()
    assert not any("mindspeed_mem run" in row for row in out.splitlines())


def test_where_nothing_fits_it_says_how_much_would(found):
    status, out, err = found(SMALL.format(gib=0.1) + "--devices 4 --fix mbs=1,cp=1,zero=0")
    assert status == 1
    assert "no layout fits; " in err and " GiB" in err and "three things to try: " in err
    status, _, err = found(SMALL.format(gib=10) + "--devices 4 --fix tp=3")
    assert status == 1 and "no layout: see what is refused, and --fix" in err


def test_a_command_line_gives_the_model_and_not_its_layout(found):
    words = SMALL.format(gib=10) + "--devices 2 --allow none --megatron "
    flags = "--bf16 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --qk-layernorm"
    status, out, err = found(words + shlex.quote(flags))
    assert status == 0, err
    assert "--qk-layernorm" in line(out) and "1 mbs=" in out


def test_all_that_is_wrong_is_said_at_once(found):
    status, _, err = found(
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --global-batch-size 8 "
        "--device-memory-gib 10 --devices 12 --tensor-model-parallel-size 2 --fix tp=x,dq=2 --allow swap,magic "
        "--top none --seconds -1 --latency-us x --output /nowhere/run.sh --pipeline-schedules zb,zbv"
    )
    assert status == 2
    for reason in (
        "--tensor-model-parallel-size is searched; --fix takes tp, cp, ep,",
        "--devices 12 is no multiple of --devices-per-node 8",
        "--fix takes sizes such as tp=4, of tp, cp, ep, etp, pp, vpp, first, last, mbs, dp, zero (zero: 0 to 3), ",
        "not 'tp=x'",
        "not 'dq=2'",
        "--allow takes swap, recompute, chunk-zero, or none, not 'magic'",
        "--pipeline-schedules zb: what TransformerEngine's layers hold for it is not counted: --transformer-impl local",
        "--pipeline-schedules takes 1f1b, zb, v, with commas between, not 'zbv'",
        "--top takes a whole number",
        "--seconds takes a number above 0",
        "--latency-us takes a number",
        "--output: ",
    ):
        assert reason in err, (reason, err)
    status, _, err = found("--num-layers 4")
    assert status == 2 and "--devices: missing" in err and "--device-memory-gib: missing" in err


@pytest.mark.parametrize(
    "words, reason",
    [
        ("--fix tp=2,tp=4", "--fix says tp twice, 2 and 4: give one"),
        ("--fix tp=²", "--fix takes sizes such as tp=4, of tp, cp,"),
        ("--latency-us 1e308", "--latency-us takes a number of at most 1e+09, not '1e308'"),
        ("--tflops 1e-300", "--tflops takes a number of at least 1e-09, not '1e-300'"),
        ("--num-experts 4 --moe-layer-freq 0", "--moe-layer-freq takes a number of at least 1, or a list"),
        ("--output {0}/a --memory-output {0}/a", "--output and --memory-output name the same file, {0}/a: give each"),
        (
            "--output {0}/a.sh --device-table {0}/a.yaml",
            "the plan beside --output ({0}/a.yaml) would write over what --device-table reads, {0}/a.yaml",
        ),
        ("--output {0}/a.yaml --hf-config {0}/a.yaml", "--output would write over what --hf-config reads, {0}/a.yaml"),
        ("--output .", "--output: . is a folder"),
    ],
)
def test_what_cannot_be_meant_is_refused(found, tmp_path, words, reason):
    status, out, err = found(SMALL.format(gib=10) + "--devices 8 " + words.format(tmp_path))
    assert (status, out) == (2, "") and reason.format(tmp_path) in err, err


def test_what_the_published_layout_of_llama3_8b_is(found):
    """On 8 H100, 128 sequences of 8192 tokens: context parallelism by two and the distributed optimizer, as in
    Megatron-LM's examples/llama/README.md (core_v0.16.1; trained in fp8), which keeps everything."""
    words = "--model llama3-8b --global-batch-size 128 --devices 8 --device-name h100 --allow swap,recompute --top 1"
    status, out, err = found(words + " --seq-length 8192")
    assert status == 0, err
    assert "1 cp=2,mbs=1,dp=4 " in out

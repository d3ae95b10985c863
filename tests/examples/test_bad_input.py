"""Bad input ends the job at once: an error status, one message with every problem, no process left."""

import importlib.util
import sys

import numpy
import pytest

from tests import warm
from tests.examples.jobs import EXAMPLES, script, start, train


@pytest.mark.distributed
def test_all_problems_at_once_and_once_only():
    job = script(
        "pretrain_gpt.sh", "--num-attention-heads", 3, "--sequence-parallel", "--bf16", "--fp16", "--min-lr", 7,
        "--data-path", "/no/such/text", PP=3,
    )  # fmt: skip
    job.refused(
        "--num-layers 4 is not a multiple of --pipeline-model-parallel-size 3",
        "2 ranks do not fit",
        "--hidden-size 128 is not a multiple of --num-attention-heads 3",
        "--sequence-parallel needs --tensor-model-parallel-size 2",
        "--bf16 and --fp16 exclude each other",
        "--min-lr 7.0 is greater than --lr 0.003",
        "--data-path /no/such/text: no such file or folder",
    )


def test_numbers_of_ranks_are_looked_at_first():
    given = {"NPROC": "abc", "TP": "08", "PP": -1, "VPP": 0, "NNODES": "2 3"}
    words = [f"{name}: got '{value}'; allowed: a whole number from 1\n" for name, value in given.items()]
    script("pretrain_gpt.sh", **given, TRAIN_ITERS=0, NODE_RANK=0).refused(*words)
    script("pretrain_gpt.sh", NPROC=0, NODE_RANK="first").refused("NPROC: got '0'", "NODE_RANK: got 'first'", "from 0")


def test_an_interpreter_without_torch_is_named(tmp_path):
    """As where nobody has activated an environment."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    script("pretrain_gpt.sh", PYTHON=bare).refused(f"{bare} does not have all of: torch megatron;", "or set PYTHON")
    script("pretrain_gpt_swap.sh", PYTHON="no/such").refused("PYTHON: got 'no/such', which is no command")


@pytest.mark.distributed
def test_pipeline_stages_that_do_not_fit():
    script(
        "pretrain_gpt_pipeline.sh", "--num-layers", 9, "--decoder-last-pipeline-num-layers", 1, VPP=1, NPROC=2
    ).refused(
        "--pipeline-stages cannot be combined with --num-layers-per-virtual-pipeline-stage",
        "--pipeline-stages cannot be combined with --decoder-last-pipeline-num-layers",
    )
    script("pretrain_gpt_pipeline.sh", "--num-layers", 9, "--min-lr", 7, NPROC=2).refused(
        "--pipeline-stages: got 2,3,2,1 for 9 layers on 4 pipeline stages",
        "8 in all, must be 9",
        "2 ranks do not fit",
        "--min-lr 7.0 is greater than --lr 0.003",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            ["--num-layers", "many"], "argument --num-layers: invalid int value: 'many'", marks=pytest.mark.sweep
        ),
        (["--num-layer", "4"], "unrecognized arguments: --num-layer 4"),
        pytest.param(
            ["--hidden-dropout", "1"],
            "--hidden-dropout: got 1.0, must be from 0 to less than 1",
            marks=pytest.mark.sweep,
        ),
        (["--recompute-granularity", "full"], "needs --recompute-method and --recompute-num-layers"),
        (["--split", "all"], "--split: got 'all'"),
        pytest.param(
            ["--tensorboard-dir", "/tmp"],
            "pip install tensorboard",
            marks=pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="it is there"),
        ),
    ],
)
def test_arguments(arguments, message):
    train(*arguments).refused(message)


@pytest.mark.distributed
def test_memory_configurations(tmp_path):
    def plan(text):
        (tmp_path / "plan.yaml").write_text("swap_config:\n  swap: True\n" + text)
        return ["--memory-config", tmp_path / "plan.yaml", "--train-iters", 2]

    train(*plan("  op_swop: 3\n  default_prefetch: 0\n")).refused("swap_config.op_swop", "default_prefetch: got 0")
    typo = "  op_swap:\n    - {op_name: 'mlp\\.linear_fc9', backward_prefetch: 1, layers: True}\n"
    train(*plan(typo), "--pipeline-model-parallel-size", 2, ranks=2).refused("matches no operator")
    train("--memory-config", tmp_path / "absent.yaml").refused("cannot be read")


def test_text_that_cannot_be_used(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"txt": "bad"}\n')
    train("--data-path", tmp_path / "bad.jsonl").refused("bad.jsonl:2: not a JSON object with a key")
    (tmp_path / "short.txt").write_text("too short")
    train("--data-path", tmp_path / "short.txt").refused("the train split has")
    numpy.arange(300, dtype=numpy.int32).tofile(tmp_path / "set.bin")
    (tmp_path / "set.idx").write_bytes(b"")
    train("--data-path", tmp_path / "set").refused("give its --tokenizer-model FILE or --vocab-size N")


@pytest.mark.sweep  # test_failing_rank.py
@pytest.mark.distributed
def test_a_failing_rank_takes_the_job_down(tmp_path):
    """Tokens that the vocabulary does not have: the first pipeline stage fails, the second would wait for ever."""
    (tmp_path / "text").write_bytes(bytes(range(256)) * 100)
    command = [warm.python(), EXAMPLES / "gpt_corpus.py", "--data-path", tmp_path / "text"]
    prefix = start(command, {}).succeeded().output.split()[-1]
    job = train("--data-path", prefix, "--vocab-size", 100, "--pipeline-model-parallel-size", 2, ranks=2)
    assert job.status != 0
    assert "index out of range" in job.output
    assert not job.left_over

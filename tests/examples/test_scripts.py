"""The shell scripts, as a user runs them."""

import json
import re

import pytest

from tests.examples.jobs import EXAMPLES, SHORT, free_port, numbers, rows, script

KEYS = "iteration rank loss grad_norm step_ms peak_activation_bytes swapped_bytes host_bytes stall_ms".split()
ITERATIONS, EVALUATED = 20, 12
PLANS = {
    "pretrain_gpt_swap.sh": "swap_everything.yaml",
    "pretrain_gpt_recompute.sh": "recompute_selective.yaml",
    "pretrain_gpt_swap_recompute.sh": "swap_and_recompute_mix.yaml",
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """{"baseline": (job, metrics file), "swap": ...}: both scripts with the same variables."""
    folder = tmp_path_factory.mktemp("scripts")
    arguments = ["--eval-interval", EVALUATED, "--metrics-file"]
    names = {"baseline": "pretrain_gpt.sh", "swap": "pretrain_gpt_swap.sh"}
    found = {}
    for kind, name in names.items():
        path = folder / f"{kind}.jsonl"
        found[kind] = (script(name, *arguments, path, TRAIN_ITERS=ITERATIONS), path)
    return found


@pytest.mark.slow
@pytest.mark.distributed
class TestPair:
    def test_both_end_well_and_learn(self, pair):
        for job, path in pair.values():
            job.succeeded()
            losses = [row["loss"] for row in rows(path) if row["rank"] == 0]
            assert losses[0] > 5.4
            assert max(losses[-5:]) < 4

    def test_losses_and_gradient_norms_are_identical(self, pair):
        assert numbers(pair["baseline"][1]) == numbers(pair["swap"][1])

    def test_evaluation_is_identical(self, pair):
        found = [re.findall(r"validation loss at iteration (\d+) \| lm loss value: (\S+)", job.output)
                 for job, _ in pair.values()]  # fmt: skip
        assert found[0] == found[1]
        assert [iteration for iteration, _ in found[0]] == [str(EVALUATED)]
        assert 2 < float(found[0][0][1]) < 5

    def test_one_line_of_metrics_per_iteration_and_rank(self, pair):
        for _, path in pair.values():
            found = rows(path)
            assert all(list(row) == KEYS for row in found)
            assert [(row["iteration"], row["rank"]) for row in found] == [
                (iteration, rank) for iteration in range(1, ITERATIONS + 1) for rank in (0, 1)
            ]
            assert "".join(json.dumps(row) + "\n" for row in found) == path.read_text()  # no digit is lost
            assert all(row["step_ms"] > 0 and row["peak_activation_bytes"] > 0 for row in found)

    def test_swap_takes_bytes_off_the_device(self, pair):
        kept, moved = (rows(path) for _, path in pair.values())
        for before, after in zip(kept[2:], moved[2:], strict=True):
            assert before["swapped_bytes"] == before["host_bytes"] == before["stall_ms"] == 0
            assert after["swapped_bytes"] > 0 and after["host_bytes"] > 0
            assert after["peak_activation_bytes"] < before["peak_activation_bytes"] / 2

    def test_log_lines_say_what_megatron_says_and_more(self, pair):
        for job, path in pair.values():
            lines = [line for line in job.output.splitlines() if re.search(r"iteration +\d+/", line)]
            assert len(lines) == ITERATIONS // 10
            for wanted in ("elapsed time per iteration (ms): ", "tokens/s: ", "learning rate: ", "grad norm: "):
                assert all(wanted in line for line in lines)
            peak = max(row["peak_activation_bytes"] for row in rows(path)[-20:]) / 2**20
            moved = max(row["swapped_bytes"] for row in rows(path)[-20:]) / 2**20
            assert f"peak device activation (MiB): {peak:.2f} | swapped (MiB): {moved:.2f}" in lines[-1]
            assert job.losses()[-1] == pytest.approx(sum(row["loss"] for row in rows(path)[-20:]) / 20, abs=1e-5)

    def test_the_report_shows_peaks_with_and_without_swap(self, pair):
        assert "activation memory, per rank" not in pair["baseline"][0].output
        assert pair["swap"][0].output.count("activation memory, per rank") == 1


@pytest.mark.slow
@pytest.mark.distributed
def test_the_adaptive_script_settles_on_a_plan_keeps_it_and_changes_no_loss(pair, unchanged, tmp_path):
    arguments = ["--eval-interval", EVALUATED, "--metrics-file"]
    variables = {"TRAIN_ITERS": ITERATIONS, "PLAN": tmp_path / "plan.yaml"}
    first = script("pretrain_gpt_adaptive.sh", *arguments, tmp_path / "first.jsonl", **variables).succeeded()
    assert numbers(tmp_path / "first.jsonl") == numbers(pair["baseline"][1])
    told = [first.output.index(text) for text in ("are profiled", "plan 1: predicted", "settled on plan", "is kept in")]
    assert told == sorted(told)
    assert "adaptive memory plan (settled): predicted" in first.output and "K keep, S swap" in first.output
    variables["TRAIN_ITERS"] = 4
    again = script("pretrain_gpt_adaptive.sh", *SHORT, tmp_path / "again.jsonl", **variables).succeeded()
    assert numbers(tmp_path / "again.jsonl") == unchanged[0]
    assert "is used: it was made for the same job" in again.output and "plan 1:" not in again.output
    for path in ("first.jsonl", "again.jsonl"):
        last = rows(tmp_path / path)[-2]
        assert last["rank"] == 0 and last["peak_activation_bytes"] < unchanged[1][-2]


@pytest.fixture
def command_line(tmp_path):
    """command_line(script, **environment): the arguments that the script gives to the interpreter."""
    stub, seen = tmp_path / "python", tmp_path / "seen"
    stub.write_text('#!/bin/sh\ncase "$1" in */gpt_corpus.py) echo /cache/corpus;; '
                    f'*) for a in "$@"; do printf "%s\\n" "$a"; done > {seen};; esac\n')  # fmt: skip
    stub.chmod(0o755)

    def get(name, *arguments, **environment):
        job = script(name, *arguments, PYTHON=stub, **environment).succeeded()
        assert not job.output
        return seen.read_text().splitlines()

    return get


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("tree", [None, "megatron"])
def test_a_script_differs_from_the_baseline_by_its_flags_only(command_line, tmp_path, tree, name):
    environment = {"TP": 2, "NPROC": 4, "VPP": 1, "SAVE": "/somewhere"}
    if tree:
        (tmp_path / tree).mkdir()
        environment["MEGATRON_LM"] = tmp_path / tree
    base = command_line("pretrain_gpt.sh", "--bf16", **environment)
    other = command_line(name, "--bf16", **environment)
    assert base[-1] == "--bf16"
    assert other == [*base[:-1], "--memory-config", str(EXAMPLES / "configs" / PLANS[name]), "--bf16"]


def value(arguments, flag):
    return arguments[arguments.index(flag) + 1]


def test_the_pipeline_script_differs_from_the_baseline_by_its_flags_only(command_line):
    base = command_line("pretrain_gpt.sh", "--bf16", NPROC=4, PP=4)
    plan = str(EXAMPLES / "configs" / "swap_early_stages.yaml")
    flags = f"--num-layers 8 --pipeline-stages 2,3,2,1 --micro-batch-size 2 --memory-config {plan}".split()
    assert command_line("pretrain_gpt_pipeline.sh", "--bf16") == [*base[:-1], *flags, "--bf16"]
    capped = command_line("pretrain_gpt_pipeline.sh", MAX_INFLIGHT=3, NPROC=2, PP=2)
    assert capped[-2:] == ["--max-inflight-microbatches", "3"]
    assert value(capped, "--nproc-per-node") == value(capped, "--pipeline-model-parallel-size") == "2"


def test_variables_become_arguments(command_line):
    default = command_line("pretrain_gpt.sh")
    assert value(default, "--device") == "cpu"
    assert value(default, "--nproc-per-node") == value(default, "--pipeline-model-parallel-size") == "2"
    assert "--save" not in default and "--num-layers-per-virtual-pipeline-stage" not in default
    given = command_line(
        "pretrain_gpt.sh", NPROC=4, TP=2, PP=1, VPP=3, DEVICE="cuda", TRAIN_ITERS=7, SAVE="/a b", NNODES=2, NODE_RANK=1,
        MASTER_ADDR="first", MASTER_PORT=free_port(),
    )  # fmt: skip
    assert value(given, "--nproc-per-node") == "4"
    assert (value(given, "--nnodes"), value(given, "--node-rank"), value(given, "--master-addr")) == ("2", "1", "first")
    assert value(given, "--tensor-model-parallel-size") == "2"
    assert value(given, "--pipeline-model-parallel-size") == "1"
    assert value(given, "--num-layers-per-virtual-pipeline-stage") == "3"
    assert value(given, "--device") == "cuda"
    assert value(given, "--train-iters") == "7"
    assert value(given, "--save") == value(given, "--load") == "/a b"

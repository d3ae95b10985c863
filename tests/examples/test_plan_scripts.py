"""The shell scripts with plans and chunks beside the plain one, a few iterations each."""

import re

import pytest

from tests.examples.jobs import EXAMPLES, SHORT, numbers, rows, script

STEPS = 6
SELECTIVE = "Set select recompute at layer {}: input_layernorm, pre_mlp_layernorm, "


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "arguments", "log", "again"),
    [
        pytest.param(
            "pretrain_gpt_recompute.sh",
            (),
            [SELECTIVE.format(layer) + "self_attention.rotary_pos_emb, mlp.activation_func" for layer in range(4)],
            {"input_layernorm of layers 0-3": 64, "mlp.activation_func of layers 0-3": 64},
            marks=pytest.mark.sweep,
        ),
        (
            "pretrain_gpt_swap_recompute.sh",
            (),
            [f"Set op_swap at layer {layer}: .self_attention, value=4" for layer in range(4)]
            + [SELECTIVE.format(layer) + "mlp.activation_func" for layer in range(4)],
            {"pre_mlp_layernorm of layers 0-3": 64, "mlp.activation_func of layers 0-3": 64},
        ),
        pytest.param(
            "pretrain_gpt_swap_recompute.sh",
            ("--memory-config", EXAMPLES / "configs" / "swap_and_recompute.yaml"),
            [f"Set select recompute at layer {layer}: feed_forward" for layer in (0, 3)],
            {"mlp of layers 0, 3": 32},
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            "pretrain_gpt.sh",
            ("--recompute-layers", "0,2", "--select-recompute", "mlp=0,1"),
            [f"Set full recompute at layer {layer}" for layer in (0, 2)] + ["Set select recompute at layer 1: mlp"],
            {"the whole of layers 0, 2": 32, "mlp of layer 1": 16},
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["selective", "mix", "case d", "flags"],
)
def test_recompute_changes_no_loss_and_says_what_it_did(unchanged, tmp_path, name, arguments, log, again):
    path = tmp_path / "metrics.jsonl"
    job = script(name, *arguments, *SHORT, path, TRAIN_ITERS=4).succeeded()
    found, peaks = unchanged
    assert numbers(path) == found
    pairs = list(zip(rows(path), peaks, strict=True))
    assert max(row["peak_activation_bytes"] for row, _ in pairs) < max(peaks)
    first = [(row, before) for row, before in pairs if row["iteration"] <= 2]  # then stages with room stop swapping
    assert all(row["peak_activation_bytes"] < before for row, before in first)
    assert all((row["swapped_bytes"] > 0) == ("swap" in name) for row, _ in first)
    lines = job.output.splitlines()
    assert not [line for line in lines if "WARNING mindspeed_mem" in line]
    for line in log:
        assert lines.count(line) == 1
    assert job.output.count("activation memory, per rank") == 1
    for what, runs in again.items():
        assert re.search(
            rf"^recomputed: {re.escape(what)}: \d+\.\d\d MiB dropped, {runs} second runs$", job.output, re.M
        )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Numbers of a data-parallel run whose ranks hold everything."""
    path = tmp_path_factory.mktemp("whole") / "metrics.jsonl"
    script("pretrain_gpt.sh", *SHORT, path, PP=1, TRAIN_ITERS=STEPS).succeeded()
    return numbers(path)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.sweep
def test_chunks_and_the_adaptive_plan_go_together(whole, tmp_path):
    path = tmp_path / "metrics.jsonl"
    chunks = ["--use-distributed-optimizer", "--chunk-zero-stage", 3, "--placement-policy", "host"]
    size = ["--min-chunk-size-mib", 0.25, "--chunk-search-range-mib", 0.25]
    variables = {"PP": 1, "PLAN": tmp_path / "plan.yaml", "TRAIN_ITERS": STEPS}
    job = script("pretrain_gpt_adaptive.sh", *chunks, *size, *SHORT, path, **variables).succeeded()
    for mine, theirs in zip(numbers(path), whole, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)  # the norm is summed in another order
    assert "adaptive memory plan (settled): predicted" in job.output
    assert '"chunk_zero_stage": 3' in (tmp_path / "plan.yaml").read_text()


@pytest.mark.slow
@pytest.mark.distributed
def test_chunks_on_the_host_train_alike_and_are_reported(whole, tmp_path):
    path = tmp_path / "metrics.jsonl"
    job = script("pretrain_gpt_gemini.sh", *SHORT, path, TRAIN_ITERS=STEPS).succeeded()
    found, expected = numbers(path), whole
    assert found[0][2] == expected[0][2]  # the same model, before its first step
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)  # the norm is summed in another order
    report = job.output[job.output.index("chunk ZeRO stage 3, placement host, per rank") :].splitlines()
    assert "over" not in "".join(report[4:])
    for rank, line in enumerate(report[2:4]):
        number, chunks, on_host, host, whole, budget, peak, gathers, *_ = line.split()
        assert int(number) == rank and int(chunks) == int(on_host) > 2 and int(gathers) > 4 * int(chunks)
        assert float(whole) > float(budget) >= float(peak) > 0
        # fp32 parameters, gradients and two moments, and this rank's half of them (to the two digits shown).
        assert float(host) == pytest.approx(4 * float(whole) / 2, abs=0.05)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.sweep
def test_swap_on_uneven_pipeline_stages(tmp_path):
    """That it changes no bit, numerics/test_pipeline_stages.py shows."""
    path = tmp_path / "metrics"
    job = script("pretrain_gpt_pipeline.sh", *SHORT, path, TRAIN_ITERS=3).succeeded()
    assert len(numbers(path)) == 12
    assert {row["rank"] for row in rows(path) if row["swapped_bytes"]} == {0, 1}
    log = [f"Set layer swap at layer {layer} and value is: 2" in job.output for layer in range(8)]
    assert log == [True] * 5 + [False] * 3  # the layers of these stages
    saved = {int(rank): int(share) for rank, _, share in re.findall(r"^ +(\d)( +[\d.]+){5} +(\d+) %", job.output, re.M)}
    assert min(saved[rank] for rank in (0, 1)) > 50

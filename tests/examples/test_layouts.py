"""Layouts and model kinds through examples/pretrain_gpt.py: swap changes no bit of a loss or gradient norm."""

import pytest

from tests.examples.jobs import numbers, rows, train

CASES = {
    "tensor and sequence parallel, grouped queries, dropout": """--tensor-model-parallel-size 2 --sequence-parallel
        --group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm --position-embedding-type rope
        --attention-dropout 0.1 --hidden-dropout 0.1 --bf16""",
    "virtual stages, experts": """--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1
        --num-experts 4 --moe-aux-loss-coeff 0.01 --disable-bias-linear --untie-embeddings-and-output-weights""",
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES)
def test_swap_changes_no_bit(case, everything, tmp_path):
    arguments = ["--train-iters", "4", *CASES[case].split(), "--metrics-file"]
    train(*arguments, tmp_path / "without", ranks=2).succeeded()
    train(*arguments, tmp_path / "with", "--memory-config", everything, ranks=2).succeeded()
    assert len(numbers(tmp_path / "with")) == 8
    assert numbers(tmp_path / "with") == numbers(tmp_path / "without")
    assert all(row["swapped_bytes"] > 0 for row in rows(tmp_path / "with"))


@pytest.mark.slow
def test_multi_latent_attention_and_recompute_train(tmp_path):
    latent = """--multi-latent-attention --sdpa-attention --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16
    --normalization RMSNorm --position-embedding-type rope --train-iters 4 --hidden-dropout 0.1""".split()
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
    train(*latent, "--metrics-file", tmp_path / "kept").succeeded()
    train(*latent, *recompute, "--metrics-file", tmp_path / "recomputed").succeeded()
    assert numbers(tmp_path / "kept") == numbers(tmp_path / "recomputed")
    kept, recomputed = rows(tmp_path / "kept")[-1], rows(tmp_path / "recomputed")[-1]
    assert recomputed["peak_activation_bytes"] < kept["peak_activation_bytes"] / 2

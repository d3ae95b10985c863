"""Megatron-LM's own scripts, unmodified: pretrain_gpt.py by ours. Needs a checkout: MEGATRON_LM=PATH."""

import os
import random
import sys

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

from tests.examples.jobs import ROOT, script, start

TREE = os.environ.get("MEGATRON_LM")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(not TREE, reason="MEGATRON_LM names no checkout of Megatron-LM core_v0.16.1"),
]


def run(name, *arguments, **environment):
    return script(name, "--log-interval", 1, *arguments, MEGATRON_LM=TREE, **environment).succeeded()


def test_pipeline_parallel_with_and_without_swap(everything):
    base = run("pretrain_gpt.sh", TRAIN_ITERS=4)
    swap = run("pretrain_gpt_swap.sh", "--memory-config", everything, TRAIN_ITERS=4)
    assert len(base.losses()) == 4 and base.losses()[0] > base.losses()[-1]
    assert swap.losses() == base.losses()
    assert swap.losses("grad norm") == base.losses("grad norm")
    assert swap.output.count("activation memory, per rank") == 1 and "activation memory, per rank" not in base.output


@pytest.mark.parametrize("name", ["pretrain_gpt_recompute.sh", "pretrain_gpt_swap_recompute.sh"])
def test_recompute(name):
    base, ours = run("pretrain_gpt.sh", TRAIN_ITERS=3), run(name, TRAIN_ITERS=3)
    assert ours.losses() == base.losses()
    assert ours.losses("grad norm") == base.losses("grad norm")
    assert "second runs" in ours.output


def test_one_rank_saves_loads_and_evaluates(tmp_path, everything):
    plan = ["--memory-config", everything]
    whole = run("pretrain_gpt_swap.sh", *plan, NPROC=1, TRAIN_ITERS=6)
    run("pretrain_gpt_swap.sh", *plan, "--exit-interval", 2, NPROC=1, TRAIN_ITERS=6, SAVE=tmp_path)
    rest = run("pretrain_gpt_swap.sh", *plan, "--eval-interval", 3, NPROC=1, TRAIN_ITERS=6, SAVE=tmp_path)
    assert len(rest.losses()) == 4
    assert rest.losses()[2:] == whole.losses()[4:]  # the second line after a start holds the mean of two iterations
    assert "validation loss at iteration 6" in rest.output


@pytest.mark.parametrize("layout", [{"TP": 2, "PP": 1}, {"PP": 2, "VPP": 1}], ids=["tensor parallel", "virtual stages"])
def test_layouts(layout, everything):
    losses = [
        run(name, *plan, TRAIN_ITERS=3, **layout).losses()
        for name, plan in (("pretrain_gpt.sh", []), ("pretrain_gpt_swap.sh", ["--memory-config", everything]))
    ]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("stages", "virtual"), [("3,5", None), ("1,3,2,2", 2)])
def test_uneven_pipeline_stages(stages, virtual):
    arguments = ["--num-layers", 8, "--micro-batch-size", 2, "--pipeline-stages", stages]
    base = run("pretrain_gpt.sh", *arguments, TRAIN_ITERS=3)
    swap = run("pretrain_gpt_pipeline.sh", *arguments, NPROC=2, PP=2, TRAIN_ITERS=3)
    assert len(base.losses()) == 3 and base.losses()[0] > base.losses()[-1]
    assert swap.losses() == base.losses()
    assert swap.losses("grad norm") == base.losses("grad norm")
    assert f"Number of virtual stages per pipeline stage: {virtual}" in base.output
    assert "pipeline_model_parallel_layout .................. Et" in base.output


def test_help_lists_the_flags_of_both():
    output = run("pretrain_gpt.sh", "--help", NPROC=1).output
    assert "--memory-config" in output and "--num-layers" in output


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """Documents of several sentences, and the words they consist of."""
    folder, draw = tmp_path_factory.mktemp("sentences"), random.Random(1)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(95))]
    (folder / "words.txt").write_text("\n".join(words))
    builder = IndexedDatasetBuilder(get_bin_path(str(folder / "text")), dtype=numpy.int32)
    for _ in range(60):
        lengths = [draw.randint(4, 9) for _ in range(draw.randint(3, 6))]
        builder.add_document(torch.tensor([draw.randrange(5, 100) for _ in range(sum(lengths))]), lengths)
    builder.finalize(get_idx_path(str(folder / "text")))
    return ["--data-path", folder / "text", "--vocab-file", folder / "words.txt"]


SMALL = """--device cpu --transformer-impl local --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-3 --split 90,5,5
--legacy-tokenizer --tokenizer-type BertWordPieceLowerCase --log-interval 1 --eval-iters 1
--eval-interval 100""".split()


@pytest.mark.parametrize(
    ("name", "more"),
    [("pretrain_bert.py", []), ("pretrain_t5.py", ["--decoder-seq-length", "16", "--vocab-extra-ids", "20"])],
)
def test_other_models(name, more, sentences, everything):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 1]
    command = [*launch, "-m", "mindspeed_mem", "run", f"{TREE}/{name}", *SMALL, *more, *sentences]
    plan = ["--memory-config", everything, "--recompute-layers", 1]
    base, ours = (start([*command, *given], {"PYTHONPATH": ROOT}).succeeded() for given in ([], plan))
    assert len(base.losses()) == 3 and ours.losses() == base.losses()
    assert ours.losses("grad norm") == base.losses("grad norm")
    assert ours.output.count("activation memory, per rank") == 1 and "second runs" in ours.output


def test_figures_are_in_megatrons_own_log(tmp_path, everything):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = ["--tensorboard-dir", tmp_path, "--tensorboard-log-interval", 2]
    run("pretrain_gpt_swap.sh", "--memory-config", everything, *board, TRAIN_ITERS=4)
    found = events.EventAccumulator(str(tmp_path))
    found.Reload()
    moved = [(one.step, one.value) for one in found.Scalars("mindspeed_mem/swapped_out_mib")]
    assert [step for step, _ in moved] == [2, 4] and moved[0][1] == moved[1][1] > 0

"""Megatron-LM's own pretrain_gpt.py, unmodified, by our scripts. Needs a checkout: MEGATRON_LM=PATH.

Every script of Megatron-LM beside every feature: `make megatron-lm` (tests/megatron_lm.py).
"""

import os

import pytest

from tests.examples.jobs import script

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


def test_figures_are_in_megatrons_own_log(tmp_path, everything):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = ["--tensorboard-dir", tmp_path, "--tensorboard-log-interval", 2]
    run("pretrain_gpt_swap.sh", "--memory-config", everything, *board, TRAIN_ITERS=4)
    found = events.EventAccumulator(str(tmp_path))
    found.Reload()
    moved = [(one.step, one.value) for one in found.Scalars("mindspeed_mem/swapped_out_mib")]
    assert [step for step, _ in moved] == [2, 4] and moved[0][1] == moved[1][1] > 0


GOES_ON = """
import os, runpy, sys

sys.path.insert(0, {tree!r})
runpy.run_path(os.path.join({tree!r}, "pretrain_gpt.py"), run_name="__main__")

import torch

ones = torch.ones(1)
torch.distributed.all_reduce(ones)
print("ranks", ones.item())
torch.distributed.destroy_process_group()
"""


def test_a_script_goes_on_with_its_ranks_after_training(tmp_path):
    (tmp_path / "pretrain_gpt.py").write_text(GOES_ON.format(tree=TREE))
    job = script("pretrain_gpt.sh", TRAIN_ITERS=1, MEGATRON_LM=tmp_path).succeeded()
    assert job.output.count("ranks 2.0") == 2

"""A rank that fails in the middle of a step takes the others down, with its reason, instead of leaving them waiting."""

import pytest

from tests.examples.jobs import EXAMPLES, train_by

FAILS = f"""
import os, runpy, signal, sys
import torch

original, calls = torch.Tensor.retain_grad, 0

def retain_grad(self):  # Megatron's backward_step calls it on what the stage received
    global calls
    calls += 1
    if os.environ["RANK"] == os.environ["FAILS"] and calls == 7:
        if "KILLED" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("broken on purpose")
    return original(self)

torch.Tensor.retain_grad = retain_grad
sys.argv[0] = {str(EXAMPLES / "pretrain_gpt.py")!r}
sys.path.insert(0, {str(EXAMPLES)!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PIPELINE = "--num-layers 4 --pipeline-model-parallel-size 4 --train-iters 50 --distributed-timeout-minutes 2".split()


@pytest.mark.parametrize(
    ("rank", "more"),
    [pytest.param(3, [], marks=pytest.mark.sweep), (1, ["--max-inflight-microbatches", "2"])],
    ids=["Megatron's loop", "capped"],
)
def test_the_others_end_with_the_reason(tmp_path, rank, more):
    plan = tmp_path / "plan.yaml"
    plan.write_text("swap_config: {swap: True, layer_swap: [{layers: True, backward_prefetch: 3}]}\n")
    broken = tmp_path / "broken.py"
    broken.write_text(FAILS)
    job = train_by(broken, *PIPELINE, "--memory-config", str(plan), *more, ranks=4, FAILS=str(rank))
    assert job.status == 1, job.output[-4000:]
    assert "RuntimeError: broken on purpose" in job.output
    assert not job.left_over


@pytest.mark.parametrize(
    "schedule",
    [
        ["--pipeline-schedule", "zb"],
        pytest.param(
            ["--pipeline-schedule", "v", "--num-layers", "8", "--pipeline-stages", "1,1,1,1,1,1,1,1"],
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["zb", "v"],
)
def test_the_others_end_when_one_is_killed(tmp_path, schedule):
    broken = tmp_path / "broken.py"
    broken.write_text(FAILS)
    job = train_by(broken, *PIPELINE, *schedule, ranks=4, FAILS="1", KILLED="1")
    assert job.status == 1, job.output[-4000:]
    assert "SIGKILL" in job.output or "Signal 9" in job.output
    assert not job.left_over

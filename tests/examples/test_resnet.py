"""examples/train_resnet_parallel.py in its modes, as a user starts it: the losses of one device."""

import os
import re

import pytest

from tests import warm
from tests.examples.jobs import EXAMPLES, ROOT, start

SMALL = "--blocks 1 1 --width 4 --batch-size 16 --steps 5 --device cpu".split()


def run(*words, ranks=2):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    program = EXAMPLES / "train_resnet_parallel.py"
    job = start([warm.python(), *launch, str(program), *SMALL, *words], {"PYTHONPATH": path})
    return job, [float(loss) for loss in re.findall(r": loss ([\d.]+)", job.output)]


@pytest.fixture(scope="module")
def alone():
    job, losses = run(ranks=1)
    job.succeeded()
    assert len(losses) == 5
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        pytest.param("hybrid --tp 2 --recompute", 2, marks=pytest.mark.sweep),
        pytest.param("hybrid --tp 2", 4, marks=pytest.mark.sweep),
        pytest.param("data", 2, marks=pytest.mark.sweep),
        pytest.param("auto", 2, marks=pytest.mark.sweep),
        pytest.param("semi_auto --tp 2 --recompute", 4, marks=pytest.mark.sweep),
    ],
)
def test_a_mode_prints_one_devices_losses(alone, words, ranks):
    job, losses = run("--mode", *words.split(), ranks=ranks)
    job.succeeded()
    assert losses == pytest.approx(alone, abs=2e-3)


@pytest.mark.slow
@pytest.mark.needs_torch("2.13", "DTensor's rules")
def test_a_pipeline_learns():
    job, losses = run("--mode", "pipeline", "--steps", "10", "--recompute")
    job.succeeded()
    assert losses[-1] < 0.7 * losses[0]


def test_wrong_words_are_refused():
    job, _ = run("--mode", "data", ranks=1)
    job.refused("--mode data needs ranks: torchrun --nproc-per-node 2")

"""examples/hf_llama.py and examples/fsdp2_llama.py as a user runs them: the same losses with a plan and without."""

import os
import re

import pytest

from tests import warm
from tests.examples.jobs import EXAMPLES, ROOT, start

SMALL = "--hidden-size 32 --num-layers 2 --seq-length 32 --steps 3 --cpu".split()
PLAN = ("--plan", str(EXAMPLES / "configs" / "llama_plan.yaml"))


def run(name, *arguments, ranks=1):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return start([warm.python(), *launch, str(EXAMPLES / name), *SMALL, *arguments], {"PYTHONPATH": path})


def losses(job):
    job.succeeded()
    return re.findall(r"(?:'loss': '|: loss )([\d.]+)", job.output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("hf_llama.py", 1),
        *(pytest.param(name, 2, marks=pytest.mark.sweep) for name in ("hf_llama.py", "fsdp2_llama.py")),
    ],
)
def test_losses_are_the_same_with_a_plan(name, ranks):
    pytest.importorskip("transformers")
    if name == "hf_llama.py":
        pytest.importorskip("accelerate")
    job = run(name, *PLAN, *("--survive --device-memory-gib 4".split() if ranks == 1 else ()), ranks=ranks)
    assert losses(job) == losses(run(name, ranks=ranks)) and len(losses(job)) == 3
    assert re.search(r"^recomputed: input_layernorm", job.output, re.MULTILINE)
    assert re.search(r"^ +0 +\d+\.\d+", job.output, re.MULTILINE)


def test_without_ranks_it_is_refused():
    run("fsdp2_llama.py").refused("it needs ranks: torchrun")

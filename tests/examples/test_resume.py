"""Checkpoints: a run that continues cannot be told from one that was never interrupted."""

import functools
import re

import pytest

from tests.examples.jobs import numbers, rows, train
from tests.sweeping import but

TRACKER = "latest_checkpointed_iteration.txt"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1".split()
STEADY = "--attention-dropout 0 --hidden-dropout 0".split()
PIPELINE = ["--pipeline-model-parallel-size", "2", *DROPOUT]
SHARDED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--bf16", *STEADY]
ITERATIONS = ["--train-iters", "6"]
SHARDS = "sharded", "sharded, virtual stages"


@pytest.fixture(scope="module")
def run(tmp_path_factory, everything):
    """run(name): (arguments, folder) of a run of 6 iterations on 2 ranks with checkpoints at 3 and 6, and metrics."""
    layouts = {
        "pipeline, dropout and swap": [*PIPELINE, "--memory-config", str(everything)],
        "sharded": SHARDED,
        # Buckets are padded, and what is behind the first is the embedding.
        "sharded, virtual stages": [*PIPELINE[:2], "--num-layers-per-virtual-pipeline-stage", "1", *SHARDED],
    }

    @functools.cache
    def started(name):
        arguments, folder = layouts[name], tmp_path_factory.mktemp("run")
        save = ["--save", folder / "saved", "--save-interval", "3", "--metrics-file", folder / "metrics"]
        train(*arguments, *ITERATIONS, *save, ranks=2).succeeded()
        assert (folder / "saved" / TRACKER).read_text() == "6"
        (folder / "saved" / TRACKER).write_text("3")  # as if the run had been killed before it wrote the last one
        return arguments, folder

    return started


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", but(["pipeline, dropout and swap", *SHARDS], *SHARDS))
def test_a_resumed_run_is_bit_identical(run, tmp_path, name):
    arguments, folder = run(name)
    # The file as a killed run leaves it: iteration 4 was done, but after the checkpoint; its lines must be replaced.
    lines = (folder / "metrics").read_text().splitlines(keepends=True)
    metrics = tmp_path / "metrics"
    metrics.write_text("".join(lines[:6]) + "".join(lines[6:8]).replace('"loss": ', '"loss": 1'))
    job = train(*arguments, *ITERATIONS, "--load", folder / "saved", "--metrics-file", metrics, ranks=2).succeeded()
    assert "continuing after iteration 3" in job.output
    assert numbers(metrics, after=3) == numbers(folder / "metrics", after=3)
    assert [row["iteration"] for row in rows(metrics)] == [i for i in range(1, 7) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(1, []), (2, ["--pipeline-model-parallel-size", "2", "--pipeline-stages", "1,3"])],
    ids=["one rank", "uneven pipeline stages"],
)
def test_another_layout_continues(run, tmp_path, ranks, layout):
    arguments, folder = run("sharded")
    load = ["--load", folder / "saved", "--metrics-file", tmp_path / "metrics"]
    job = train(*arguments, *ITERATIONS, *layout, *load, ranks=ranks)
    job.succeeded()
    assert "another layout" in job.output
    wanted = [loss for _, rank, loss, _ in numbers(folder / "metrics", after=3) if rank == 0]
    found = [loss for _, rank, loss, _ in numbers(tmp_path / "metrics") if rank == 0]
    assert found == pytest.approx(wanted, rel=2e-3)


@pytest.mark.slow
@pytest.mark.distributed
def test_another_model_is_refused(run):
    arguments, folder = run("pipeline, dropout and swap")
    other = ["--swiglu", "--num-attention-heads", "8", "--load", folder / "saved"]
    job = train(*arguments, *other, ranks=2).refused(
        f"cannot load {folder}/saved/iter_0000003 into another model",
        "--swiglu: the checkpoint has False, this run True",
        "--num-attention-heads: the checkpoint has 4, this run 8",
    )
    assert job.status == 1 or job.status == 2
    assert not re.search(r"iteration +4/", job.output)


def test_a_missing_checkpoint_is_refused(tmp_path):
    train("--load", tmp_path / "nothing").refused("no checkpoint there", f"--load {tmp_path}/nothing")
    (tmp_path / TRACKER).write_text("12")
    train("--load", tmp_path).refused("names iteration 12, whose folder is missing")


@pytest.mark.slow
def test_the_same_command_starts_and_restarts(tmp_path):
    both = ["--save", tmp_path / "saved", "--load", tmp_path / "saved", *STEADY, "--num-layers", "2"]
    first = train(*both, "--train-iters", "4", "--exit-interval", "2").succeeded()
    assert "continuing" not in first.output and (tmp_path / "saved" / TRACKER).read_text() == "2"
    second = train(*both, "--train-iters", "4").succeeded()
    assert "continuing after iteration 2" in second.output and (tmp_path / "saved" / TRACKER).read_text() == "4"

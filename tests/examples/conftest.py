"""What the tests of the examples share: built text, a run without any plan, and a plan that moves everything."""

import fcntl
import os

import pytest

from tests.examples import jobs
from tests.examples.jobs import SHORT, numbers, rows, script


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder of this test run that all workers of pytest-xdist see, where there are any."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session", autouse=True)
def cache(shared):
    """The folder of built data sets for all jobs of this test run, so that the text is built once."""
    jobs.ALSO["XDG_CACHE_HOME"] = str(shared / "cache")  # not for tests of other folders: what is built is in theirs


@pytest.fixture(scope="session")
def everything(tmp_path_factory):
    """A memory configuration that swaps all activations of all layers."""
    path = tmp_path_factory.mktemp("plan") / "everything.yaml"
    path.write_text("swap_config:\n  swap: True\n  layer_swap:\n    - backward_prefetch: 1\n      layers: True\n")
    return path


@pytest.fixture(scope="session")
def unchanged(shared):
    """Numbers of four iterations without any plan, and their peaks: of one job for all workers."""
    path = shared / "unchanged.jsonl"
    with open(shared / "unchanged.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            unfinished = path.with_suffix(f".{os.getpid()}")
            script("pretrain_gpt.sh", *SHORT, unfinished, TRAIN_ITERS=4).succeeded()
            unfinished.rename(path)
    return numbers(path), [row["peak_activation_bytes"] for row in rows(path)]

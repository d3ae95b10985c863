"""What the tests of the examples share: a cache of the built text, and a plan that moves everything."""

import pytest

from tests.examples.jobs import SHORT, numbers, rows, script


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """The folder of built data sets for all jobs of this session, so that the text is built once."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def everything(tmp_path_factory):
    """A memory configuration that swaps all activations of all layers."""
    path = tmp_path_factory.mktemp("plan") / "everything.yaml"
    path.write_text("swap_config:\n  swap: True\n  layer_swap:\n    - backward_prefetch: 1\n      layers: True\n")
    return path


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    """Numbers of four iterations without any plan."""
    path = tmp_path_factory.mktemp("unchanged") / "metrics.jsonl"
    script("pretrain_gpt.sh", *SHORT, path, TRAIN_ITERS=4).succeeded()
    return numbers(path), [row["peak_activation_bytes"] for row in rows(path)]

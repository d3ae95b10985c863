"""What every test gets: one thread, fixed seeds, fast tests first, and no GPU tests without a GPU."""

import gc
import os
import random

# Before torch: several ranks of a test share few cores, and its thread pool reads this once.
os.environ["OMP_NUM_THREADS"] = "1"
# What a user has built is none of a test's affair; with 1 all of them run on it.
os.environ.setdefault("MINDSPEED_MEM_NATIVE", "0")
os.environ.setdefault("MINDSPEED_MEM_ALLOCATOR", os.devnull)

import numpy
import pytest
import torch
from hypothesis import settings

from tests import worlds

# The same examples on every run, and no limit on their time: the machine's load is not a property of the code.
settings.register_profile("mindspeed_mem", derandomize=True, deadline=None)
settings.load_profile("mindspeed_mem")

FOLDERS = "unit patches memory asynchrony gemini numerics fuzz distributed accelerator examples".split()


@pytest.fixture(autouse=True)
def seed():
    """The same random numbers for a test, whichever tests ran before it."""
    random.seed(1234)
    numpy.random.seed(1234)
    torch.manual_seed(1234)


def pytest_addoption(parser):
    group = parser.getgroup("fuzz", "random cases of tests/fuzz")
    group.addoption("--fuzz", type=int, metavar="N", help="try N cases instead of a few fixed ones")
    group.addoption("--fuzz-seed", type=int, default=0, metavar="S", help="which N cases")
    parser.addoption("--sweep", action="store_true", help="also the cases that others stand for")
    parser.addoption("--on", metavar="DEVICE", help="take this real device where tests take the CPU or a stand-in")


def pytest_configure(config):
    if device := config.getoption("--on"):
        worlds.take(device)
        torch.set_default_device(device)
    if hasattr(config.option, "loadscopereorder"):  # pytest-xdist: by default, files with few tests come last
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("sweep") and not config.getoption("sweep"):
            item.add_marker(pytest.mark.skip(reason="only with --sweep"))
        if item.get_closest_marker("host") and config.getoption("--on"):
            item.add_marker(pytest.mark.skip(reason="of a CPU"))
        for marker in item.iter_markers("needs_torch"):
            version, why = marker.args
            if _numbers(torch.__version__) < _numbers(version):
                item.add_marker(pytest.mark.skip(reason=f"before torch {version}: {why}"))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    items.sort(key=_cost)


def _numbers(version):
    return tuple(map(int, version.split(".")[:2]))


def pytest_collection_finish():
    gc.freeze()  # a collection takes 0.1 s where it looks through all that has been imported


def _cost(item):
    """Sort key: what is neither marked slow nor distributed first, quick folders before others; then the rest, quick
    folders last, so that workers that take file after file end at about the same time.
    """
    folder = next((FOLDERS.index(part) for part in reversed(item.path.parts) if part in FOLDERS), len(FOLDERS))
    slow = item.get_closest_marker("slow") is not None
    distributed = item.get_closest_marker("distributed") is not None
    return (True, not slow, -folder) if slow or distributed else (False, False, folder)

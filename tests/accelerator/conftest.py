"""Where the accelerator cannot be built, nothing runs on it."""

import pytest
import torch

from mindspeed_mem.device import native_build


@pytest.fixture(scope="session", autouse=True)
def built():
    if native_build.find_compiler() is None:
        pytest.skip("the accelerator needs a C++ compiler")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
        pytest.skip("the accelerator is written for the device interfaces of torch 2.9 and newer")

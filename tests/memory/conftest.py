"""What tests of memory share."""

from __future__ import annotations

import pytest

from mindspeed_mem.device.limited_cpu import CompilerError, LimitedMemory


@pytest.fixture(scope="session")
def limited_memory():
    """Skips the test where the CPU's memory cannot be limited, for lack of a compiler."""
    try:
        LimitedMemory()
    except CompilerError as error:
        pytest.skip(str(error))

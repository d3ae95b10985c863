"""CPU memory with a limit: counts exactly, refuses by torch's own error, and leaves no trace."""

import shutil

import pytest
import torch

from mindspeed_mem.device import get_backend, limited_cpu
from mindspeed_mem.device.limited_cpu import CompilerError, LimitedMemory
from tests.guarding import settled


@pytest.fixture
def memory():
    try:
        limited = LimitedMemory()
    except CompilerError as error:
        pytest.skip(str(error))
    with limited:
        yield limited


def empty(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)


def test_it_counts_every_byte_as_long_as_it_lives(memory):
    before = settled(memory)
    one = empty(1000)
    view = one[10:20]
    assert memory.allocated - before == 1000
    del one
    assert memory.allocated - before == 1000
    del view
    assert memory.allocated == before
    assert memory.peak >= before + 1000
    memory.reset_peak()
    assert memory.peak == before


def test_beyond_the_limit_any_operator_raises_the_real_error(memory):
    one = torch.ones(64, 64)
    refused = memory.refused
    memory.limit = memory.allocated + 1000
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 16384 bytes") as caught:
        one @ one
    memory.limit = None
    assert memory.refused == refused + 1
    assert get_backend("cpu").is_out_of_memory(caught.value)
    assert get_backend("cpu").bytes_wanted(caught.value) == 16384
    assert torch.equal(one @ one, torch.full((64, 64), 64.0))


def test_a_request_that_fits_to_the_byte_is_granted(memory):
    memory.limit = memory.allocated + 4096
    kept = empty(4096)
    assert memory.allocated == memory.limit
    with pytest.raises(torch.OutOfMemoryError):
        empty(1)
    del kept
    empty(4096)


def test_tensors_may_be_older_or_younger_than_the_limit():
    try:
        memory = LimitedMemory()
    except CompilerError as error:
        pytest.skip(str(error))
    older = empty(1 << 16)
    with memory:
        before = settled(memory)
        del older
        assert memory.allocated == before
        younger = empty(1 << 16)
    assert memory.limit is None
    assert memory.allocated == before + (1 << 16)
    empty(1 << 20)
    del younger
    assert memory.allocated == before


def test_host_memory_is_not_counted(memory):
    before = settled(memory)
    with memory.on_host():
        host = empty(1 << 16)
    buffer = get_backend("cpu").host_empty(1 << 16)
    assert memory.allocated == before
    del host, buffer
    assert memory.allocated == before


def test_the_cpu_backend_answers_from_it(memory):
    backend = get_backend("cpu")
    backend.attach_ledger(memory)
    try:
        assert backend.limit() is backend.room() is None
        memory.limit = memory.allocated + 5000
        assert backend.limit() == memory.limit
        assert backend.room() == 5000
        assert backend.allocated() == memory.allocated
    finally:
        backend.attach_ledger(None)


def test_wrong_limits_are_refused(memory):
    with pytest.raises(ValueError, match="-1 bytes; give 0 or more"):
        memory.limit = -1


@pytest.fixture
def nothing_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    limited_cpu._library.cache_clear()
    yield tmp_path
    limited_cpu._library.cache_clear()


def test_without_a_compiler_it_says_so(nothing_compiled, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(CompilerError, match="needs a C\\+\\+ compiler"):
        LimitedMemory()


def test_what_the_compiler_says_is_handed_on(nothing_compiled, monkeypatch):
    compiler = nothing_compiled / "c++"
    compiler.write_text("#!/bin/sh\necho no such header >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(compiler))
    with pytest.raises(CompilerError, match="no such header"):
        LimitedMemory()
    assert not list((nothing_compiled / "mindspeed_mem").iterdir())

"""The CPU backend: copies at once, keeps version counters, and counts memory by its ledger."""

import gc

import pytest
import torch

from mindspeed_mem.device.cpu import CpuBackend
from mindspeed_mem.device.ledger import DeviceLedger


@pytest.fixture
def backend():
    return CpuBackend()


def test_a_copy_is_exact_and_done_when_it_returns(backend):
    source = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    host, back = backend.host_empty(1000), backend.empty(1000)
    side = backend.new_stream("out")
    backend.copy(host, source, side)
    event = backend.record(side)
    assert backend.done(event)
    backend.wait(backend.current_stream(), event, "test")
    backend.copy(back, host, side)
    backend.synchronize(event)
    backend.synchronize()
    assert torch.equal(back, source)


def test_a_copy_moves_no_version_counter(backend):
    target, source = backend.empty(16), backend.empty(16)
    view = target[:]
    versions = target._version, source._version, view._version
    backend.copy(target, source, backend.current_stream())
    assert (target._version, source._version, view._version) == versions


@pytest.mark.parametrize(
    ("target", "source", "says"),
    [
        (torch.zeros(4, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8), "target has 4 bytes, source 5"),
        (torch.zeros(4, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8), "must be equal"),
        (torch.zeros(4), torch.zeros(4, dtype=torch.uint8), "copy target: got torch.float32"),
        (torch.zeros(4, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8), r"copy source.*shape \(2, 2\)"),
    ],
)
def test_a_copy_that_would_convert_or_broadcast_is_refused(backend, target, source, says):
    with pytest.raises(ValueError, match=says):
        backend.copy(target, source, backend.current_stream())


def test_streams_are_told_apart(backend):
    side, other = backend.new_stream("out"), backend.new_stream("out")
    assert backend.current_stream() == backend.current_stream()
    assert not backend.current_stream().side
    assert side.side and side != other and side != backend.current_stream() != other


def test_time_spent_copying_is_stall(backend):
    assert backend.stall_seconds() == 0
    source, target = backend.empty(1 << 20), backend.host_empty(1 << 20)
    backend.copy(target, source, backend.current_stream())
    once = backend.stall_seconds()
    assert once > 0
    backend.copy(target, source, backend.current_stream())
    assert backend.stall_seconds() > once


def test_random_state_comes_back(backend):
    state = backend.rng_state()
    first = torch.rand(5)
    backend.set_rng_state(state)
    assert torch.equal(torch.rand(5), first)


def test_out_of_memory_is_recognised(backend):
    with pytest.raises(RuntimeError) as caught:
        backend.empty(1 << 60)
    assert backend.is_out_of_memory(caught.value)
    assert backend.is_out_of_memory(torch.OutOfMemoryError("x"))
    assert not backend.is_out_of_memory(RuntimeError("shape mismatch"))


def test_memory_is_unknown_without_a_ledger(backend):
    backend.reset_peak()
    assert backend.allocated() is None and backend.peak() is None and backend.limit() is None
    assert backend.owns(torch.zeros(1)) and not backend.owns(torch.zeros(1, device="meta"))
    assert backend.describe()["type"] == "cpu"


def test_a_ledger_counts_storages_once_and_host_buffers_never(backend):
    ledger = DeviceLedger()
    backend.attach_ledger(ledger)
    before = torch.zeros(256, dtype=torch.uint8)
    with ledger.watch():
        a = backend.empty(1000)
        view, alias = a[10:], a.detach()
        host = backend.host_empty(5000)
        backend.copy(host[:1000], a, backend.current_stream())
        before.add_(1)
        assert backend.allocated() == 1000
        b = a + 1
        assert backend.allocated() == backend.peak() == 2000
        del a, view
        assert backend.allocated() == 2000  # the alias holds the storage
        del alias
        assert backend.allocated() == 1000
    del b
    assert backend.allocated() == 0 and backend.peak() == 2000
    backend.reset_peak()
    assert backend.peak() == 0


def test_a_ledger_follows_what_only_autograd_holds():
    ledger = DeviceLedger()
    weight = torch.ones(100, 100, requires_grad=True)
    with ledger.watch():
        out = (weight * 2).exp().sum()  # exp saves its result, the product is freed
        gc.collect()
        assert ledger.allocated == 100 * 100 * 4 + 4
        out.backward()
        assert ledger.allocated == 100 * 100 * 4 + 4  # the saved result is gone, the gradient has come
    weight.grad = None
    del out
    assert ledger.allocated == 0

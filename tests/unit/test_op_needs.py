"""What operators need is learnt: room is made before they run again, for other sizes too, and never too much."""

from __future__ import annotations

import pytest
import torch

from mindspeed_mem.activation.engine import Engine
from mindspeed_mem.device.cpu import CpuBackend
from mindspeed_mem.device.op_guard import OpGuard
from mindspeed_mem.plan import load_memory_config
from tests.guarding import N, Sandbag, guarded, limited_memory, numbers


@pytest.fixture
def memory():
    with limited_memory() as memory:
        yield memory


def test_room_is_made_before_an_operator_that_has_run_before_and_for_other_sizes(memory):
    sandbag = Sandbag(memory, pieces=64)
    guard = guarded(sandbag)
    one, other = numbers(N), numbers(N // 2)
    refused = memory.refused
    with guard:
        small = one * 2
        memory.limit = memory.allocated + 100
        kept = [one * 2, other * 2, small * 3]
    memory.limit = None
    assert memory.refused == refused and guard.retries == 0 < guard.lacks
    assert torch.equal(kept[1], other * 2)
    assert sandbag.asked[0] <= one.nbytes, "no more than is lacking"


def test_a_failure_is_learnt_from(memory):
    sandbag = Sandbag(memory, pieces=200)
    guard = guarded(sandbag)
    one, failures = numbers(64, 64), []
    for _ in range(4):
        before = memory.refused
        with guard:
            memory.limit = memory.allocated + 100
            torch.linalg.svd(one)  # takes workspaces, too
        memory.limit = None
        failures.append(memory.refused - before)
    assert failures[0] > 0 and failures[-1] == 0


class Beside(CpuBackend):
    """A device beside the host, which is full."""

    def owns(self, tensor):
        return tensor.device.type == "meta"

    def room(self):
        return 0


def test_what_an_operator_returns_on_the_host_needs_no_room_on_the_device():
    asked = []
    guard = OpGuard(Beside(), lambda nbytes, _: asked.append(nbytes) or 0, lambda *_: RuntimeError())
    host, device = torch.ones(64), torch.ones(64, device="meta")
    with guard:
        for _ in range(2):
            host * 2
            torch.ops.aten._to_copy(host, device="cpu")
        assert asked == []
        for _ in range(2):
            device * 2
            torch.ops.aten._to_copy(host, device="meta")
    assert asked == [256, 256]


class InPieces(CpuBackend):
    """Memory whose allocator has to retry."""

    retries = 0

    def allocation_retries(self):
        return self.retries

    def limit(self):
        return 10**9


def test_an_allocator_that_retries_is_left_more_room():
    backend = InPieces()
    survival = Engine(load_memory_config(None), backend, survive=True).survival
    margins = []
    for retries in (0, 1, 2, *([5] * 20)):
        with survival.guarded():
            backend.retries += retries
        margins.append(survival.guard.needs.margin)
    assert margins[:4] == [0, 0, 10**7, 2 * 10**7] and margins[-1] == 10**8


def test_what_failures_taught_ends_with_the_plan_they_were_under():
    backend = InPieces()
    engine = Engine(load_memory_config(None), backend, survive=True)
    needs = engine.survival.guard.needs
    one = torch.ones(64)
    key = needs.key("op", (one,), {})
    needs.saw(key, torch.ones(64), (one,), {})
    needs.lacked(key, 1000, 5000, (one,), {})
    assert needs.of(key, (one,), {}) == one.nbytes + 1000 and needs.margin == 4000
    with engine.survival.guarded():
        backend.retries += 5
    engine.adopt(load_memory_config(None), lambda mine: [mine])
    assert needs.of(key, (one,), {}) == one.nbytes and needs.margin == 0
    other = torch.ones(32)
    assert needs.of(needs.key("op", (other,), {}), (other,), {}) == other.nbytes  # what it returns is known still

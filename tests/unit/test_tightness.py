"""Steps are guarded while memory may run out in them, and no longer than that."""

from __future__ import annotations

import pytest
import torch

from mindspeed_mem.activation.survive.guard_policy import GuardPolicy
from mindspeed_mem.device.cpu import CpuBackend
from mindspeed_mem.device.ledger import DeviceLedger

LIMIT = 1000 * 2**10


@pytest.fixture
def device():
    backend = CpuBackend()
    ledger = DeviceLedger()
    ledger.limit = LIMIT
    backend.attach_ledger(ledger)
    return backend


def step(tightness, device, share, lacked=False, parts=1):
    """A part of a step that takes this share of the memory; whether it was to be guarded."""
    guarded = tightness.begins(parts)
    with device.ledger.watch():
        torch.empty(int(share * LIMIT), dtype=torch.uint8)
    tightness.ends(lacked)
    return guarded


def test_the_first_steps_are_guarded_and_ample_ones_after_them_are_not(device):
    tightness = GuardPolicy(device)
    assert [step(tightness, device, 0.5) for _ in range(6)] == [True, True, True, False, False, False]


def test_whole_steps_count_as_two_parts(device):
    tightness = GuardPolicy(device)
    assert [step(tightness, device, 0.5, parts=2) for _ in range(4)] == [True, True, False, False]
    tight = GuardPolicy(device)
    found = [step(tight, device, 0.95, parts=2) for _ in range(14)]
    assert found == [True] * 10 + [False] * 4


def test_tight_steps_are_guarded_until_enough_of_them_went_well(device):
    tightness = GuardPolicy(device)
    found = [step(tightness, device, 0.95) for _ in range(30)]
    assert found[:20] == [True] * 20 and not any(found[20:])
    assert not step(tightness, device, 0.99)  # it could not be known
    assert step(tightness, device, 0.95)


def test_what_is_given_more_than_ever_is_guarded_however_calm_it_was(device):
    tightness = GuardPolicy(device)
    assert [tightness.outgrown(*given) for given in [(8, 4), (8, 4), (4, 2), (9, 4), (9, 5)]] == [0, 0, 0, 1, 1]
    for _ in range(30):
        step(tightness, device, 0.5)
    assert not tightness.begins() and tightness.begins(outgrown=True)
    assert tightness.outgrown(1, 1, keeps=False) and not tightness.outgrown(9, 5)


def test_what_was_given_before_another_plan_says_nothing_of_steps_under_it(device):
    tightness = GuardPolicy(device)
    tightness.outgrown(9, 5)
    step(tightness, device, 0.9)
    tightness.forget(planned=True)
    assert [tightness.outgrown(4, 2) for _ in range(3)] == [False] * 3
    assert [step(tightness, device, 0.5) for _ in range(6)][-1] is False
    assert tightness.outgrown(9, 5)


def test_what_begins_with_more_in_use_is_guarded_once(device):
    tightness = GuardPolicy(device)
    for _ in range(6):
        step(tightness, device, 0.5)
    with device.ledger.watch():
        model = torch.empty(int(0.1 * LIMIT), dtype=torch.uint8)
    assert [step(tightness, device, 0.4) for _ in range(2)] == [True, False] and len(model)


def test_after_a_lack_all_are_guarded_for_a_while(device):
    tightness = GuardPolicy(device)
    for _ in range(4):
        step(tightness, device, 0.5)
    assert not step(tightness, device, 0.5, lacked=True)
    assert all(step(tightness, device, 0.5) for _ in range(20))
    assert not step(tightness, device, 0.5)


def test_what_varies_is_guarded_as_long_as_it_is_tight(device):
    tightness = GuardPolicy(device)
    tightness.varies = True
    assert all(step(tightness, device, 0.95) for _ in range(40))
    roomy = GuardPolicy(device)
    roomy.varies = True
    device.reset_peak()
    assert not any([step(roomy, device, 0.5) for _ in range(10)][3:])


def test_another_plan_starts_afresh(device):
    tightness = GuardPolicy(device)
    for _ in range(5):
        step(tightness, device, 0.97, lacked=True)
    tightness.forget()
    assert [step(tightness, device, 0.5) for _ in range(5)] == [True, True, True, False, False]


def test_a_plan_made_for_this_memory_is_trusted_sooner(device):
    tightness = GuardPolicy(device)
    tightness.forget(planned=True)
    found = [step(tightness, device, 0.97) for _ in range(8)]
    assert found == [True] * 4 + [False] * 4
    assert not step(tightness, device, 0.97, lacked=True)
    assert step(tightness, device, 0.97)


class InPieces(CpuBackend):
    """Its allocator keeps memory in pieces; it has retried so often."""

    retries = 0

    def allocation_retries(self):
        return self.retries


def test_a_retry_of_the_allocator_is_a_lack_whatever_the_bytes_say(device):
    backend = InPieces()
    backend.retries = 3  # before anybody looked
    backend.attach_ledger(device.ledger)
    tightness = GuardPolicy(backend)
    assert [step(tightness, backend, 0.5) for _ in range(5)] == [True, True, True, False, False]
    backend.retries += 1
    assert not step(tightness, backend, 0.5)
    assert all(step(tightness, backend, 0.5) for _ in range(20))
    assert not step(tightness, backend, 0.5)


def test_without_figures_only_a_lack_tells():
    tightness = GuardPolicy(CpuBackend())
    assert not tightness.begins()
    tightness.ends(lacked=True)
    assert tightness.begins()

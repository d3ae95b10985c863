"""Each wait of the copies between chunks and the host is needed: the simulated device finds it missing."""

from dataclasses import replace

import pytest
import torch

from mindspeed_mem.device.simulated import RaceError, SimulatedBackend
from mindspeed_mem.zero.core import shard_memory
from mindspeed_mem.zero.core.chunk import Chunk, Piece
from mindspeed_mem.zero.core.gathering import Gathering, Reading
from mindspeed_mem.zero.core.placement import placement
from mindspeed_mem.zero.core.shard_memory import HostStore
from mindspeed_mem.zero.optimizer import swapped
from tests import chunk_runs
from tests.chunk_runs import Case, differences
from tests.worlds import on_ranks

ELEMENTS, CHUNKS, SLOTS = 64, 5, 2


class OneRank:
    """A group of one rank, without communication."""

    def size(self):
        return 1

    def rank(self):
        return 0


def resting(backend):
    """Chunks on the host, of which two may be gathered at once."""
    managed, store, group = Gathering(SLOTS * 4 * ELEMENTS), HostStore(backend), OneRank()
    for index in range(CHUNKS):
        param = torch.nn.Parameter(torch.empty(ELEMENTS))
        whole, grad = torch.arange(float(ELEMENTS)) + index, torch.empty(ELEMENTS)
        param.data = whole.view(ELEMENTS)
        chunk = Chunk(index, [(param, Piece(0, ELEMENTS))], whole, grad, group)
        chunk.keep_shard(store)
        chunk.drop_gradients()
        managed.add(chunk)
    return managed, store


def trained(backend, steps=3):
    """Multiply an activation by each chunk, add gradients backwards, and step on the host; the shards in the end.

    In every other step each chunk's gradients come twice, as from two micro-batches.
    """
    with backend.tracker():
        managed, store = resting(backend)
        for step in range(steps):
            managed.begin("training")
            x = torch.ones(ELEMENTS)
            for chunk in (*managed.chunks, *reversed(managed.chunks)):
                reading = Reading(chunk.params)
                managed.acquire(reading)
                x = torch.sin(x * chunk.params[0].detach())
                managed.done(reading)
            for chunk in (chunk for chunk in reversed(managed.chunks) for _ in range(1 + step % 2)):
                chunk.open_gradients()
                chunk.grad.add_(x)
                chunk.fetch_gradients()
                chunk.keep_gradients()
            managed.end()
            store.settle()
            for chunk in managed.chunks:
                chunk.shard.sub_(chunk.grad_shard)
                chunk.drop_gradients()
    return [chunk.shard.clone() for chunk in managed.chunks]


def test_copies_beside_computation_have_no_races():
    backend = SimulatedBackend()
    shards = trained(backend)
    backend.check()
    assert set(backend.reasons) == set(shard_memory.WAITS)
    blocking = SimulatedBackend()
    blocking.copies_block = True
    assert all(map(torch.equal, shards, trained(blocking)))
    assert not blocking.reasons


@pytest.mark.parametrize("wait", shard_memory.WAITS)
def test_each_wait_is_missed_when_left_out(wait):
    backend = SimulatedBackend()
    backend.leave_out = {wait}
    with pytest.raises(RaceError):
        trained(backend)
        backend.check()


def on_late_copies(stage, policies):
    """Where training differs from Megatron's if copies run as late as they may; and what was waited for."""
    found, reasons = [], set()
    for policy in policies:
        backend = SimulatedBackend(check=False)
        case = Case(settings={"placement": placement(policy), "backend": backend}, micro_batches=2, stages=(stage,))
        found += differences({policy: case})
        reasons |= set(backend.reasons)
    return found, reasons


def with_late_copies():
    """As above, for all stages; and what differs from copies that block if each micro-batch's gradients are reduced."""
    found, reasons = [], {}
    for stage in (2, 3):
        differing, reasons[stage] = on_late_copies(stage, ("host", "static:0.5"))
        found += differing
    case = Case(micro_batches=3, settings={"placement": placement("host"), "reduce_each": True})
    each = SimulatedBackend(check=False)
    late = replace(case, settings={**case.settings, "backend": each})
    for stage in (2, 3):
        found += [] if trained_with(stage, late) == trained_with(stage, case) else [f"each micro-batch, stage {stage}"]
    first = SimulatedBackend(check=False)
    case = Case(settings={"placement": placement("static:1"), "backend": first})
    found += [] if trained_with(1, case) == trained_with(0, case) else ["stage 1"]
    return found, reasons | {1: set(first.reasons), "each": set(each.reasons)}


def trained_with(stage, case):
    run = chunk_runs.trained(stage, case)
    assert not run.problems
    return run.numbers()


@pytest.mark.distributed
def test_training_with_late_copies_changes_no_bit():
    for found, reasons in on_ranks(2, with_late_copies):
        assert found == []
        for stage in (1, 2, 3):
            expected = {shard_memory.UP_AFTER_COMPUTE, shard_memory.DOWN_AFTER_COMPUTE, swapped.STEP_AFTER_IN}
            assert reasons[stage] >= expected
        met = shard_memory.USE_AFTER_UP
        assert met not in reasons[3], "a collective is started where the copies are; it alone is met"
        assert all(met in reasons[key] for key in (1, 2, "each"))

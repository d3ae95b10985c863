"""Layers with a branch on a stream of its own: the same gradients, in an order that every stream knows.

Each wait, and each word to the allocator, is needed: left out, the simulated device finds it missing.
"""

from __future__ import annotations

import functools

import pytest
import torch

from mindspeed_mem.activation.storage import mover
from mindspeed_mem.device.races import RaceError
from tests.side_streams import run
from tests.swap_runs import again, entry, op


def everything(distance: int) -> dict:
    return entry(layer_swap=[{"backward_prefetch": distance, "layers": True}])


PLANS = {
    "swapped": everything(1),
    "swapped, released late": everything(8),
    "swapped, far ahead": everything(30),
    "what another stream saves": entry(op_swap=[op("first", 30)]),
    "layers recomputed": again(recompute=[2]),
    "main recomputed": again(["before"]),
    "branch recomputed": again(["first", "second"]),
    "recomputed from the host": again(
        ["second"],
        {"swap": True, "smallest_bytes": 0, "swap_recompute_inputs": True, "op_swap": [op(["first", "before"], 1)]},
    ),
}
surviving = functools.partial(run, survive=True, after_part=lambda engine: engine.mover.make_room(6000, set()))


@pytest.fixture(scope="module")
def native():
    return {tells: run(None, tells=tells)[0] for tells in (True, False)}


@pytest.mark.parametrize("tells", [True, False], ids=["tells the allocator", "keeps what is read"])
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_are_the_same(plan, tells, native):
    gradients, _ = run(PLANS[plan], tells=tells)
    assert all(map(torch.equal, gradients, native[tells]))


@pytest.mark.parametrize("tells", [True, False], ids=["tells the allocator", "keeps what is read"])
@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("plan", [entry(op_swap=[]), PLANS["swapped"], PLANS["branch recomputed"]])
def test_gradients_are_the_same_when_memory_runs_out(plan, tells, native):
    gradients, backend = surviving(plan, tells=tells)
    assert all(map(torch.equal, gradients, native[tells])) and backend.bytes_copied


@pytest.mark.parametrize(
    "wait, plan, tells",
    [
        (mover.OUT_AFTER_SAVED, "swapped", True),
        (mover.IN_AFTER_OUT, "what another stream saves", True),
        (mover.SECOND_RUN_AFTER_INPUTS, "recomputed from the host", True),
        (mover.AFTER_SECOND_RUN, "branch recomputed", True),
        (mover.UNPACK_AFTER_SECOND_RUN, "main recomputed", True),
        (mover.SAVED_BESIDE, "swapped, released late", False),
        (mover.SAVED_BESIDE, "layers recomputed", False),
        (mover.READ_BESIDE, "swapped", True),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # some are found in a destructor
def test_each_is_missed_when_left_out(wait, plan, tells):
    with pytest.raises(RaceError):
        run(PLANS[plan], leave_out=wait, tells=tells)


@pytest.mark.parametrize(
    "wait", [mover.OUT_AFTER_SAVED, mover.IN_AFTER_OUT, mover.RELEASE_AFTER_OUT, mover.COMPUTE_AFTER_IN]
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_wait_is_missed_when_memory_runs_out(wait):
    with pytest.raises(RaceError):
        surviving(entry(op_swap=[]), leave_out=wait)


def test_all_are_covered():
    marks = test_each_is_missed_when_left_out.pytestmark
    [cases] = [mark.args[1] for mark in marks if mark.name == "parametrize"]
    assert {wait for wait, *_ in cases} == set(mover.BESIDE)

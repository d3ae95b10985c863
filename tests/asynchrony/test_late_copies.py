"""Copies out that are late: computation waits for them only when they hold more than the window, and nothing is wrong.

On the simulated device no copy is done before somebody waits for it.
"""

from __future__ import annotations

import functools

import pytest
import torch

from mindspeed_mem.activation.storage import mover
from mindspeed_mem.activation.storage.late_copies import LateCopies
from mindspeed_mem.device.races import RaceError
from mindspeed_mem.device.simulated import SimulatedBackend
from tests.side_streams import run as run_at
from tests.swap_runs import entry, op

SAVED = 16 * 32 * 4  # bytes of what a part keeps: 16 rows of 32 floats
EVERYTHING = 1000 * SAVED
run = functools.partial(run_at, bandwidth=SAVED / 1e-4)  # a copy takes as long as ten operators


def swapped(window: int, distance: int = 1) -> dict:
    return entry(layer_swap=[{"backward_prefetch": distance, "layers": True}], window_bytes=window)


@pytest.mark.parametrize("distance", [1, 8, 30])
def test_a_larger_window_waits_less_and_holds_no_more_than_it_says(distance):
    gradients, reference = run(swapped(0, distance))
    stalls, peaks = [reference.stall_seconds()], [reference.peak()]
    for window in (SAVED, 5 * SAVED, EVERYTHING):
        found, backend = run(swapped(window, distance))
        assert all(map(torch.equal, gradients, found))
        assert backend.peak() <= reference.peak() + window
        stalls.append(backend.stall_seconds())
        peaks.append(backend.peak())
    assert stalls == sorted(stalls, reverse=True) and stalls[-1] < 0.7 * stalls[0]
    assert peaks == sorted(peaks) and (distance > 1 or peaks[-1] > peaks[0])


def test_the_window_follows_what_each_model_chunk_moved_last():
    late = LateCopies()
    late.allow(560, all_of_it=False)
    windows = []
    for chunk, moved in ((0, 256), (0, 20_000), (0, 256), (1, 800), (1, 0), (0, 256), (1, 80)):
        late.pass_moved(chunk, moved)
        windows.append(late.window)
    assert windows == [32, 560, 32, 100, 100, 100, 32]
    late.allow(560, all_of_it=True)
    late.pass_moved(0, 256)
    assert late.window == 560


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_unless_given_the_window_is_a_small_part_of_what_a_pass_moves(monkeypatch):
    monkeypatch.setattr(SimulatedBackend, "nominal_limit", lambda self: 256 * EVERYTHING)
    plan, late, moved = swapped(0), [], []
    del plan["swap_config"]["window_bytes"]

    def look(engine):
        late.append(engine.mover.late.nbytes)
        moved.append(engine.mover.bytes_out)

    run(plan, after_part=look)
    parts = len(late) // 12  # of a pass; two steps of three micro-batches, forward and backward
    of_pass = moved[parts - 1]
    assert max(late[:parts]) > of_pass / 2
    assert 0 < max(late[2 * parts :]) <= of_pass / 8


@pytest.mark.parametrize(
    "wait, window", [(mover.RELEASE_AFTER_OUT, 3 * SAVED), (mover.RETIRE_AFTER_COPIES, EVERYTHING)]
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_is_late_is_still_waited_for(wait, window):
    with pytest.raises(RaceError):
        run(swapped(window), leave_out=wait)


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_what_has_been_copied_is_released():
    _, reference = run(swapped(0))
    gradients, late = run(swapped(EVERYTHING))
    found, backend = run(swapped(EVERYTHING), after_part=lambda engine: engine.backend.synchronize())
    assert all(map(torch.equal, gradients, found))
    assert reference.peak() <= backend.peak() < late.peak()


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_what_is_late_leaves_first_when_memory_runs_out():
    copies = []

    def make_room(engine):
        before = engine.mover.copies_out
        if engine.mover.late and engine.mover.make_room(1, set()):
            copies.append(engine.mover.copies_out - before)

    plan = entry(op_swap=[op("after", 1)], window_bytes=EVERYTHING)
    run(plan, survive=True, after_part=make_room)
    assert copies and not any(copies), "others were copied, though some were on their way"

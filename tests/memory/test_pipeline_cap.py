"""A cap on micro-batches in flight is what a stage holds: the ledger's peak is the cap times one micro-batch."""

from __future__ import annotations

import itertools

import pytest

from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed

LAYERS, MICRO_BATCHES = 4, 6
HIDDEN_STATES = 32 * 1 * 64 * 4  # bytes of what one stage sends to the next


def peaks(layout: dict, caps: list[int | None]) -> list[tuple[int, list[dict]]]:
    """For each cap, the peak of the activations this rank's operators produced, and what one pass of a chunk keeps."""
    from mindspeed_mem.activation.storage.ledger import LEDGER
    from tests.capped_runs import capped
    from tests.models import build_gpt, train_step
    from tests.swap_runs import owned_peak, swap

    found = []
    for cap in caps:
        with parallel(**layout), capped(cap), swap({}, watch_only=True) as engine:
            chunks = build_gpt("dense", layers=LAYERS, deallocate_pipeline_outputs=True)
            for step in range(2):
                LEDGER.reset_peak()
                train_step(chunks, micro_batches=MICRO_BATCHES, micro_batch_size=1, step=step)
            rows = engine.observation.census.storages()
            found.append((owned_peak(), [row for row in rows if 0 <= row["layer"] < LAYERS]))
    return found


def test_a_stage_holds_the_cap():
    caps = [1, 2, 3, None]
    for stage, of_caps in enumerate(on_ranks(4, peaks, {"pp": 4}, caps)):
        for cap, (peak, rows) in zip(caps, of_caps, strict=True):
            micro_batch = sum(row["bytes"] for row in rows)
            assert peak == min(4 - stage, cap or 4) * micro_batch > 0, (stage, cap)


def test_with_virtual_stages_it_holds_passes_of_one_chunk():
    from mindspeed_mem.passes import FORWARD
    from mindspeed_mem.schedule import in_flight, order

    caps = [2, 3, 4, None]
    for stage, of_caps in enumerate(on_ranks(2, peaks, {"pp": 2, "vpp": 2}, caps)):
        for cap, (peak, rows) in zip(caps, of_caps, strict=True):
            first = sum(row["bytes"] for row in rows if row["layer"] < LAYERS // 2)
            # Its output stays where the model ends: the norm after the last layer needs it.
            sizes = [first, first + stage * HIDDEN_STATES]
            passes = order(2, 2, MICRO_BATCHES, cap=cap)[stage]
            held = itertools.accumulate(sizes[chunk] * (1 if way == FORWARD else -1) for way, _, chunk in passes)
            assert peak == max(held) > 0, (stage, cap)
            assert max(in_flight(passes)) <= (cap or 5)


def split_backwards(cap: int | None) -> tuple[int, int, list[int]]:
    """With gradients of weights in idle time: the peak of what operators of layers produced, what one micro-batch keeps
    of that, and what each pass that computes gradients of weights lets go of."""
    from mindspeed_mem.activation.storage.ledger import LEDGER
    from mindspeed_mem.schedule.weight_gradients import WEIGHT_GRADIENTS
    from tests.capped_runs import capped
    from tests.models import build_gpt, train_step
    from tests.swap_runs import left_over, owned_peak, swap

    def run(key):
        before = LEDGER.held.now
        compute(key)
        freed.append(before - LEDGER.held.now)

    freed: list[int] = []
    with parallel(pp=2), capped(cap, split=True), swap({}, watch_only=True) as engine:
        chunks = build_gpt("dense", layers=LAYERS, deallocate_pipeline_outputs=True)
        compute, WEIGHT_GRADIENTS.run = WEIGHT_GRADIENTS.run, run
        try:
            for step in range(2):
                LEDGER.reset_peak()
                train_step(chunks, micro_batches=MICRO_BATCHES, micro_batch_size=1, step=step)
        finally:
            del WEIGHT_GRADIENTS.run
        rows = engine.observation.census.storages()
        peak = owned_peak()
        assert not any(left_over(engine).values())
    return peak, sum(row["bytes"] for row in rows if 0 <= row["layer"] < LAYERS), freed


@pytest.mark.parametrize("cap", [1, None])
def test_what_gradients_of_weights_need_is_held_within_the_cap_and_counted(cap):
    for stage, (peak, micro_batch, freed) in enumerate(on_ranks(2, split_backwards, cap)):
        # Of four linear layers inputs of 1, 1, 1 and 4 times the hidden size, output gradients of 3, 1, 4 and 1 times;
        # those of the output layer, whose vocabulary is 4 times the hidden size.
        needed = HIDDEN_STATES * (LAYERS // 2 * (7 + 9) + stage * (1 + 4))
        assert freed == [needed] * 2 * MICRO_BATCHES
        assert micro_batch <= peak <= (cap or 2) * micro_batch


def left(layout: dict, settings: list[tuple[int | None, bool]]) -> list[int]:
    """For each cap, and whether the backward is split: how many tensors of the size of what stages send to each other
    are alive after a step."""
    import gc

    import torch

    from tests.capped_runs import capped
    from tests.models import SEQUENCE, build_gpt, train_step

    counts = []
    for cap, split in settings:
        with parallel(**layout), capped(cap, split):
            chunks = build_gpt("dense")
            train_step(chunks, micro_batches=MICRO_BATCHES, micro_batch_size=1)
            gc.collect()
            tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
            counts.append(sum(one.shape == (SEQUENCE, 1, 64) for one in tensors))
            del chunks, tensors
        gc.collect()
    return counts


@pytest.mark.parametrize(
    ("layout", "ours"),
    [({"pp": 2}, [(1, False), (None, True)]), ({"pp": 2, "vpp": 2}, [(2, False)])],
    ids=["pp2", "pp2-vpp2"],
)
def test_no_more_is_left_than_after_megatrons_own_loop(layout, ours):
    """Megatron's model keeps the last input it was given."""
    for megatrons, *left_by_ours in on_ranks(2, left, layout, [(None, False), *ours]):
        assert max(left_by_ours) <= megatrons

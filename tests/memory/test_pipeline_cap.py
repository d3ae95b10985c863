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


def left(layout: dict, caps: list[int | None]) -> list[int]:
    """For each cap, how many tensors of the size of what stages send to each other are alive after a step."""
    import gc

    import torch

    from tests.capped_runs import capped
    from tests.models import SEQUENCE, build_gpt, train_step

    counts = []
    for cap in caps:
        with parallel(**layout), capped(cap):
            chunks = build_gpt("dense")
            train_step(chunks, micro_batches=MICRO_BATCHES, micro_batch_size=1)
            gc.collect()
            tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
            counts.append(sum(one.shape == (SEQUENCE, 1, 64) for one in tensors))
            del chunks, tensors
        gc.collect()
    return counts


@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 2, "vpp": 2}], ids=["pp2", "pp2-vpp2"])
def test_no_more_is_left_than_after_megatrons_own_loop(layout):
    """Megatron's model keeps the last input it was given."""
    for megatrons, ours in on_ranks(2, left, layout, [None, layout.get("vpp", 1)]):
        assert ours <= megatrons

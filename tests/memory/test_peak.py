"""The ledger's peak equals the closed form: without swap the stage's micro-batches in flight, with swap a window."""

from __future__ import annotations

import pytest

from tests.sweeping import apart
from tests.worlds import on_ranks, parallel

LAYERS, MICRO_BATCHES = 8, 8


def peaks(kind: str, sizes: dict, plan: dict | None) -> tuple[int, list[dict]]:
    """Peak of the activations that this rank's operators produced, and what one micro-batch keeps."""
    from mindspeed_mem.activation.storage.ledger import LEDGER
    from tests.models import build_gpt, train_step
    from tests.swap_runs import SDPA, owned_peak, patched, swap

    with patched(SDPA), parallel(**sizes), swap(plan or {}, watch_only=plan is None) as engine:
        chunks = build_gpt(kind, layers=LAYERS)
        for step in range(2):
            LEDGER.reset_peak()
            train_step(chunks, micro_batches=MICRO_BATCHES, micro_batch_size=1, step=step)
        rows = engine.observation.census.storages() if plan is None else []
        return owned_peak(), [row for row in rows if 0 <= row["layer"] < LAYERS]


def forward_window(rows: list[dict], distance: int) -> int:
    """Most bytes on the device in forward when everything moves: an activation is there from its producer n to n +
    distance, by operator number.
    """
    last = max(max(row["uses"]) for row in rows)
    return max(
        sum(row["bytes"] for row in rows if row["number"] <= at <= row["number"] + distance)
        for at in range(1, last + 1)
    )


def backward_window(rows: list[dict], distance: int) -> int:
    """In backward it is there from its last use u + distance down to its first use."""
    last = max(max(row["uses"]) for row in rows)
    return max(
        sum(row["bytes"] for row in rows if min(row["uses"]) <= at <= max(row["uses"]) + distance)
        for at in range(1, last + 1)
    )


@pytest.mark.distributed
def test_pp4_peaks_are_level_with_swap_and_a_staircase_without():
    from tests.swap_runs import EVERYTHING

    without = on_ranks(4, peaks, "swiglu_gqa_rope", {"pp": 4}, None)
    micro_batch = [sum(row["bytes"] for row in rows) for _, rows in without]
    assert [peak for peak, _ in without] == [(4 - stage) * micro_batch[stage] for stage in range(4)]
    assert micro_batch[0] == micro_batch[1] == micro_batch[2]

    moved = [peak for peak, _ in on_ranks(4, peaks, "swiglu_gqa_rope", {"pp": 4}, EVERYTHING)]
    assert moved == [max(forward_window(rows, 1), backward_window(rows, 1)) for _, rows in without]
    assert len(set(moved)) == 1
    assert moved[0] < micro_batch[0]


def backward_peak(kind: str, plan: dict) -> int:
    """Peak of the ledger in the backward of one micro-batch whose activations have all left."""
    from mindspeed_mem.activation.storage.ledger import LEDGER
    from tests.models import build_gpt
    from tests.swap_runs import SDPA, one_forward, owned_now, owned_peak, patched, swap

    with patched(SDPA), parallel(), swap(plan) as engine:
        chunks = build_gpt(kind, layers=LAYERS)
        engine.passes.begin_schedule(())
        loss = one_forward(engine, chunks)
        assert owned_now() == 0
        LEDGER.reset_peak()
        engine.passes.begin_backward(loss)
        loss.sum().backward()
        engine.passes.end_backward()
        return owned_peak()


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind",
    apart(
        ["dense", "swiglu_gqa_rope", "mla", "dropout"],
        *("dense", "dropout"),
        python=["mla"],
        native=["swiglu_gqa_rope"],
    ),
)
def test_backward_holds_the_window_of_the_distance(kind):
    from tests.swap_runs import entry

    [(_, rows)] = on_ranks(1, peaks, kind, {}, None)
    for distance in (1, 2, 3, 5, 12, 40):
        plan = entry(layer_swap=[{"backward_prefetch": distance, "layers": True}])
        assert on_ranks(1, backward_peak, kind, plan) == [backward_window(rows, distance)], distance


@pytest.mark.distributed
def test_what_the_layers_own_code_holds_comes_on_top():
    """A layer holds its input, the attention's residual and the norm's output in variables while its MLP runs: with
    LayerNorm, which saves its input, all three are activations."""
    from tests.swap_runs import EVERYTHING

    [(_, rows)] = on_ranks(1, peaks, "dense", {}, None)
    assert forward_window(rows, 1) >= backward_window(rows, 1)
    [(peak, _)] = on_ranks(1, peaks, "dense", {}, EVERYTHING)
    hidden_states = next(row["bytes"] for row in rows if row["op"] == "self_attn_bda")
    assert peak == forward_window(rows, 1) + 3 * hidden_states

"""What a split backward holds for gradients of weights is, to the byte, what the planner takes it to be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.memory import test_adaptive_bytes, test_adaptive_families
from tests.sweeping import but
from tests.worlds import on_ranks

pytestmark = pytest.mark.distributed

LAYERS = 3
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dropout, unfused attention": ({"tp": 2}, {"sequence_parallel": True}),
    "SwiGLU, GQA, RMSNorm": ({"tp": 2}, {}),
}
OTHERS = (
    *("experts and a shared one", "several tokens ahead"),
    *("latent attention", "latent attention, norms", "latent attention, one query linear"),
)
CASES = [*test_adaptive_bytes.CASES, *OTHERS]


def model_of(case: str) -> tuple[str, bool, dict[str, Any], Any]:
    """Kind, whether attention is flash's, fields of the model's config, and its shape."""
    if case in OTHERS:
        kind, more, fields = test_adaptive_families.CASES[case]
        shape = test_adaptive_families.shape_of(fields)
        return kind, True, {"position_embedding_type": "rope", "bias_activation_fusion": True, **more}, shape
    kind, flash, fused, more = test_adaptive_bytes.CASES[case]
    shape = dataclasses.replace(test_adaptive_bytes.shape_of(case), vocab_size=256)
    return kind, flash, {"bias_activation_fusion": fused, "bias_dropout_fusion": fused, **more}, shape


def held(case: str, layout: dict[str, Any], more: dict[str, Any]) -> list[int]:
    """Bytes that wait in a pass of a model with one layer more, and with so many; each storage counted once."""
    import torch

    from mindspeed_mem.schedule.weight_gradients import WEIGHT_GRADIENTS
    from tests.models import build_gpt, train_step
    from tests.split_runs import split
    from tests.swap_runs import SDPA, patched
    from tests.worlds import parallel

    kind, flash, fields, _ = model_of(case)
    found, native = [], WEIGHT_GRADIENTS.run

    def counted(key):
        found.append(WEIGHT_GRADIENTS.waiting())
        native(key)

    with patched(SDPA if flash else []), parallel(**layout), split():
        WEIGHT_GRADIENTS.run = counted
        try:
            for layers in (LAYERS, LAYERS + 1):
                chunks = build_gpt(kind, layers=layers, dtype=torch.bfloat16, **{"tied": False, **fields, **more})
                train_step(chunks, micro_batches=1, micro_batch_size=1)
        finally:
            del WEIGHT_GRADIENTS.run
    return found


@pytest.mark.parametrize("case", but(CASES, "dropout, unfused attention", "experts and a shared one"))
def test_what_waits_in_a_layer_and_in_the_head(case):
    from mindspeed_mem.adaptive.problem import from_shape
    from mindspeed_mem.adaptive.problem.shape import Degrees, Machine

    layout, more = LAYOUTS.get(case, ({}, {}))
    *_, shape = model_of(case)
    split = Degrees(tensor=layout.get("tp", 1), sequence_parallel=bool(more), split_backward=True)
    problem = from_shape.problem(shape, split, Machine(memory_bytes=1))
    layers = problem.stages[0].parts[0].layers
    whole, each = problem.waiting(0, 0), problem.class_of[layers[0]].weight_bytes
    for found in on_ranks(layout.get("tp", 1), held, case, layout, more):
        assert found == [whole, whole + each]


def waiting_beside_swap(**more: Any) -> list[tuple[int, int]]:
    """Of each pass: bytes on the device that wait, and all that the ledger counts then."""
    import torch

    from mindspeed_mem.activation.storage.ledger import LEDGER
    from mindspeed_mem.schedule.weight_gradients import WEIGHT_GRADIENTS
    from tests.models import build_gpt, train_step
    from tests.split_runs import split
    from tests.swap_runs import SDPA, entry, left_over, patched, swap
    from tests.worlds import parallel

    kind, _, fields, _ = model_of("dense GELU")
    plan = entry(layer_swap=[{"backward_prefetch": 1, "layers": True}], **more)
    found, native = [], WEIGHT_GRADIENTS.run

    def counted(key):
        found.append((WEIGHT_GRADIENTS.waiting(), LEDGER.held.now))
        native(key)

    with patched(SDPA), parallel(), split(), swap(plan) as engine:
        WEIGHT_GRADIENTS.run = counted
        try:
            chunks = build_gpt(kind, layers=LAYERS, dtype=torch.bfloat16, tied=False, **fields)
            train_step(chunks, micro_batches=3, micro_batch_size=1)
        finally:
            del WEIGHT_GRADIENTS.run
        left = left_over(engine)
        assert not any(left.values()), left
    return found


def test_what_only_gradients_of_weights_need_stays_on_the_host_until_then():
    from mindspeed_mem.adaptive.problem import from_shape
    from mindspeed_mem.adaptive.problem.shape import Degrees, Machine
    from mindspeed_mem.plan.operators import ACTIVATION, INPUT_NORM, MLP_NORM

    *_, shape = model_of("dense GELU")
    problem = from_shape.problem(shape, Degrees(split_backward=True), Machine(memory_bytes=1))
    kind = problem.classes[0]
    on_host = sum(group.weight_bytes for group in kind.groups if group.name in (INPUT_NORM, MLP_NORM, ACTIVATION))
    [found] = on_ranks(1, waiting_beside_swap)
    whole = problem.waiting(0, 0)
    assert [waiting for waiting, _ in found] == [whole, *[whole - LAYERS * on_host] * 2]  # learnt in the first pass
    assert all(held >= waiting for waiting, held in found) and found[1][1] < found[0][1]


@pytest.mark.needs_torch("2.7", "RMSNorm keeps other bytes")
def test_gradients_of_outputs_leave_where_the_plan_says_so():
    from mindspeed_mem.adaptive.problem import from_shape
    from mindspeed_mem.adaptive.problem.shape import ELEMENT, Degrees, Machine

    *_, shape = model_of("dense GELU")
    problem = from_shape.problem(shape, Degrees(split_backward=True), Machine(memory_bytes=1))
    outputs = LAYERS * sum(one.weight_bytes for one in problem.classes[0].operators)
    outputs += ELEMENT * shape.tokens * shape.vocab_size  # of the head
    [without], [found] = on_ranks(1, waiting_beside_swap), on_ranks(1, waiting_beside_swap, output_gradients=True)
    assert [one - other for (one, _), (other, _) in zip(without, found, strict=True)] == [outputs] * 3
    assert [one - other for (_, one), (_, other) in zip(without, found, strict=True)] == [outputs] * 3  # by the ledger
    small = on_ranks(1, waiting_beside_swap, output_gradients=True, smallest_bytes=10**9)
    assert small[0][0][0] == without[0][0]

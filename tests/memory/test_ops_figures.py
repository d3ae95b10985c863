"""What `ops` says that recomputing an operator frees and costs is what the ledger and the second run show."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.worlds import on_ranks, parallel

LAYER = 1  # neither the first nor the last
CHANGES_ITS_INPUT = {"self_attention.core_attention.scale_mask_softmax"}


def plan(op: str) -> dict[str, Any]:
    """Recompute one operator of one layer ("": all of it); indices need swap to be on."""
    section = {"select_recompute": {op.replace(".", r"\."): [LAYER]}} if op else {"recompute": [LAYER]}
    return {"swap_config": {"swap": True, "op_swap": []}, "recompute_config": section}


def in_one_pass(engine: Any, kind: str, backward: bool, fused: bool) -> int:
    """Bytes held at the end of the forward of a new model."""
    import torch

    from mindspeed_mem.activation.observe.meter import ActivationMeter
    from mindspeed_mem.activation.storage.ledger import LEDGER
    from tests.models import build_gpt
    from tests.swap_runs import one_forward

    chunks = build_gpt(kind, layers=3, bias_activation_fusion=fused, bias_dropout_fusion=fused)
    gc.collect()
    before = LEDGER.held.now
    with ActivationMeter(engine.backend):
        loss = one_forward(engine, chunks)
        if not backward:  # what a token dispatcher holds until the next micro-batch belongs to no operator
            for module in chunks[0].modules():
                state = vars(getattr(module, "token_dispatcher", object)) if hasattr(module, "token_dispatcher") else {}
                for name in [name for name, value in state.items() if isinstance(value, torch.Tensor)]:
                    state[name] = None
        held = LEDGER.held.now - before
        if backward:
            engine.passes.begin_backward(loss)
            loss.mean().backward()
            engine.passes.end_backward()
    return held


def figures(kind: str, sdpa: bool, backward: bool, fused: bool) -> dict[str, tuple]:
    """(bytes freed and FLOPs as predicted, as they are) for each operator of a layer."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    from mindspeed_mem.activation.rerun import second_run
    from tests.swap_runs import SDPA, patched, swap

    on_cpu = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
            lambda q, k, v, *_, out_shape=None, **__: sdpa_flop_count(q, k, v)
        )
    }

    @contextlib.contextmanager
    def count() -> Iterator[None]:
        if torch._C._current_graph_task_id() == -1:  # in forward, to see whether the operator repeats itself
            yield
            return
        with FlopCounterMode(display=False, custom_mapping=on_cpu) as counter:
            yield
        flops.append(counter.get_total_flops())

    found = {}
    with patched(SDPA if sdpa else []), parallel():
        with swap({}, watch_only=True) as engine:
            without = in_one_pass(engine, kind, backward, fused)
            choices = [one for one in engine.observation.census.choices() if one["layer"] == LAYER]
        for one in choices:
            flops: list[int] = []
            if one["op"] in CHANGES_ITS_INPUT:
                found[one["op"]] = one["frees"], one["flops"], 0, 0
                continue
            second_run.GUARDS.append(count)
            try:
                with swap(plan(one["op"])) as engine:
                    freed = without - in_one_pass(engine, kind, backward, fused)
            finally:
                second_run.GUARDS.remove(count)
            found[one["op"]] = one["frees"], one["flops"], freed, sum(flops)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "sdpa", "fused"),
    [("dense", False, False), ("swiglu_gqa_rope", True, False), ("swiglu_gqa_rope", False, True), ("mla", True, False)],
)
def test_bytes_and_flops_of_every_operator_are_what_is_measured(kind, sdpa, fused):
    [found] = on_ranks(1, figures, kind, sdpa, True, fused)
    assert {op: (freed, flops) for op, (_, _, freed, flops) in found.items()} == {
        op: (frees, predicted) for op, (frees, predicted, _, _) in found.items()
    }
    for op in ("", "self_attention", "self_attention.core_attention", "mlp", "mlp.activation_func", "input_layernorm"):
        assert found[op][0] > 0
    assert found["mlp.activation_func"][1] == found["input_layernorm"][1] == 0
    for op in ("self_attn_bda", "mlp.linear_fc2", "self_attention.linear_proj"):  # their inputs are all they free
        assert found[op][0] <= 0


@pytest.mark.distributed
def test_bytes_of_experts_are_what_is_measured():
    [found] = on_ranks(1, figures, "moe", False, False, False)
    different = {op: row for op, row in found.items() if row[0] != row[2]}
    # steps of the dispatcher that free nothing: what they would hold is held by the dispatcher
    assert all(max(row[0], row[2]) <= 0 for row in different.values()), different
    assert found["mlp"][0] > found["mlp.experts"][0] > found["mlp.experts.local_experts.0.activation_func"][0] > 0

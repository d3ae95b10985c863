"""The bytes that the planner takes each operator of Megatron's layer to keep are those that the library's census counts
on the real layer, and recomputing a group of them frees what the planner says."""

from __future__ import annotations

from typing import Any

import pytest

from tests import worlds
from tests.sweeping import but
from tests.worlds import on_ranks, parallel

LAYER = 1  # neither the first nor the last
HIDDEN, HEADS, SEQUENCE, BATCH = 64, 4, 32, 1  # of tests.models and tests.swap_runs.one_forward

CASES = {
    "dense GELU": ("dense", True, True, {}),
    "dense GELU, unfused": ("dense", False, False, {}),
    "dense GELU, rotary": ("dense", True, True, {"position_embedding_type": "rope"}),
    "SwiGLU, GQA, RMSNorm": ("swiglu_gqa_rope", True, True, {}),
    "SwiGLU, GQA, RMSNorm, unfused": ("swiglu_gqa_rope", True, False, {}),
    "dropout, unfused attention": ("dropout", False, True, {}),
    "dense GELU, other sizes": ("dense", True, True, {"hidden": 96, "heads": 6, "ffn_hidden_size": 160}),
}


def shape_of(case: str) -> Any:
    from mindspeed_mem.adaptive.problem.shape import Shape

    kind, flash, fused, more = CASES[case]
    gated = kind.startswith("swiglu")
    hidden, heads = more.get("hidden", HIDDEN), more.get("heads", HEADS)
    return Shape(
        num_layers=3,
        hidden_size=hidden,
        num_attention_heads=heads,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        ffn_hidden_size=more.get("ffn_hidden_size", 4 * hidden),
        num_query_groups=2 if gated else heads,
        kv_channels=hidden // heads,
        swiglu=gated,
        normalization="RMSNorm" if gated else "LayerNorm",
        rope=gated or "position_embedding_type" in more,
        bias=not gated,
        flash=flash,
        fused=fused,
        cpu=worlds.REAL is None,
        attention_dropout=kind == "dropout",
        hidden_dropout=kind == "dropout",
    )


def counted(case: str, plans: dict[str, dict[str, Any]]) -> tuple[list[dict], dict[str, int], int]:
    """The census of one forward; for each plan by how many bytes what is held at the end of a forward is less; and the
    number of parameters of a layer."""
    import gc

    import torch

    from mindspeed_mem.activation.observe.meter import ActivationMeter
    from mindspeed_mem.activation.storage.ledger import LEDGER
    from tests.models import build_gpt
    from tests.swap_runs import SDPA, one_forward, patched, swap

    kind, flash, fused, more = CASES[case]

    def held(engine: Any) -> int:
        chunks = build_gpt(
            kind,
            layers=3,
            dtype=torch.bfloat16,
            bias_activation_fusion=fused,
            bias_dropout_fusion=fused,
            **more,
        )
        layer = chunks[0].module.module.decoder.layers[LAYER]
        sizes.append(sum(parameter.numel() for parameter in layer.parameters()))
        gc.collect()
        before = LEDGER.held.now
        with ActivationMeter(engine.backend):
            loss = one_forward(engine, chunks)
            found = LEDGER.held.now - before
            engine.passes.begin_backward(loss)
            loss.mean().backward()
            engine.passes.end_backward()
        return found

    freed, sizes = {}, []
    with patched(SDPA if flash else []), parallel():
        with swap({}, watch_only=True) as engine:
            without = held(engine)
            storages = engine.observation.census.storages()
        for name, plan in plans.items():
            with swap(plan) as engine:
                freed[name] = without - held(engine)
    return storages, freed, sizes[0]


def plan_of(kind: Any, group: Any, letter: str) -> dict[str, Any]:
    """A memory configuration that does this to one group of one layer, as the planner writes it."""
    from mindspeed_mem.adaptive.problem.definition import Link, Part, Pipeline, Problem, Stage
    from mindspeed_mem.adaptive.search.decisions import Plan, StagePlan
    from mindspeed_mem.adaptive.search.plan_file import memory_config, sections

    letters = "".join(letter if other is group else "K" for other in kind.groups)
    kept = "K" * len(kind.groups)
    stage = Stage(parts=(Part(layers=(kind.name,) * 3, first_layer=0),), static_bytes=0)
    problem = Problem(
        classes=(kind,), stages=(stage,), pipeline=Pipeline(micro_batches=1), link=Link(out=1, back=1), device_limit=1
    )
    of_layers = (kept, letters, kept)
    return sections(memory_config(problem, Plan(stages=(StagePlan(parts=(of_layers,)),))))


@pytest.mark.distributed
@pytest.mark.parametrize("case", but(CASES, "dense GELU", "dense GELU, rotary", "SwiGLU, GQA, RMSNorm, unfused"))
@pytest.mark.needs_torch("2.7", "RMSNorm keeps other bytes")
def test_bytes_are_those_of_the_census_and_what_is_freed_is_that_of_the_ledger(case):
    from mindspeed_mem.adaptive.problem.from_shape import layer_class
    from mindspeed_mem.adaptive.problem.layer_bytes import layer_bytes
    from mindspeed_mem.adaptive.problem.shape import Degrees, Machine
    from mindspeed_mem.plan.operators import INPUT

    shape = shape_of(case)
    sizes = layer_bytes(shape, Degrees())
    kind = layer_class(shape, Degrees(), Machine(memory_bytes=1))
    plans = {f"{group.name} S": plan_of(kind, group, "S") for group in kind.groups}
    again = [group for group in kind.groups if group.recompute_seconds is not None]
    plans |= {f"{group.name} R": plan_of(kind, group, "R") for group in again}
    [(storages, freed, parameters)] = on_ranks(1, counted, case, plans)

    produced: dict[str, int] = {}
    for one in storages:
        if one["layer"] == LAYER:
            op = one["op"].removesuffix(".scale_mask_softmax").removesuffix(".attention_dropout")
            produced[op] = produced.get(op, 0) + one["bytes"]
    produced[INPUT] = produced.pop("mlp_bda", 0)  # each layer's output is the next one's input
    assert produced == {name: size for name, size in sizes.items() if size or name == INPUT}
    expected = {f"{group.name} S": group.bytes for group in kind.groups}
    expected |= {f"{group.name} R": group.bytes - group.recompute_keeps for group in again}
    assert freed == expected

    names = [operator.name for operator in kind.operators]
    mine = [one for one in storages if one["layer"] == LAYER]
    assert {op for one in mine for layer, op in one["saved_by"] if layer == LAYER} <= set(names)
    starts = {one["number"] - names.index(one["op"]) for one in mine if "core_attention" not in one["op"]}
    assert len(starts) == 1  # the engine counts operators as the planner does
    assert shape.parameters(Degrees())[0] == parameters

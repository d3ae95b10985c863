"""Chunk ZeRO trains as Megatron's distributed optimizer does, bit for bit: in tensor, pipeline and expert layouts."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.capped_runs import capped
from tests.chunk_runs import OVERLAP, Case, differences
from tests.swap_runs import again, swap
from tests.worlds import on_ranks

pytestmark = pytest.mark.distributed

SINGLE = torch.float32
SEQUENCE_PARALLEL = {"sequence_parallel": True}
ALIGNED = {"ddp": {**OVERLAP, "align_param_gather": True}, "align": True}
RECOMPUTED = functools.partial(swap, again([".*norm", "mlp"]))
AGAIN = {"around": (RECOMPUTED,), "deviates": True}
TP2, PP2, VPP, EP2 = {"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"ep": 2}

TWO = {
    "TP2": Case("swiglu_gqa_rope", layout=TP2, ddp=OVERLAP),
    "TP2, sequence parallel": Case("dropout", SINGLE, TP2, SEQUENCE_PARALLEL),
    "PP2, not tied": Case(layout=PP2, micro_batches=3, ddp=OVERLAP, model={"tied": False}),
    "PP2, capped": Case(layout=PP2, micro_batches=4, beneath=(functools.partial(capped, 1),)),
    "VPP, aligned": Case(layout=VPP, micro_batches=4, **ALIGNED),
    "EP2": Case("moe", layout=EP2, ddp=OVERLAP),
}
MORE_OF_TWO = {
    "PP2": Case(layout=PP2, micro_batches=4),
    "VPP": Case("swiglu_gqa_rope", SINGLE, VPP, micro_batches=4, ddp=OVERLAP),
}
FOUR = {
    "TP2, sequence parallel, norms of queries and keys": Case(
        "swiglu_gqa_rope",
        layout=TP2,
        model={**SEQUENCE_PARALLEL, "qk_layernorm": True, "gradient_accumulation_fusion": True},
    ),
    "PP2, capped, recomputed": Case(
        layout=PP2, micro_batches=4, beneath=(functools.partial(capped, 1),), stages=(3,), **AGAIN
    ),
    "TP2 x PP2": Case("dropout", layout={**TP2, **PP2}, model=SEQUENCE_PARALLEL, micro_batches=3, stages=(3,)),
    "EP2, recomputed": Case("moe", layout=EP2, micro_batches=1, stages=(3,), **AGAIN),
}
MORE_OF_FOUR = {
    "DP4": Case("dropout", SINGLE, ddp=OVERLAP, micro_batches=1),
    "PP2, loss per token": Case(dtype=SINGLE, layout=PP2, per_token=True, ddp=OVERLAP, stages=(3,)),
    "VPP, aligned": Case(layout=VPP, micro_batches=4, **ALIGNED),
    "EP2": Case("moe", layout=EP2, ddp=OVERLAP),
}


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, TWO, id="2"),
        pytest.param(2, MORE_OF_TWO, id="more of 2", marks=pytest.mark.sweep),
        pytest.param(4, FOUR, id="4", marks=pytest.mark.sweep),
        pytest.param(4, MORE_OF_FOUR, id="more of 4", marks=pytest.mark.sweep),
    ],
)
def test_layouts(ranks, cases):
    assert on_ranks(ranks, differences, cases, timeout=500) == [[]] * ranks

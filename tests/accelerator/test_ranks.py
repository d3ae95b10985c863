"""Megatron's layouts and chunk ZeRO on several ranks of the accelerator, with streams that lag."""

import contextlib
import os

import pytest
import torch

from tests.chunk_runs import OVERLAP, Case, differences
from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed
LATE = {"compute": {"compute": 100}, "collectives": {"side": 500}, "random": {"random": 300, "seed": 2}}
LAYOUTS = {
    "TP2": ({"tp": 2}, {"sequence_parallel": True}),
    "PP2": ({"pp": 2}, {}),
    "interleaved": ({"pp": 2, "vpp": 2}, {}),
    "DP2": ({}, {"ddp": {"use_distributed_optimizer": True, **OVERLAP}}),
}


def lagging(lags):
    """On the accelerator; on the host nothing."""
    if "ACCELERATOR_KIND" not in os.environ:
        return contextlib.nullcontext()
    from tests.accelerator import stand_in

    return stand_in.lagging(**lags)


def two_steps(layout, model, lags):
    """Losses, gradients and norms of this rank."""
    from tests.models import build_gpt, build_optimizer, train_step

    with parallel(**layout), lagging(lags):
        chunks = build_gpt("dense", dtype=torch.bfloat16, **model)
        optimizer = build_optimizer(chunks)
        results = [train_step(chunks, step=step, optimizer=optimizer) for step in range(2)]
        return [(one.loss, one.grad_norm, {name: g.tolist() for name, g in one.grads.items()}) for one in results]


@pytest.mark.parametrize(
    "name", ["DP2", *(pytest.param(one, marks=pytest.mark.sweep) for one in LAYOUTS if one != "DP2")]
)
def test_a_layout_trains_to_the_bits_of_the_host(name):
    found = on_ranks(2, two_steps, *LAYOUTS[name], LATE["random"], device="cuda")
    assert found == on_ranks(2, two_steps, *LAYOUTS[name], {})


def late_differences(cases, lags):
    with lagging(lags):
        return differences(cases)


@pytest.mark.sweep
@pytest.mark.parametrize("late", LATE)
def test_chunk_zero_trains_to_the_bits_of_megatron(late):
    cases = {"bf16": Case(steps=2, ddp=OVERLAP)}
    assert on_ranks(2, late_differences, cases, LATE[late], device="cuda") == [[], []]


@pytest.mark.sweep
def test_chunk_zero_on_pipeline_stages():
    cases = {"PP2": Case(steps=2, layout={"pp": 2})}
    assert on_ranks(4, late_differences, cases, LATE["random"], device="cuda") == [[]] * 4

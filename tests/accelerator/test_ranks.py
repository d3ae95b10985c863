"""Megatron's layouts and chunk ZeRO on several ranks of the accelerator, with streams that lag."""

import pytest
import torch

from tests.accelerator.lags import LAGS, under
from tests.chunk_runs import OVERLAP, Case, differences
from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed
LAYOUTS = {
    "TP2": ({"tp": 2}, {"sequence_parallel": True}),
    "PP2": ({"pp": 2}, {}),
    "interleaved": ({"pp": 2, "vpp": 2}, {}),
    "DP2": ({}, {"ddp": {"use_distributed_optimizer": True, **OVERLAP}}),
}


def two_steps(layout, model):
    """Losses, gradients and norms of this rank."""
    from tests.models import build_gpt, build_optimizer, train_step

    with parallel(**layout):
        chunks = build_gpt("dense", dtype=torch.bfloat16, **model)
        optimizer = build_optimizer(chunks)
        results = [train_step(chunks, step=step, optimizer=optimizer) for step in range(2)]
        return [(one.loss, one.grad_norm, {name: g.tolist() for name, g in one.grads.items()}) for one in results]


@pytest.mark.parametrize(
    "name", ["DP2", *(pytest.param(one, marks=pytest.mark.sweep) for one in LAYOUTS if one != "DP2")]
)
def test_a_layout_trains_to_the_bits_of_the_host(name):
    found = on_ranks(2, under, "random", two_steps, *LAYOUTS[name], device="cuda")
    assert found == on_ranks(2, two_steps, *LAYOUTS[name])


def with_split_backward(layout, model):
    from tests.capped_runs import departures as in_idle_time
    from tests.split_runs import departures

    if layout.get("pp"):
        return in_idle_time("dense", layout, model, [(None, 4)], split=True)
    from tests.swap_runs import entry

    plan = entry(layer_swap={"backward_prefetch": 3, "layers": True}, output_gradients=True)
    return departures("dense", layout, model) + departures("dense", layout, model, plan)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["TP2", "PP2", "DP2"])
def test_gradients_of_weights_that_are_put_off(name):
    assert on_ranks(2, under, "random", with_split_backward, *LAYOUTS[name], device="cuda") == [[], []]


@pytest.mark.sweep
@pytest.mark.parametrize("lag", LAGS)
def test_chunk_zero_trains_to_the_bits_of_megatron(lag):
    cases = {"bf16": Case(steps=2, ddp=OVERLAP)}
    assert on_ranks(2, under, lag, differences, cases, device="cuda") == [[], []]


@pytest.mark.sweep
def test_chunk_zero_on_pipeline_stages():
    cases = {"PP2": Case(steps=2, layout={"pp": 2})}
    assert on_ranks(4, under, "random", differences, cases, device="cuda") == [[]] * 4

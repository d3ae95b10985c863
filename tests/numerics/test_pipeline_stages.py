"""Layers split unevenly over pipeline stages train to the same bits as split evenly, with and without a plan."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.worlds import applied, on_ranks, parallel

pytestmark = pytest.mark.distributed

LAYERS = 8
STEPS = 2


def trained(layout: dict, splits: list, model: dict, plan: dict | None = None) -> list[dict]:
    """For each split (None: Megatron's own, without the plan) this rank's layers by chunk, the results of its steps,
    the layers of which the plan swapped or recomputed anything, and what it left over.

    Gradients are not clipped: their norm is a sum over stages, which rounds differently where layers change places.
    """
    from mindspeed_mem.features import Settings, put_into_force
    from tests.models import build_gpt, build_optimizer, train_step
    from tests.swap_runs import SDPA, left_over, patched, swap

    found = []
    for stages in splits:
        put_into_force(Settings(pipeline_stages=stages))
        with contextlib.ExitStack() as stack:
            stack.callback(put_into_force, Settings())
            stack.enter_context(patched(SDPA))
            stack.enter_context(applied(*([] if stages is None else ["pipeline_stages"])))
            engine = stack.enter_context(swap(plan)) if plan and stages else None
            stack.enter_context(parallel(**layout))
            chunks = build_gpt(layers=LAYERS, **model)
            optimizer = build_optimizer(chunks, clip_grad=0.0)
            steps = [train_step(chunks, step=step, optimizer=optimizer) for step in range(STEPS)]
            layers = [[layer.layer_number - 1 for layer in chunk.module.decoder.layers] for chunk in chunks]
            del chunks, optimizer
            figures = engine.report() if engine else None
            swapped = {row.layer for row in figures.moved_by_operator if row.bytes} if figures else set()
            recomputed = {row.layer for row in figures.recomputed_by_operator if row.bytes} if figures else set()
            left = any(left_over(engine).values()) if engine else False
        found.append({"layers": layers, "steps": steps, "touched": (swapped, recomputed), "left": left})
    return found


def together(ranks: list[list[dict]], number: int) -> tuple[list, list[list], list[dict]]:
    """Of one split: the layers of each chunk in the model's order, per step all losses, and all gradients."""
    mine = [rank[number] for rank in ranks]
    chunks = [layers for of_chunk in zip(*(one["layers"] for one in mine), strict=True) for layers in of_chunk]
    losses, grads = [], []
    for step in range(STEPS):
        losses.append(next(one["steps"][step].losses for one in mine if one["steps"][step].losses))
        grads.append({})
        for one in mine:
            for name, grad in one["steps"][step].grads.items():
                # The embedding is on two stages where it is tied to the output layer.
                assert torch.equal(grads[-1].setdefault(name, grad), grad), name
    return chunks, losses, grads


def check(size: int, layout: dict, splits: list, plan: dict | None = None, **model) -> list[list[dict]]:
    """Train with Megatron's even split and, with the plan, with each of `splits`; returns the ranks' results."""
    from mindspeed_mem.schedule.stages import split

    ranks = on_ranks(size, trained, layout, [None, *splits], model, plan)
    _, even_losses, even_grads = together(ranks, 0)
    assert len(even_grads[0]) > 50 and "embedding.word_embeddings.weight" in even_grads[0]
    assert not torch.equal(torch.stack(even_losses[0]), torch.stack(even_losses[1]))
    for number, entries in enumerate(splits, 1):
        chunks, losses, grads = together(ranks, number)
        counts = split(entries, LAYERS, layout["pp"], layout.get("vpp", 1)).counts
        assert sum(chunks, []) == list(range(LAYERS)) and tuple(map(len, chunks)) == counts
        for step in range(STEPS):
            assert list(map(float, losses[step])) == list(map(float, even_losses[step])), (entries, step)
            assert grads[step].keys() == even_grads[step].keys()
            wrong = [name for name, grad in grads[step].items() if not torch.equal(grad, even_grads[step][name])]
            assert not wrong, (entries, step, wrong)
        assert not any(rank[number]["left"] for rank in ranks)
    return ranks


TWO = {"pp": 2}
FOUR = {"pp": 4}
VIRTUAL = {"pp": 2, "vpp": 2}


@pytest.mark.parametrize(
    ("size", "layout", "splits"),
    [
        pytest.param(2, TWO, [(3, 5), (0, 0, 0, 0, 0, 0, 0, 1), (0, 8)], id="pp2"),
        pytest.param(4, FOUR, [(1, 3, 2, 2), (3, 0, 4, 1), (0, 4, 4, 0)], id="pp4"),
        pytest.param(2, VIRTUAL, [(1, 2, 3, 2), (2, 0, 5, 1), (0, 1, 1, 1, 2, 2, 2, 3)], id="pp2-vpp2"),
    ],
)
def test_uneven_stages_train_to_the_same_bits(size, layout, splits):
    check(size, layout, splits)


def test_untied_embeddings_and_latent_attention():
    check(2, TWO, [(5, 3)], kind="mla", tied=False)


@pytest.mark.parametrize(
    ("size", "layout", "splits"),
    [
        pytest.param(2, TWO, [(3, 5)], id="pp2"),
        pytest.param(4, FOUR, [(1, 3, 2, 2), (6, 0, 1, 1)], id="pp4"),
        pytest.param(2, VIRTUAL, [(1, 3, 2, 2)], id="pp2-vpp2"),
    ],
)
def test_a_plan_means_the_same_layers_under_any_split(size, layout, splits):
    plan = {
        "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": [0, 5]}]},
        "recompute_config": {"select_recompute": {"mlp": [5]}},
    }
    for rank in check(size, layout, splits, plan):
        for one in rank[1:]:
            mine = set(sum(one["layers"], []))
            assert one["touched"] == ({0, 5} & mine, {5} & mine)

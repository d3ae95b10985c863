"""Under a cap on micro-batches in flight, losses and every gradient are bit-identical to Megatron's own schedule, and
the passes run in the order that `mindspeed_mem.schedule.order` gives."""

from __future__ import annotations

import contextlib

import pytest

from tests.worlds import on_ranks, parallel

sweep = pytest.mark.sweep
pytestmark = pytest.mark.distributed

SHARDED = {"use_distributed_optimizer": True}
OVERLAPPED = SHARDED | {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20_000}


def differing(*case, **more) -> list[str]:
    from tests.capped_runs import departures
    from tests.worlds import applied

    with applied("sdpa_attention") if case[0] == "mla" else contextlib.nullcontext():
        return departures(*case, **more)


@pytest.mark.parametrize(
    ("size", "kind", "layout", "model", "cases", "more"),
    [
        pytest.param(2, "dense", {"pp": 2}, {}, [(1, 4), (1, 5), (1, 1), (2, 4)], {"evaluate": True}, id="pp2"),
        pytest.param(4, "dense", {"pp": 4}, {}, [(1, 6), (3, 7), (2, 3), (1, 2)], {}, id="pp4"),
        pytest.param(
            2, "dense", {"pp": 2, "vpp": 2}, {}, [(2, 4), (3, 4), (4, 4), (5, 4)], {"evaluate": True}, id="pp2-vpp2"
        ),
        pytest.param(
            2,
            "dense",
            {"pp": 2, "vpp": 2},
            {"microbatch_group_size_per_vp_stage": 3, "overlap_p2p_comm": False},
            [(2, 6), (3, 5), (5, 6)],
            {},
            id="pp2-vpp2-groups-of-3",
        ),
        pytest.param(4, "dense", {"pp": 4, "vpp": 2}, {"layers": 8}, [(4, 8), (6, 8), (9, 8)], {}, id="pp4-vpp2"),
        pytest.param(3, "dense", {"pp": 3, "vpp": 2}, {"layers": 6}, [(2, 3), (4, 6)], {}, marks=sweep, id="pp3-vpp2"),
        pytest.param(
            2, "swiglu_gqa_rope", {"pp": 2, "vpp": 3}, {"layers": 6, "tied": False}, [(3, 4), (5, 4)], {}, id="vpp3"
        ),
        pytest.param(4, "dense", {"tp": 2, "pp": 2}, {"sequence_parallel": True}, [(1, 4)], {}, id="tp2-sp-pp2"),
        pytest.param(4, "dense", {"pp": 2}, {"ddp": OVERLAPPED}, [(1, 8)], {"evaluate": True}, id="pp2-dp2-overlapped"),
        pytest.param(
            4, "dense", {"pp": 2}, {"ddp": OVERLAPPED}, [(1, 8)], {"align": True}, marks=sweep, id="pp2-dp2-aligned"
        ),
        pytest.param(
            4,
            "dense",
            {"pp": 2, "vpp": 2},
            {"ddp": OVERLAPPED},
            [(3, 8)],
            {},
            marks=sweep,
            id="pp2-vpp2-dp2-overlapped",
        ),
        pytest.param(
            4, "dense", {"pp": 2, "vpp": 2}, {"ddp": OVERLAPPED}, [(3, 8)], {"align": True}, id="pp2-vpp2-dp2-aligned"
        ),
        pytest.param(2, "dropout", {"pp": 2}, {}, [(1, 4)], {}, id="dropout-pp2"),
        # 4 leaves the groups of 2 micro-batches as they are; a smaller cap would have dropout draw other masks.
        pytest.param(2, "dropout", {"pp": 2, "vpp": 2}, {}, [(4, 4)], {}, id="dropout-vpp2"),
        pytest.param(2, "moe", {"pp": 2}, {}, [(1, 4)], {}, marks=sweep, id="moe-pp2"),
        pytest.param(4, "moe", {"pp": 2, "ep": 2}, {}, [(1, 8)], {}, id="moe-pp2-ep2"),
        pytest.param(2, "dense", {"pp": 2}, {"deallocate_pipeline_outputs": True}, [(1, 5)], {}, id="deallocate-pp2"),
        pytest.param(
            4,
            "dense",
            {"pp": 4},
            {"deallocate_pipeline_outputs": True},
            [(2, 5), (3, 3)],
            {},
            marks=sweep,
            id="deallocate-pp4",
        ),
        pytest.param(
            2,
            "dense",
            {"pp": 2, "vpp": 2},
            {"deallocate_pipeline_outputs": True, "tied": False},
            [(3, 4)],
            {},
            id="deallocate-vpp2",
        ),
    ],
)
def test_bit_identical_to_megatrons_schedule(size, kind, layout, model, cases, more):
    assert sum(on_ranks(size, differing, kind, layout, model, cases, **more), []) == []


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    ("size", "kind", "layout", "model", "cases", "more"),
    [
        pytest.param(
            2, "dropout", {"pp": 2}, {}, [(None, 4), (1, 3), (3, 5), (None, 1)], {"evaluate": True}, id="dropout-pp2"
        ),
        pytest.param(
            4, "dense", {"pp": 4}, {"deallocate_pipeline_outputs": True}, [(None, 6), (2, 2), (None, 3)], {}, id="pp4"
        ),
        pytest.param(
            4, "dense", {"tp": 2, "pp": 2}, {"sequence_parallel": True, "layers": 2}, [(None, 4)], {}, id="tp2-sp-pp2"
        ),
        pytest.param(4, "dense", {"pp": 2}, {"ddp": OVERLAPPED}, [(None, 8)], {}, id="pp2-dp2-overlapped"),
        pytest.param(
            4, "dense", {"pp": 2}, {"ddp": OVERLAPPED}, [(None, 8)], {"align": True}, marks=sweep, id="pp2-dp2-aligned"
        ),
        pytest.param(2, "moe", {"pp": 2}, RECOMPUTED, [(None, 4)], {}, id="moe-recomputed-pp2"),
        pytest.param(
            2,
            "dense",
            {"pp": 2},
            {"layers": 3, "pipeline_model_parallel_layout": "Et|ttL"},
            [(None, 3)],
            {},
            id="pp2-uneven",
        ),
        pytest.param(2, "dense", {"pp": 2, "vpp": 2}, {}, [(None, 4), (3, 6)], {"evaluate": True}, id="pp2-vpp2"),
        pytest.param(
            4,
            "dense",
            {"pp": 2, "vpp": 2},
            {"ddp": OVERLAPPED},
            [(None, 8)],
            {"align": True},
            id="pp2-vpp2-dp2-aligned",
        ),
        pytest.param(
            4,
            "dense",
            {"pp": 2, "vpp": 2},
            {"ddp": OVERLAPPED},
            [(None, 8)],
            {},
            marks=sweep,
            id="pp2-vpp2-dp2-overlapped",
        ),
        pytest.param(
            2,
            "mla",
            {"pp": 2},
            {"gradient_accumulation_fusion": True, "tied": False},
            [(None, 4)],
            {},
            marks=sweep,
            id="mla-fused-pp2",
        ),
        pytest.param(
            3,
            "swiglu_gqa_rope",
            {"pp": 3},
            {"layers": 4, "pipeline_model_parallel_layout": "Et|tt|tL"},
            [(None, 5)],
            {},
            marks=sweep,
            id="pp3-uneven",
        ),
    ],
)
def test_gradients_of_weights_in_idle_time_are_bit_identical(size, kind, layout, model, cases, more):
    assert sum(on_ranks(size, differing, kind, layout, model, cases, split=True, **more), []) == []


def bf16(layout: dict, cases: list[tuple[int | None, int]], split: bool) -> list[str]:
    import torch

    return differing("dense", layout, {"dtype": torch.bfloat16}, cases, split=split)


@pytest.mark.parametrize(
    ("layout", "cases", "split"),
    [({"pp": 2, "vpp": 2}, [(2, 4), (4, 6)], False), ({"pp": 2}, [(None, 4)], True)],
    ids=["vpp2", "zb"],
)
def test_bf16(layout, cases, split):
    assert sum(on_ranks(2, bf16, layout, cases, split), []) == []


def per_token(cap: int | None) -> list:
    """Losses that come with numbers of tokens, and gradients that are divided by all of them; groups are given."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.timers import Timers

    from tests.capped_runs import capped
    from tests.models import SEQUENCE, _texts, build_gpt, global_parameters

    def forward_step(batches, model):
        import torch

        text = next(batches)
        positions = torch.arange(SEQUENCE).expand(1, -1)
        output = model(text[:, :-1].contiguous(), positions, None, labels=text[:, 1:].contiguous())

        def loss(output):
            mask = text[:, 1:] % 3 > 0
            total, count = (output.float() * mask).sum(), mask.sum().to(torch.int)
            return total, count, {"loss": total.detach().clone()}

        return output, loss

    with parallel(pp=2), capped(cap):
        chunks = build_gpt("dense", calculate_per_token_loss=True)
        config = chunks[0].config
        config.timers = Timers(log_level=2, log_option="minmax")
        done = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(_texts(range(4), 1)),
            model=chunks[0],
            num_microbatches=4,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            p2p_communicator=P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), config),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(
                ["tp", "cp", "embd", "pos_embd", "pp", "dp_cp"]
            ),
        )
        assert config.timers("forward-backward").active_time() > 0
        return [one["loss"] for one in done], [p.main_grad.clone() for _, p in global_parameters(chunks)]


def test_losses_per_token_and_groups_that_are_given():
    import torch

    for (losses, grads), (own_losses, own_grads) in zip(
        on_ranks(2, per_token, 1), on_ranks(2, per_token, None), strict=True
    ):
        assert len(losses) == len(own_losses) and all(map(torch.equal, losses, own_losses))
        assert all(map(torch.equal, grads, own_grads))


def with_plans(layout: dict, cap: int | None, split: bool, plans: dict) -> list[str]:
    """What differs in any bit from Megatron's schedule without the engine, and plans without effect."""
    from tests.capped_runs import capped, trained
    from tests.swap_runs import difference, left_over, swap

    found = []
    with parallel(**layout):
        plain, _ = trained("swiglu_gqa_rope", {}, 4)
        for name, plan in plans.items():
            with capped(cap, split), swap(plan) as engine:
                results, _ = trained("swiglu_gqa_rope", {}, 4)
                report, left = engine.report(), left_over(engine)
            found += [f"{name}: {what}" for pair in zip(results, plain, strict=True) for what in difference(*pair)]
            found += [f"{name}: left over {left}"] if any(left.values()) else []
            # Gradients of outputs wait after the first passes, of which the peak may be.
            freed = report.bytes_out if name == "output gradients" else report.peak_bytes < report.peak_bytes_without
            found += [] if freed else [f"{name}: freed nothing"]
    return found


@pytest.mark.parametrize(
    ("layout", "cap", "split"),
    [({"pp": 2}, 1, False), ({"pp": 2, "vpp": 2}, 2, False), ({"pp": 2}, None, True)],
    ids=["pp2", "pp2-vpp2", "pp2-zb"],
)
def test_with_swap_and_recompute(layout, cap, split):
    from tests.swap_runs import EVERYTHING, again, entry

    plans = {
        "swap": EVERYTHING,
        "swap, both": entry(layer_swap={"backward_prefetch": 3, "layers": True}, activations="both"),
        "recompute": again({r"mlp": True, r"self_attention\.core_attention": True}),
        "layers": again(recompute=True),
    }
    if split:
        away = {"output_gradients": True, "pp_aware": False}
        plans |= {"output gradients": entry(op_swap=[], **away)}
        plans |= {"all": entry(layer_swap={"backward_prefetch": 3, "layers": True}, **away)}
    assert sum(on_ranks(2, with_plans, layout, cap, split, plans), []) == []

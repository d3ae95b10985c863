"""Experts by choices that the caller gives (moe_enable_routing_replay), beside recompute."""

from __future__ import annotations

import contextlib

import pytest
import torch

from mindspeed_mem.patching import upstream
from tests.swap_runs import again, swap
from tests.worlds import on_ranks, parallel

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not upstream.within("megatron", since="0.16"), reason="nothing is replayed there"),
]


def replayed(plan: dict | None, says_backward: bool) -> list:
    """Losses and gradients of a pipeline whose micro-batches get other experts each, then what a step records."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from tests.models import build_gpt, train_step

    routers = RouterReplay.global_router_replay_instances
    routers.clear()
    with parallel(pp=2), swap(plan) if plan else contextlib.nullcontext():
        (chunk,) = build_gpt("moe", moe_enable_routing_replay=True)
        draw = torch.Generator().manual_seed(3)

        def choose(*_):
            for router in routers:
                router.set_target_indices(torch.stack([torch.randperm(4, generator=draw)[:2] for _ in range(64)]))
                router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

        def backward_next(*_):
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

        hooks = [chunk.register_forward_pre_hook(choose)]
        hooks += [chunk.register_forward_hook(backward_next)] if says_backward else []
        steps = [train_step([chunk])]
        left = {len(router.replay_backward_list) for router in routers}
        for hook in hooks:
            hook.remove()
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        steps.append(train_step([chunk], step=1))
        recorded = [router.get_recorded_indices() for router in routers]
        routers.clear()
    found = [one for step in steps for one in (*step.losses, *step.grads.values())]
    return [[*found, *recorded], left]


@pytest.mark.parametrize("says_backward", [False, True], ids=["forward only", "as for Megatron's recompute"])
def test_what_runs_again_takes_the_experts_of_its_own_micro_batch(says_backward):
    plain = on_ranks(2, replayed, None, says_backward)
    for plan in (again(recompute=True), again([r"mlp\.router"])):
        for mine, stock in zip(on_ranks(2, replayed, plan, says_backward), plain, strict=True):
            assert all(map(torch.equal, mine[0], stock[0]))
            assert mine[1] == ({0} if says_backward else {4})

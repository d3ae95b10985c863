"""Ranks that run collectives together find the same: an operator runs again on all of them, or on none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.swap_runs import again
from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed


def step(plan: dict[str, Any]) -> tuple[list, list[str], int]:
    """Two steps, in which the second layer's MLP draws by itself on rank 1 alone; also how often its input came in."""
    import torch.distributed as dist

    from tests.models import build_gpt, train_step
    from tests.swap_runs import listening, swap

    with parallel(tp=2), listening() as said, swap(plan):
        chunks = build_gpt("swiglu_gqa_rope", layers=2)
        mlp = chunks[0].module.decoder.layers[1].mlp
        noise, first, runs = torch.Generator().manual_seed(3), mlp.linear_fc1.forward, 0

        def changed(x: torch.Tensor):
            nonlocal runs
            runs += 1
            hidden, bias = first(x)
            if dist.get_rank():  # backward needs it, but the other rank sees nothing of it
                hidden = hidden + (hidden * torch.rand(hidden.shape, generator=noise)).mul(0)
            return hidden, bias

        mlp.linear_fc1.forward = changed
        return [train_step(chunks, step=number, micro_batches=2) for number in range(2)], said, runs


def on_one_rank_alone(plan: dict[str, Any]) -> tuple[list[str], list[str], int]:
    from tests.swap_runs import difference

    without, _, _ = step({"swap_config": {"swap": False}})
    results, said, runs = step(plan)
    return [what for one, other in zip(results, without, strict=True) for what in difference(one, other)], said, runs


def test_what_does_not_repeat_itself_on_one_rank_is_kept_on_all_that_share_its_collectives():
    found = on_ranks(2, on_one_rank_alone, again(["mlp"]), timeout=90)
    for (wrong, said, runs), why in zip(found, ("on another rank", "run again, it gives other values"), strict=True):
        assert wrong == []
        assert [line for line in said if "recompute has no effect on mlp in layer 1" in line and why in line]
        assert not any("layer 0" in line for line in said)
        assert runs == 2 * 2 + 2, "each micro-batch once, and the trial, with torch's generators elsewhere and as then"

"""Ranks of one expert-parallel group repeat the same collectives, whatever tokens each of them got."""

from __future__ import annotations

import pytest

from tests.worlds import on_ranks

PLANS = (
    {"recompute_config": {"select_recompute": [r"mlp\.dispatch"]}},
    {"recompute_config": {"select_recompute": ["mlp"]}},
    {"recompute_config": {"recompute": True}},
    {"recompute_config": {"select_recompute": [".*", r".*\..*", r".*\..*\..*"]}},
)


def _all_tokens_to_rank_0(chunks) -> None:
    """The router prefers experts 0 and 1, which are rank 0's, for every token."""
    import torch

    for name, parameter in chunks[0].named_parameters():
        if name.endswith("router.weight"):
            with torch.no_grad():
                parameter.zero_()
    for module in chunks[0].modules():
        if type(module).__name__ == "TopKRouter":
            routing = module.routing
            bias = torch.tensor([2.0, 1.0, -8.0, -8.0])
            module.routing = lambda logits, *a, _routing=routing, _bias=bias, **k: _routing(logits + _bias, *a, **k)


def _differences(dispatcher: str):
    from tests import models, swap_runs
    from tests.worlds import parallel

    found = {}
    with parallel(ep=2):
        chunks = models.build_gpt("moe", moe_token_dispatcher_type=dispatcher)
        _all_tokens_to_rank_0(chunks)
        plain = models.train_step(chunks)
        for number, plan in enumerate(PLANS):
            with swap_runs.swap(plan):
                chunks = models.build_gpt("moe", moe_token_dispatcher_type=dispatcher)
                _all_tokens_to_rank_0(chunks)
                found[number] = swap_runs.difference(models.train_step(chunks), plain)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_a_rank_without_tokens_takes_part(dispatcher):
    for found in on_ranks(2, _differences, dispatcher, timeout=90):
        assert not any(found.values()), found

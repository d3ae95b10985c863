"""Ranks of one expert-parallel group repeat the same collectives, whatever tokens each of them got, into any buffer."""

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


def _with_raw_collectives(plans: dict) -> list[str]:
    """Collectives that write as NCCL does: into memory, without raising a version."""
    import torch
    from megatron.core.tensor_parallel import mappings

    from tests.swap_runs import mismatches

    names = ("dist_all_gather_func", "dist_reduce_scatter_func")
    originals = {name: getattr(mappings, name) for name in names}
    for name, original in originals.items():

        def raw(output, given, group=None, original=original, **kwargs):
            result = torch.empty_like(output)
            original(result, given.clone(), group=group, **kwargs)
            output.detach().numpy()[...] = result.numpy()

        setattr(mappings, name, raw)
    try:
        model = {"kind": "moe", "moe_token_dispatcher_type": "allgather"}
        return mismatches(plans, {"ep": 2}, model, micro_batches=4, steps=1)
    finally:
        for name, original in originals.items():
            setattr(mappings, name, original)


@pytest.mark.distributed
def test_nothing_is_made_again_from_a_buffer_that_all_layers_share():
    dispatch = [r"mlp\.dispatch\.postprocess"]
    plans = {
        "maybe postprocess": {"recompute_config": {"select_recompute": dispatch}},
        "maybe dispatch": {"recompute_config": {"select_recompute": [r"mlp\.dispatch"]}},
        "maybe whole layers": {"recompute_config": {"recompute": True}},
        "maybe inputs swapped": {
            "swap_config": {"swap": True, "swap_recompute_inputs": True, "op_swap": []},
            "recompute_config": {"select_recompute": dict.fromkeys(dispatch, True)},
        },
    }
    assert on_ranks(2, _with_raw_collectives, plans) == [[], []]

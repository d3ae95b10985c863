"""Plans on plain models that are wrapped for several ranks."""

from itertools import product

import pytest

from tests.attachment import rank_cases
from tests.worlds import on_ranks

CASES = [("ddp", "mixed", True), ("fsdp", "whole", False), ("nested", "mixed", True)]
CASES += [("operators", "parts", False), ("fsdp1", "saved", False), ("fsdp1_by_names", "whole", False)]
OTHERS = product(rank_cases.WRAPPERS, rank_cases.PLANS, (True, False))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("wrapper", "plan", "first"),
    CASES + [pytest.param(*one, marks=pytest.mark.sweep) for one in OTHERS if one not in CASES],
)
@pytest.mark.needs_torch("2.7", "FSDP2 does not run on a CPU")
def test_bits_are_the_same(wrapper, plan, first):
    for same, moved, left, names, trains in on_ranks(2, rank_cases.equal, wrapper, plan, first):
        assert same and moved and left == 0 and names == ["blocks"] and trains


@pytest.mark.distributed
@pytest.mark.parametrize(
    "wrapper", ["ddp", pytest.param("fsdp", marks=pytest.mark.sweep), pytest.param("nested", marks=pytest.mark.sweep)]
)
@pytest.mark.needs_torch("2.7", "FSDP2 does not run on a CPU")
def test_compiled_layers_are_made_again_by_what_was_compiled(wrapper):
    for same, again, compiled in on_ranks(2, rank_cases.made_again_compiled, wrapper):
        assert same and again == 3 and compiled <= (wrapper == "nested")  # for FSDP2's own hooks in it


SWAP = {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 2, "layers": True}]}}
WHOLE = {"recompute_config": {"recompute": True}}
PARTS = {
    "swap_config": {"swap": True, "op_swap": [{"op_name": "fc1", "backward_prefetch": 1, "layers": True}]},
    "recompute_config": {"select_recompute": {"norm[12]": True, "q": [0]}},
}
SPLIT = [("gpt", PARTS, None, {"tp": 2}), ("gpt", WHOLE, None, {"dp": 2})]
SPLIT += [
    pytest.param(name, plan, layers, axes, marks=pytest.mark.sweep)
    for name, plan, layers, axes in (
        *(("gpt", plan, None, axes) for plan in (SWAP, WHOLE, PARTS) for axes in ({"tp": 2}, {"dp": 2})),
        *(("resnet", plan, ["layer1", "layer2"], {"dp": 2}) for plan in (SWAP, WHOLE)),
    )
]


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "plan", "layers", "axes"), SPLIT)
@pytest.mark.needs_torch("2.13", "DTensor's rules")
def test_models_split_by_strategies(name, plan, layers, axes):
    for same, moved, again, peak, left in on_ranks(2, rank_cases.equal_split, name, plan, layers, axes):
        assert same and left == 0 and peak < 0.95
        assert bool(moved) == ("swap_config" in plan) and bool(again) == ("recompute_config" in plan)

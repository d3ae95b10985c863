"""Plans on plain models that are wrapped for several ranks."""

from itertools import product

import pytest

from tests.attachment import rank_cases
from tests.worlds import on_ranks

CASES = [("ddp", "mixed", True), ("fsdp", "whole", False), ("nested", "mixed", True)]
OTHERS = product(rank_cases.WRAPPERS, rank_cases.PLANS, (True, False))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("wrapper", "plan", "first"),
    CASES + [pytest.param(*one, marks=pytest.mark.sweep) for one in OTHERS if one not in CASES],
)
def test_bits_are_the_same(wrapper, plan, first):
    for same, moved, left, names, trains in on_ranks(2, rank_cases.equal, wrapper, plan, first):
        assert same and moved and left == 0 and names == ["blocks"] and trains

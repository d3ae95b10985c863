"""The ranks that tests run on report what goes wrong on them, and are replaced when they hang or die."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.worlds import RankError, on_ranks

pytestmark = pytest.mark.distributed


def summed(value: int) -> torch.Tensor:
    total = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    return total


def test_every_rank_returns_its_result():
    assert [int(one) for one in on_ranks(2, summed, 5)] == [15, 15]
    assert [int(one) for one in on_ranks(1, summed, 5)] == [5]
    assert [int(one) for one in on_ranks(4, summed, 1)] == [10] * 4


def fails_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("of rank", rank)


def test_an_exception_is_raised_here_with_its_traceback():
    with pytest.raises(RankError, match=r"rank 1 of 2:(.|\n)*in fails_on(.|\n)*KeyError: \('of rank', 1\)"):
        on_ranks(2, fails_on, 1)
    assert int(on_ranks(2, summed, 1)[0]) == 3


def dies_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("last words", flush=True)
        os._exit(3)


def test_a_rank_that_dies_is_replaced():
    with pytest.raises(RankError, match=r"rank 1 died \(3\)(.|\n)*last words"):
        on_ranks(2, dies_on, 1)
    assert int(on_ranks(2, summed, 1)[0]) == 3


def sleeps_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)


def test_a_rank_that_hangs_is_replaced_and_tells_where_it_was():
    on_ranks(2, summed, 1)
    with pytest.raises(RankError, match=r"rank 0 did not answer in time(.|\n)*in sleeps_on"):
        on_ranks(2, sleeps_on, 0, timeout=1)
    assert int(on_ranks(2, summed, 1)[0]) == 3

"""Random models, plans, training loops and users' code against plain training: the same bits, nothing left over.

The same cases every time, few of them; `make test TESTS=tests/fuzz PYTEST_ARGS="--fuzz 1000 --fuzz-seed 7"` for others.
"""

from __future__ import annotations

import logging

import hypothesis
import pytest

from tests.worlds import on_ranks

FEW = {1: 8, 2: 3}


def search(examples: int, seed: int | None, pipeline: bool) -> None:
    """Look for a case that differs; hypothesis makes it as small as it can and raises."""
    import torch.distributed as dist

    from mindspeed_mem.plan import MemoryConfigError
    from tests.fuzz.cases import cases, differences

    logging.getLogger("mindspeed_mem").setLevel(logging.ERROR)

    @hypothesis.settings(
        max_examples=examples,
        derandomize=seed is None,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(cases(pipeline))
    def check(case):
        try:
            found = differences(case)
        except MemoryConfigError:  # entries that contradict each other
            hypothesis.reject()
        except Exception as error:  # all ranks must go on alike, or hypothesis leads them to different cases
            found = [f"{type(error).__name__}: {error}"]
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        assert not any(everyone), "\n".join([repr(case), *map(repr, everyone)])

    if seed is not None:
        check = hypothesis.seed(seed)(check)
    try:
        check()
    finally:
        logging.getLogger("mindspeed_mem").setLevel(logging.NOTSET)


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_any_plan_on_any_model_trains_as_without(ranks, pytestconfig):
    few = pytestconfig.getoption("--fuzz") is None
    examples = FEW[ranks] if few else pytestconfig.getoption("--fuzz")
    seed = None if few else pytestconfig.getoption("--fuzz-seed")
    on_ranks(ranks, search, examples, seed, ranks > 1, timeout=600 if few else 36000)

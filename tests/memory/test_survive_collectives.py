"""--survive-oom where ranks exchange tensors while memory is short: all come through, with the same bits.

What gloo copies in the calling thread lies in the limited memory, and a collective cannot run again.
"""

from __future__ import annotations

import pytest

from tests.worlds import on_ranks, parallel

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("limited_memory")]


def exchanging(kind: str, layout: dict, shares: tuple, **model) -> list[str]:
    """Every rank has these shares of the memory that a step needs beyond parameters, gradients and optimizer."""
    from tests.limited_runs import Training, counted, different, surviving

    found = []
    with counted() as memory:
        with parallel(**layout):
            training = Training(memory, kind, **model)
            expected = [training.step() for _ in range(3)]
            peak = training.peak
        del training
        for share in shares:
            with surviving() as engine, parallel(**layout):
                training = Training(memory, kind, **model)
                training.step()
                for number in (1, 2):
                    result = training.step(above=int(share * peak))
                    found += [f"{share}, step {number}: {name}" for name in different(result, expected[number])]
                if not engine.mover.evictions:
                    found.append(f"{share}: memory was not short")
    return found


@pytest.mark.needs_torch("2.13", "gloo takes memory in a thread of its own while it reduces and scatters")
def test_sequence_parallel():
    model = {"layers": 3, "sequence_parallel": True}
    assert on_ranks(2, exchanging, "dense", {"tp": 2}, (0.9, 0.8, 0.6, 0.4), **model, timeout=60) == [[], []]


def test_gradients_reduced_and_scattered_while_backward_runs():
    sharded = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 20_000}
    model = {"layers": 3, "micro_batches": 1, "ddp": sharded}
    assert on_ranks(2, exchanging, "moe", {}, (0.8, 0.7), **model, timeout=60) == [[], []]


def onednn_stays_on() -> tuple[list[str], bool]:
    import torch

    found = exchanging("moe", {}, (0.4, 0.3), layers=3, micro_batches=4, dtype=torch.bfloat16)
    return found, torch._C._get_mkldnn_enabled()


def test_bf16_products_are_all_computed_by_the_same_kernels():
    """torch takes oneDNN's lack of memory for a defect, and would go on with other kernels."""
    assert on_ranks(1, onednn_stays_on) == [([], True)]

"""Chunk ZeRO, optimizers in several places, Gemini and optimizers in parallel on the accelerator: the same bits under
lags, no wait that Megatron has not, and no allocation in a steady state.

Where a wait that is left out is found: those of `shard_memory.WAITS` and `swapped.WAITS` on the simulated device
(tests/asynchrony); all others here, in `LEFT_OUT`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch

from mindspeed_mem.device import get_backend
from mindspeed_mem.device.accelerator import AcceleratorBackend
from mindspeed_mem.zero.core import arrival
from mindspeed_mem.zero.core.chunk import Chunk, Piece
from mindspeed_mem.zero.core.gradients import GradientShards
from mindspeed_mem.zero.core.shard_memory import HostStore
from mindspeed_mem.zero.optimizer.swapped import SwappedStep
from tests.accelerator.lags import under
from tests.chunk_runs import OVERLAP, Case, differences, trained
from tests.models import DEVICE
from tests.numerics.test_chunk_placement import OF_TYPE, resting
from tests.worlds import RankError, on_ranks

pytestmark = pytest.mark.distributed

SHARED_BESIDE = {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True}

# ---- waits left out


class Alone:
    """A group of one rank."""

    size, rank = (lambda self: 1), (lambda self: 0)


def on_two_streams(reason: str | None) -> None:
    """A chunk that one stream has gathered and another reads; then the memory is used again. `reason`: not waited for."""
    backend, elements, original = get_backend(DEVICE), 4096, AcceleratorBackend.wait

    def wait(self, stream, event, why):
        if why != reason:
            original(self, stream, event, why)

    main, side = backend.current_stream(), backend.new_stream("side")
    with mock.patch.object(AcceleratorBackend, "wait", wait):
        for home, other in ((main, side), (side, main)):
            with backend.on_stream(home):
                whole = torch.arange(float(elements), device=DEVICE)
                param = torch.nn.Parameter(torch.empty(0, device=DEVICE))
                param.data = whole.view(elements)
                chunk = Chunk(0, [(param, Piece(0, elements))], whole, None, Alone())
                chunk.keep_shard()
                chunk.gather()
                chunk.wait()
            with backend.on_stream(other):
                chunk.wait()
                total = param.detach().sum()
            with backend.on_stream(home):
                chunk.release()
                torch.zeros(elements, device=DEVICE)
            backend.synchronize()
            assert total.item() == elements * (elements - 1) / 2


def test_streams_that_read_gathered_parameters_wait_for_each_other():
    on_ranks(1, on_two_streams, None, device="cuda")
    on_ranks(1, on_two_streams, None, device="npu")


@pytest.mark.parametrize("reason", [arrival.READ_AFTER_GATHER, arrival.FREE_AFTER_READ])
def test_each_wait_between_streams_is_missed(reason):
    with pytest.raises(RankError, match="race"):
        on_ranks(1, on_two_streams, reason, device="cuda")

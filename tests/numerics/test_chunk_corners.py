"""What a script may do between passes, and where `auto` begins, changes no bit of training in chunks either."""

from __future__ import annotations

import contextlib

import pytest
import torch

from mindspeed_mem.zero.buffers import runtime
from mindspeed_mem.zero.core.placement import placement
from tests.chunk_runs import Case, Failure, built, chunked, differences, failing_once, passed, stepped
from tests.limited_runs import counted
from tests.models import DEVICE, SEQUENCE
from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed

ROOM = 20 * 2**20


@contextlib.contextmanager
def limited():
    """Device memory that `auto` can count with."""
    with counted() as memory:
        memory.limit = memory.allocated + ROOM
        yield


@contextlib.contextmanager
def handles_in_lists():
    """Reductions leave a list of handles, one for each bucket of a group, as MindSpeed's do, and wait for all of it."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    start, finish = Group.start_grad_sync, Group.finish_grad_sync

    def start_grad_sync(self, *args, **kwargs):
        start(self, *args, **kwargs)
        if self.grad_reduce_handle is not None and not isinstance(self.grad_reduce_handle, list):
            self.grad_reduce_handle = [self.grad_reduce_handle]

    def finish_grad_sync(self, *args, **kwargs):
        if self.is_first_batch:
            self.start_grad_sync()
        for handle in self.grad_reduce_handle:
            handle.wait()
        self.grad_reduce_handle, self.param_gather_dispatched = None, False

    Group.start_grad_sync, Group.finish_grad_sync = start_grad_sync, finish_grad_sync
    try:
        yield
    finally:
        Group.start_grad_sync, Group.finish_grad_sync = start, finish


def resting(policy, **more):
    return {"settings": {"placement": placement(policy)}, "stages": (3,), **more}


def loads_its_own_state(step, models, optimizer):
    if step == 1:
        models[0].load_state_dict(models[0].state_dict())
        optimizer.reload_model_params()


def is_called_directly(step, models, optimizer):
    """Before the first pass and later; not more is gathered than the budget allows."""
    text = torch.zeros(2, SEQUENCE, dtype=torch.long)
    with torch.no_grad():
        models[0](text, torch.arange(SEQUENCE).unsqueeze(0).expand(2, -1), None, labels=text)
    now = runtime.current()
    if now is not None:
        gathering = now.gathering
        assert gathering.budget is not None
        assert gathering.live_bytes <= gathering.budget < sum(chunk.nbytes for chunk in gathering.chunks)


def evaluates_first(step, models, optimizer):
    if step == 0:
        passed(models, Case(), 50, forward_only=True)


def fails_at_first(step, models, optimizer):
    """The first two passes are broken off: `auto` learns nothing from them."""
    layers = [module for module in models[0].modules() if type(module).__name__ == "TransformerLayer"]
    if step < 2:
        with pytest.raises(Failure), failing_once(layers[1], in_backward=step == 1):
            passed(models, Case(), 70 + step)
        now = runtime.current()
        if now is not None and step == 1:
            assert all(one.on_host for one in now.resting), "settled by passes that failed"


CASES = {
    "loads its own state": {
        "device": Case(during=loads_its_own_state, **resting("device")),
        "host": Case(during=loads_its_own_state, **resting("host")),
    },
    "is called directly": {
        "device": Case(during=is_called_directly, deviates=True, **resting("device")),
        "host": Case(during=is_called_directly, deviates=True, **resting("host")),
    },
    "another package's reductions": {
        "handles in lists": Case(beneath=(handles_in_lists,), ddp={"overlap_grad_reduce": True}),
    },
    "auto": {
        "with a budget": Case(beneath=(limited,), steps=4, **resting("auto:200KiB")),
        "evaluates first": Case(beneath=(limited,), steps=4, during=evaluates_first, **resting("auto")),
        "fails at first": Case(beneath=(limited,), steps=4, during=fails_at_first, **resting("auto")),
    },
}


@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
def test_two_ranks(cases):
    assert on_ranks(2, differences, cases) == [[], []]


def configured(more):
    """Losses, norms, and how often chunks were gathered; `more` is asked for as well after the first step."""
    import mindspeed_mem.megatron_adaptor as mem

    asked = {"device": "cpu", "chunk_zero_stage": 3, "placement_policy": "host", "min_chunk_size_mib": 0.03}
    case, found = Case(), []
    mem.configure(asked)
    try:
        with parallel():
            models, optimizer = built(case)
            for step in range(3):
                found.append((passed(models, case, step), stepped(optimizer)))
                if step == 0 and more:
                    mem.configure(asked | more)
        counts = runtime.current().gathering.counts
        return found, counts.gathers, counts.ahead
    finally:
        mem.configure({})


def test_a_second_configuration_that_leaves_chunks_as_they_are():
    assert on_ranks(2, configured, {"device_memory_gib": 2}) == on_ranks(2, configured, {})


def gradients_of_no_transformer(stage):
    """Of two linear layers in Megatron's data parallel wrapper, whose config says nothing of a hidden size."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    with parallel(), contextlib.nullcontext() if stage is None else chunked(stage):
        torch.manual_seed(1)
        layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)).to(DEVICE)
        config = TransformerConfig(num_layers=1, num_attention_heads=1)
        model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), layers)
        model(torch.ones(2, 8, device=DEVICE)).sum().backward()
        model.finish_grad_sync()
        return [parameter.main_grad.cpu().flatten() for parameter in layers.parameters()]


def test_what_is_no_transformer():
    [expected] = on_ranks(1, gradients_of_no_transformer, None)
    [found] = on_ranks(1, gradients_of_no_transformer, 2)
    assert all(map(torch.equal, found, expected)) and len(found) == 4

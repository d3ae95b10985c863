"""Where chunks rest changes no bit of training with the device's arithmetic, and little with the host's."""

from __future__ import annotations

import pytest
import torch

from mindspeed_mem.device import get_backend, host_memory
from mindspeed_mem.zero.buffers import runtime
from mindspeed_mem.zero.buffers.runtime import BudgetError, HostMemoryError
from mindspeed_mem.zero.buffers.settings import ChunkSettings
from mindspeed_mem.zero.core.placement import Placement, placement
from tests.chunk_runs import Case, built, chunked, differences, passed, stepped, trained
from tests.guarding import settled
from tests.limited_runs import counted
from tests.swap_runs import listening
from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed

SCALED = {"initial_loss_scale": 2.0**16, "hysteresis": 1, "loss_scale_window": 2}
OF_TYPE = {
    "bf16": {},
    "fp32": {"dtype": torch.float32},
    "fp16": {"dtype": torch.float16, "optimizer": SCALED, "model": {"fp16": True}},
}


def resting(policy, **more):
    return {"placement": placement(policy), **more}


def close(cases, stages, exact=False):
    """Where losses and norms are further from Megatron's than rounding explains, or at all."""
    found = []
    for name, case in cases.items():
        expected = trained(0, case)
        for stage in stages:
            run = trained(stage, case)
            found += run.problems
            if exact and run.numbers() != expected.numbers():
                found.append(f"{name}, stage {stage}: not the same bits")
            for mine, theirs in zip(run.losses + run.norms, expected.losses + expected.norms, strict=True):
                if (mine is None) != (theirs is None) or (mine is not None and abs(mine - theirs) > 2e-3 * abs(theirs)):
                    found.append(f"{name}, stage {stage}: {run.losses}, {run.norms} instead of {expected}")
    return found


def test_the_device_steps_what_rests_on_the_host():
    cases = {
        f"{name}, {policy}": Case(settings=resting(policy), **of_type)
        for name, of_type in OF_TYPE.items()
        for policy in ("host", "static:0.5")
        if (name, policy) != ("fp32", "host")
    }
    assert on_ranks(2, differences, cases) == [[], []]
    one = {"bf16, stage 1": Case(settings=resting("static:1"))}
    assert on_ranks(2, close, one, (1,), True) == [[], []]


def test_the_host_steps_what_rests_there():
    of_host = resting("host", step_on_host=True)
    cases = {name: Case(settings=of_host, **of_type) for name, of_type in OF_TYPE.items()}
    assert on_ranks(2, close, cases, (2, 3)) == [[], []]


def away_from_the_device(cases):
    """As beside an accelerator: what is on the host has its norm, clipping and unscaling done there.

    Megatron's kernels take lists that are not empty, as Apex' do.
    """
    from megatron.core.optimizer import clip_grads

    from mindspeed_mem.patches import chunk_host_gradients as patch

    seen, kernels = [], clip_grads.multi_tensor_applier

    def strict(kernel, overflow, lists, *more):
        assert all(lists), "an empty list of tensors"
        return kernels(kernel, overflow, lists, *more)

    def away(tensor):
        if runtime.current() is None:
            return False
        masters = [m for one in runtime.current().resting for m in one.masters.values()]
        storages = {m.untyped_storage()._cdata for m in masters}
        storages |= {
            one.chunk.grad_shard.untyped_storage()._cdata
            for one in runtime.current().resting
            if one.chunk.grad_shard is not None
        }
        storages |= {m.grad.untyped_storage()._cdata for m in masters if m.grad is not None}
        found = tensor.untyped_storage()._cdata in storages
        seen.append(found)
        return found

    original, patch.away, clip_grads.multi_tensor_applier = patch.away, away, strict
    try:
        return close(cases, (3,)), any(seen) and not all(seen)
    finally:
        patch.away, clip_grads.multi_tensor_applier = original, kernels


def test_gradients_on_the_host_beside_an_accelerator():
    cases = {name: Case(settings=resting("static:0.5"), **OF_TYPE[name]) for name in ("bf16", "fp16")}
    cases |= {f"all of {name}": Case(settings=resting("host"), **OF_TYPE[name]) for name in ("bf16", "fp16")}
    for layout, model in (({"tp": 2}, {"sequence_parallel": True}), ({"pp": 2}, {})):
        cases[f"{layout}"] = Case(settings=resting("static:0.8"), layout=layout, model=model)
    assert on_ranks(2, away_from_the_device, cases) == [([], True)] * 2


def reducing_each(case):
    """Differences, and the most whole gradients there were at any time."""
    from mindspeed_mem.zero.core.chunk import Chunk

    most, original = [], Chunk.open_gradients

    def counting(self):
        original(self)
        running = runtime.current()
        chunks = [chunk for one in running._models for chunk in one.chunks]
        most.append(sum(chunk.has_gradients for chunk in chunks))

    Chunk.open_gradients = counting
    try:
        return close({"each": case}, (2, 3)), max(most)
    finally:
        Chunk.open_gradients = original


def test_gradients_reduced_in_each_micro_batch():
    case = Case(settings={"reduce_each": True}, micro_batches=3, model={"tied": False})
    for found, most in on_ranks(2, reducing_each, case):
        assert found == [] and most <= 2


MODEL = {"hidden": 128, "layers": 4}


def under_a_limit(limit, steps=5):
    """auto: (losses and norms, peaks of the steps, chunks still on the host, budget at first and at last)."""
    case = Case(model=MODEL, settings=resting("auto"))
    with counted() as memory, parallel():
        before, peaks, numbers, budgets = settled(memory), [], [], []
        memory.limit = None if limit is None else before + limit
        with chunked(3 if limit else 0, chunk=case.chunk, **case.settings):
            models, optimizer = built(case)
            for step in range(steps):
                memory.reset_peak()
                numbers.append((passed(models, case, step), stepped(optimizer)))
                peaks.append(memory.peak - before)
                budgets.append(runtime.current().gathering.budget if limit else None)
            on_host = sum(one.on_host for one in runtime.current().resting) if limit else None
            total = len(runtime.current().resting) if limit else None
            del models, optimizer
    return numbers, max(peaks), on_host, total, budgets


def test_auto_takes_the_room_that_there_is():
    """Two limits: more room takes more chunks, and lets more be gathered; bits stay."""
    expected = on_ranks(2, under_a_limit, None)
    found = {limit: on_ranks(2, under_a_limit, limit) for limit in (9 * 2**20, 14 * 2**20)}
    for limit, ranks in found.items():
        assert [rank[0] for rank in ranks] == [rank[0] for rank in expected]
        for _, peak, on_host, total, budgets in ranks:
            assert peak < limit and on_host < total
            assert budgets[0] == budgets[1] < budgets[-1]
        assert ranks[0][4] == ranks[1][4]  # all ranks have one budget
    tight, roomy = (ranks[0] for ranks in found.values())
    assert roomy[2] < tight[2] and roomy[4][-1] > tight[4][-1]


def refused():
    """What is said of a host, and of a budget, that are too small; and of fp32 masters that cannot move."""
    said = []
    with parallel():
        with chunked(3, placement=Placement("host"), host_limit_bytes=1000), pytest.raises(HostMemoryError) as caught:
            built(Case())
        said.append(str(caught.value))
        with chunked(3, budget=1000):
            models, _ = built(Case())
            with pytest.raises(BudgetError) as caught:
                passed(models, Case(), 0)
            said.append(str(caught.value))
            del models
        with listening() as records, chunked(2, placement=Placement("host")):
            built(Case(dtype=torch.float32))
        said.append(records)
    runtime.use(ChunkSettings())
    return said


def test_what_cannot_be_is_said_before_training():
    for host, budget, warned in on_ranks(2, refused):
        assert "need" in host and "--chunk-host-memory-gib: 1000 bytes" in host
        assert "--placement-policy device:1000" in budget and "Give at least" in budget
        assert warned == [
            "fp32 parameters stay on the device with --chunk-zero-stage below 3: they are their own masters"
        ]


def said_alone():
    """What is said where there is one data-parallel rank."""
    found = []
    with parallel():
        for policy in ("device", "host"):
            with listening() as said, chunked(3, placement=Placement(policy)):
                built(Case())
                built(Case())
            found.append(said)
    return found


def test_one_rank_has_nothing_to_split():
    first = "--chunk-zero-stage 3: there is one data-parallel rank, so nothing is split"
    assert on_ranks(1, said_alone) == [[[first], [f"{first}; only --placement-policy has an effect"]]]


def test_a_host_with_no_room_is_found(monkeypatch):
    monkeypatch.setattr(host_memory, "available", lambda: 10_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    now = runtime.Runtime(ChunkSettings(stage=3, backend=get_backend("cpu"), placement=Placement("host")))
    group = type("Group", (), {"size": lambda self: 2})()
    bucket = type("Bucket", (), {"param_data": torch.empty(1000, dtype=torch.bfloat16)})()
    fields = {"buckets": [bucket], "data_parallel_group": group, "param_dtype": torch.bfloat16}
    with pytest.raises(HostMemoryError, match="9000 bytes.*for 4 ranks: 2500 bytes"):
        now.check_host(now, [type("Buffer", (), fields)()])

"""What chunk ZeRO keeps in memory: gathered parameters within the budget, few whole gradients, nothing after a pass."""

from __future__ import annotations

import gc

import pytest

from tests.chunk_runs import OVERLAP, Case, built, chunked, masters, passed, stepped
from tests.guarding import settled
from tests.limited_runs import counted
from tests.unit.test_use_order import without_order
from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def real_bytes(models, of):
    """Memory that the whole parameters ("whole") or gradients ("grad") of all chunks have now."""
    chunks = [chunk for model in models for chunk in model.chunks_of_model.chunks]
    return sum(getattr(chunk, of).untyped_storage().nbytes() for chunk in chunks)


class Watch:
    """Looks at all chunks whenever a module starts and a gradient is added."""

    def __init__(self, models):
        self.models, self.gathered, self.gradients = models, [], []
        for model in models:
            for module in model.modules():
                module.register_forward_pre_hook(self.look)
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(self.look)

    def look(self, *unused):
        chunks = [chunk for model in self.models for chunk in model.chunks_of_model.chunks]
        self.gathered.append(real_bytes(self.models, "whole"))
        self.gradients.append(sum(chunk.grad.untyped_storage().nbytes() > 0 for chunk in chunks))


def within(budgets, case):
    """Train with each budget; what was found wrong, and the numbers of gathers of the last step."""
    from mindspeed_mem.zero.buffers import runtime
    from mindspeed_mem.zero.buffers.runtime import BudgetError

    wrong, numbers, expected = [], [], None
    with parallel(**case.layout):
        for budget in budgets:
            with chunked(3, chunk=case.chunk, budget=budget):
                models, optimizer = built(case)
                gathering = runtime.current().gathering
                watch = Watch(models)
                for step in range(3):
                    before = gathering.counts.gathers
                    passed(models, case, step, forward_only=step == 1)
                    if real_bytes(models, "whole") or gathering.live_bytes:
                        wrong.append(f"budget {budget}: gathered after pass {step}")
                    if step != 1:
                        stepped(optimizer)
                    if real_bytes(models, "grad"):
                        wrong.append(f"budget {budget}: whole gradients after step {step}")
                numbers.append(gathering.counts.gathers - before)
                peak, limit = max(watch.gathered), gathering.budget
                if not 0 < peak <= gathering.counts.peak_bytes <= limit or gathering.counts.over_budget:
                    wrong.append(f"budget {budget}: {peak} bytes, {gathering.counts}, {limit}")
                found = masters(optimizer)
                expected = expected or found
                wrong += [f"budget {budget}: other numbers"] * (found != expected)
                least = limit - max(chunk.nbytes for chunk in gathering.chunks) if budget is None else None
                del models, optimizer, watch
                gc.collect()
            if budget is None:
                budgets += [least, 2 * least, 10**9]
                with chunked(3, chunk=case.chunk, budget=least - 1):
                    models, _ = built(case)
                    for _ in range(2):  # whoever goes on is told again
                        with pytest.raises(BudgetError, match=f"at least {least} bytes"):
                            passed(models, case, 0)
                    del models, _
                    gc.collect()
    return wrong, numbers


@pytest.mark.parametrize(
    "case",
    [Case(), Case("moe", ddp=OVERLAP, micro_batches=1), Case("swiglu_gqa_rope", chunk=4096, model=FULL)],
    ids=["dense", "experts", "small chunks, recomputed"],
)
def test_gathered_bytes_stay_within_the_budget(case):
    for wrong, numbers in on_ranks(2, within, [None], case):
        assert wrong == []
        default, least, twice, endless = numbers
        assert endless <= twice <= default <= least
        assert endless < least


def most_gradients(stage, case):
    """The most chunks whose gradient was whole at once in one backward, and how many there are."""
    with parallel(**case.layout), chunked(stage, chunk=case.chunk):
        models, optimizer = built(case)
        passed(models, case, 0)
        stepped(optimizer)
        watch = Watch(models)
        passed(models, case, 1)
        return max(watch.gradients), len(models[0].chunks_of_model.chunks)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("ddp", [{}, OVERLAP], ids=["", "overlap"])
def test_few_gradients_are_whole_at_once(stage, ddp):
    case = Case(chunk=40000, micro_batches=1, ddp=ddp, model={"layers": 8, "tied": False})
    for most, there_are in on_ranks(2, most_gradients, stage, case):
        assert most <= 2 < there_are / 2


def gathers_of_a_step(case, budget):
    from mindspeed_mem.zero.buffers import runtime

    with parallel(**case.layout), chunked(3, chunk=case.chunk, budget=budget):
        models, _ = built(case)
        passed(models, case, 0)
        before = runtime.current().gathering.counts.gathers
        passed(models, case, 1)
        counts = runtime.current().gathering.counts
        layer = sum(param.numel() for param in models[0].module.module.decoder.layers[0].parameters())
        return counts.gathers - before, 2 * layer, counts.over_budget


def test_recomputation_gathers_nothing_again():
    case, recomputed = Case(model={"layers": 6}), Case(model={"layers": 6, **FULL})
    layer = on_ranks(2, gathers_of_a_step, case, None)[0][1]
    budget = 2 * layer
    without, again = (on_ranks(2, gathers_of_a_step, one, budget) for one in (case, recomputed))
    assert [one[::2] for one in without] == [one[::2] for one in again]
    assert again[0][2] == 0


def compared(case):
    """On this rank: gathers of a step, and what they would be if the oldest, or the least recently used, went first."""
    from mindspeed_mem.zero.buffers import runtime

    with parallel(**case.layout), chunked(3, chunk=case.chunk):
        models, _ = built(case)
        gathering = runtime.current().gathering
        sizes = {chunk.index: chunk.nbytes for chunk in gathering.chunks}
        slots = 6
        gathering_use, sequence = gathering.order.use, []

        def use(chunks):
            sequence.extend(chunks)
            gathering_use(chunks)

        passed(models, case, 0)
        gathering.order.use = use
        gathering.budget = slots * max(sizes.values())
        before = gathering.counts.gathers
        passed(models, case, 1)
        found = gathering.counts.gathers - before
        deviations = gathering.order.deviations
        return found, *(without_order(sequence, slots, recent) for recent in (False, True)), deviations


@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        (4, Case(layout={"pp": 4}, model={"layers": 16, "tied": False}, micro_batches=8, chunk=30000)),
        (2, Case(layout={"pp": 2, "vpp": 2}, model={"layers": 16, "tied": False}, micro_batches=8, chunk=30000)),
    ],
    ids=["1F1B", "interleaved"],
)
def test_in_pipelines_fewer_gathers_than_without_knowing_the_order(ranks, case):
    found, oldest, least_recent, deviations = on_ranks(ranks, compared, case)[0]
    assert deviations == 0
    assert found < min(oldest, least_recent)


def peaks(stage, budget):
    """The most bytes that one evaluation has allocated in all, and those of the whole parameters."""
    case = Case(model={"layers": 8, "hidden": 128, "tied": False}, micro_batches=1)
    with parallel(), chunked(stage, budget=budget), counted() as memory:
        gc.collect()
        before = settled(memory)
        models, _ = built(case)
        passed(models, case, 0, forward_only=True)
        gc.collect()
        memory.reset_peak()
        passed(models, case, 1, forward_only=True)
        return memory.peak - before, 2 * sum(param.numel() for param in models[0].parameters())


def test_memory_really_is_given_back():
    budget = 600_000
    (two, parameters), (three, _) = (on_ranks(2, peaks, stage, budget)[0] for stage in (2, 3))
    shards = parameters / 2
    assert two - three > 0.95 * (parameters - shards - budget)


def evaluated_within(case):
    """Bytes gathered after a step whose first micro-batch evaluates before it begins."""
    with parallel(), chunked(3, chunk=case.chunk):
        models, _ = built(case)

        def evaluate(*unused):
            handle.remove()
            passed(models, case, 0, forward_only=True)

        handle = models[0].register_forward_pre_hook(evaluate)
        passed(models, case, 0)
        return real_bytes(models, "whole")


def test_nothing_stays_gathered_after_a_step_with_an_evaluation_within_it():
    assert on_ranks(2, evaluated_within, Case()) == [0, 0]

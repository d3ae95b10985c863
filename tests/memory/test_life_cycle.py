"""Nothing is held after a step, an evaluation, an exception, an abandoned forward; steady state allocates nothing."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.worlds import on_ranks, parallel

NOTHING = {"host bytes": 0, "device bytes": 0}


def steps_and_evaluation() -> tuple[dict, list[int], list[str]]:
    from tests.models import build_gpt, train_step
    from tests.swap_runs import EVERYTHING, SDPA, difference, left_over, patched, swap

    def run(engine=None) -> tuple[list, list[int]]:
        results, allocations = [], []
        with parallel():
            chunks = build_gpt("dropout")
            for step in range(4):
                results.append(train_step(chunks, step=step))
                with torch.no_grad():
                    train_step(chunks, step=step, forward_only=True)
                allocations.append(engine.mover.slabs.allocations if engine else 0)
        return results, allocations

    with patched(SDPA):
        without, _ = run()
        with swap(EVERYTHING) as engine:
            results, allocations = run(engine)
            left = left_over(engine)
    return left, allocations, [d for one, other in zip(results, without, strict=True) for d in difference(one, other)]


@pytest.mark.distributed
def test_steady_state_with_evaluation_in_between():
    [(left, allocations, differences)] = on_ranks(1, steps_and_evaluation)
    assert left == NOTHING
    assert allocations[0] > 0
    assert len(set(allocations)) == 1, "host buffers are allocated in the first step only"
    assert differences == []


def broken(where: str) -> tuple[dict, dict, list[str]]:
    """A step that fails half way, then a good one."""
    from tests.models import build_gpt, train_step
    from tests.swap_runs import EVERYTHING, SDPA, difference, left_over, patched, swap

    def fail(*_):
        raise ZeroDivisionError(where)

    def layer(chunks, number):
        return chunks[0].module.decoder.layers[number]

    def run(engine=None):
        with parallel():
            chunks = build_gpt("dense")
            if where == "forward":
                handle = layer(chunks, 2).mlp.linear_fc2.register_forward_pre_hook(fail)
            else:
                handle = layer(chunks, 1).mlp.linear_fc1.register_full_backward_hook(fail)
            try:
                train_step(chunks)
            except ZeroDivisionError as error:
                error.__traceback__ = None
            else:
                raise AssertionError("the step did not fail")
            handle.remove()
            left = left_over(engine) if engine else {}
            return left, train_step(chunks, step=1)

    with patched(SDPA):
        _, without = run()
        with swap(EVERYTHING) as engine:
            left, result = run(engine)
            return left, left_over(engine), difference(result, without)


@pytest.mark.distributed
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_half_way_leaves_nothing_and_the_next_step_is_right(where):
    [(left_then, left, differences)] = on_ranks(1, broken, where)
    assert left_then == NOTHING
    assert left == NOTHING
    assert differences == []


def abandoned() -> tuple[dict, dict]:
    from tests.models import build_gpt
    from tests.swap_runs import EVERYTHING, SDPA, left_over, one_forward, patched, swap

    with patched(SDPA), parallel(), swap(EVERYTHING) as engine:
        chunks = build_gpt("dense")
        loss = one_forward(engine, chunks)
        moved = left_over(engine)
        del loss
        return moved, left_over(engine)


@pytest.mark.distributed
def test_an_abandoned_forward_is_freed_with_its_graph():
    [(while_alive, left)] = on_ranks(1, abandoned)
    assert while_alive["host bytes"] > 0
    assert left == NOTHING


def end_of_forward(plan: dict) -> tuple[int, int, int]:
    """Bytes held on the device after a forward without and with ``plan``, and bytes the plan selects by producer."""
    from mindspeed_mem.activation.observe.meter import ActivationMeter
    from mindspeed_mem.activation.storage.ledger import LEDGER
    from tests.models import build_gpt
    from tests.swap_runs import SDPA, one_forward, patched, swap

    def held(engine, chunks) -> int:
        with ActivationMeter(engine.backend):  # counts the layers that run natively, too
            loss = one_forward(engine, chunks)
        assert loss.requires_grad
        return LEDGER.held.now

    with patched(SDPA), parallel():
        with swap({}, watch_only=True) as engine:
            chunks = build_gpt("swiglu_gqa_rope")
            without, rows = held(engine, chunks), engine.observation.census.storages()
        with swap(plan) as engine:
            chunks = build_gpt("swiglu_gqa_rope")
            with_plan = held(engine, chunks)
            selected = sum(
                r["bytes"] for r in rows if r["layer"] >= 0 and engine.in_force.plan.decision(r["layer"], r["op"])
            )
            assert sum(row.bytes for row in engine.report().moved_by_operator) == selected
    return without, with_plan, selected


@pytest.mark.distributed
@pytest.mark.parametrize("policy", ["default", "everything", "some layers", "operators"])
def test_held_at_the_end_of_forward_falls_by_exactly_what_the_plan_says(policy):
    from tests.swap_runs import POLICIES

    [(without, with_plan, selected)] = on_ranks(1, end_of_forward, POLICIES[policy])
    assert selected > 0
    assert without - with_plan == selected


def budget(limit: int) -> tuple[list[str], dict, list[str]]:
    from tests.models import build_gpt, train_step
    from tests.swap_runs import EVERYTHING, SDPA, difference, patched, swap

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("mindspeed_mem").addHandler(handler)

    def run():
        with parallel():
            return train_step(build_gpt("dense"))

    try:
        with patched(SDPA):
            without = run()
            with swap(EVERYTHING, host_limit=limit) as engine:
                result = run()
                return [m for m in messages if "host budget" in m], engine.report(), difference(result, without)
    finally:
        logging.getLogger("mindspeed_mem").removeHandler(handler)


@pytest.mark.distributed
@pytest.mark.parametrize("limit", [0, 100_000])
def test_beyond_the_host_budget_activations_stay_with_one_warning(limit):
    [(warnings, report, differences)] = on_ranks(1, budget, limit)
    assert len(warnings) == 1 and "--swap-host-memory-gib" in warnings[0]
    assert report.host_peak_bytes <= limit
    assert report.stayed_bytes > 0
    assert (report.bytes_out > 0) == (limit > 0)
    assert differences == []


def one_rank_runs_the_model_first() -> float:
    """Rank 0 calls the model outside of any schedule before the ranks train together."""
    from tests.models import build_gpt, train_step
    from tests.swap_runs import EVERYTHING, SDPA, patched, swap

    with patched(SDPA), parallel(), swap(EVERYTHING) as engine:
        chunks = build_gpt("dense", layers=2)
        if torch.distributed.get_rank() == 0:
            text = torch.arange(32).expand(1, -1)
            chunks[0].module(text, text, None, labels=text)
        loss = train_step(chunks).loss
        assert engine.report().bytes_out > 0
        return loss


@pytest.mark.distributed
def test_a_rank_that_runs_the_model_on_its_own_first_does_not_leave_the_others_waiting():
    first, second = on_ranks(2, one_rank_runs_the_model_first, timeout=60)
    assert first == second


def one_rank_evaluates() -> float:
    """Between two steps rank 0 evaluates with a schedule, without its data parallel wrapper: the others do not."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.models import build_gpt, train_step
    from tests.swap_runs import EVERYTHING, SDPA, patched, swap

    text = torch.arange(32).expand(1, -1)

    def forward_step(_, model):
        return model(text, text, None, labels=text), lambda output: (output.mean(), {"loss": output.mean()})

    with patched(SDPA), parallel(), swap(EVERYTHING):
        chunks = build_gpt("dense", layers=2)
        train_step(chunks, micro_batches=2)
        if torch.distributed.get_rank() == 0:
            with torch.no_grad():
                get_forward_backward_func()(
                    forward_step_func=forward_step,
                    data_iterator=None,
                    model=chunks[0].module,
                    num_microbatches=1,
                    seq_length=32,
                    micro_batch_size=1,
                    forward_only=True,
                )
        return train_step(chunks, micro_batches=2).loss


@pytest.mark.distributed
def test_a_rank_that_evaluates_on_its_own_does_not_leave_the_others_waiting():
    first, second = on_ranks(2, one_rank_evaluates, timeout=60)
    assert first == second


def dead_proxy() -> list[dict]:
    """Something is pinned while the process has a weak proxy to an object that is gone."""
    import weakref

    from tests.memory.test_ownership import pinned

    class Gone:
        pass

    gone = Gone()
    proxy = weakref.proxy(gone)
    del gone
    rows = pinned()
    assert type(proxy) is weakref.ProxyType
    return rows


@pytest.mark.distributed
def test_looking_for_who_pins_a_storage_does_not_stumble():
    assert len(on_ranks(1, dead_proxy)[0]) == 1


def hooks_disabled() -> int:
    from tests.models import build_gpt
    from tests.swap_runs import EVERYTHING, SDPA, one_forward, patched, swap

    with patched(SDPA), parallel(), swap(EVERYTHING) as engine:
        chunks = build_gpt("dense", layers=2)
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            one_forward(engine, chunks).sum().backward()
        return engine.report().bytes_out


@pytest.mark.distributed
def test_where_hooks_are_disabled_everything_runs_natively():
    assert on_ranks(1, hooks_disabled) == [0]


def under_torchs_checkpoint() -> tuple[int, bool]:
    """Whole layers under a non-reentrant checkpoint, whose own hooks must stay innermost."""
    from tests.models import build_gpt
    from tests.swap_runs import EVERYTHING, SDPA, one_forward, patched, swap

    def gradients(engine, chunks) -> list[torch.Tensor]:
        chunks[0].zero_grad_buffer()
        one_forward(engine, chunks).sum().backward()
        return [parameter.main_grad.clone() for parameter in chunks[0].parameters()]

    with patched(SDPA), parallel(), swap(EVERYTHING) as engine:
        chunks = build_gpt("dense", layers=2)
        without = gradients(engine, chunks)
        moved = engine.mover.bytes_out
        for layer in chunks[0].module.decoder.layers:
            run = layer.forward
            layer.forward = lambda *args, run=run, **kwargs: torch.utils.checkpoint.checkpoint(
                run, *args, use_reentrant=False, **kwargs
            )
        same = all(map(torch.equal, gradients(engine, chunks), without))
        return engine.mover.bytes_out - moved, same


@pytest.mark.distributed
def test_a_checkpointed_layer_is_left_to_the_checkpoint():
    assert on_ranks(1, under_torchs_checkpoint) == [(0, True)]


def compiled_layer() -> list[str]:
    """What is said of a plan for two layers of which the second is compiled."""
    from tests.models import build_gpt, train_step
    from tests.swap_runs import EVERYTHING, listening, swap

    with parallel(), swap(EVERYTHING), torch._dynamo.config.patch(disable=False), listening(logging.WARNING) as said:
        chunks = build_gpt("dense", layers=2)
        layer = chunks[0].module.decoder.layers[1]
        layer._compiled_call_impl = torch._dynamo.optimize("eager")(layer._call_impl)  # as `layer.compile()`
        for _ in range(12):
            train_step(chunks, micro_batches=1)
        torch.compiler.reset()
        return said


def test_a_plan_for_a_compiled_layer_is_told_to_have_no_effect():
    [said] = on_ranks(1, compiled_layer)
    [line] = [line for line in said if "the plan has no effect" in line]
    assert "in layer 1: " in line and "nothing of it was seen in 10 training steps" in line

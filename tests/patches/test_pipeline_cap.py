"""What a cap says and refuses, and what happens when a pass fails; the orders themselves are tested in numerics."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed


def said(
    layout: dict, cap: int | None, steps: int = 2, micro_batches: int = 4, split: bool = False, **model
) -> list[str]:
    """The warnings of some training steps and an evaluation."""
    from tests.capped_runs import capped
    from tests.models import build_gpt, train_step
    from tests.swap_runs import listening

    with parallel(**layout), capped(cap, split), listening() as messages:
        chunks = build_gpt("dense", **model)
        for step in range(steps):
            train_step(chunks, step=step, micro_batches=micro_batches, forward_only=step == 1)
    return messages


@pytest.mark.parametrize(
    ("layout", "cap", "why"),
    [
        ({}, 1, "without pipeline stages one micro-batch is in flight"),
        ({"pp": 2}, 2, "no stage of this schedule holds more than 2 micro-batches at once"),
        ({"pp": 2, "vpp": 2}, 5, "no stage of this schedule holds more than 5 passes of one chunk at once"),
    ],
    ids=["pp1", "pp2", "pp2-vpp2"],
)
def test_a_cap_without_effect_is_said_once(layout, cap, why):
    assert on_ranks(2, said, layout, cap, steps=3) == [[f"--max-inflight-microbatches {cap} has no effect: {why}"], []]


def test_idle_time_that_there_is_not_is_said_once():
    (message,) = on_ranks(1, said, {}, None, steps=3, split=True)[0]
    assert message == "--pipeline-schedule zb has no effect: without pipeline stages none idles"


def test_a_cap_with_effect_says_nothing():
    assert on_ranks(2, said, {"pp": 2}, 1) == [[], []]


@pytest.mark.sweep
def test_a_cap_that_is_better_had_without_virtual_stages_is_said_once():
    message, *others = on_ranks(3, said, {"pp": 3, "vpp": 2}, 4, steps=3, micro_batches=12, layers=6)
    assert others == [[], []]
    assert message == [
        "--max-inflight-microbatches 4 over 2 virtual stages idles 38.5%, but 36.8% without virtual stages and a cap "
        "of 2, which holds no more (equal stages, a backward as long as two forwards)"
    ]


def refused(layout: dict, cap: int | None, model: dict, split: bool = False, **call) -> str:
    """What is raised, before anything is sent: the ranks do not even meet."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.capped_runs import capped
    from tests.models import build_gpt

    with parallel(**layout), capped(cap, split):
        chunks = build_gpt("dense")
        for name, value in model.items():
            setattr(chunks[0].config, name, value)
        arguments = {
            "forward_step_func": None,
            "data_iterator": [None] * len(chunks),
            "model": chunks,
            "num_microbatches": 4,
            "seq_length": 32,
            "micro_batch_size": 1,
        }
        try:
            get_forward_backward_func()(**{**arguments, **call})
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("layout", "cap", "model", "call", "words"),
    [
        ({"pp": 2, "vpp": 2}, 1, {}, {}, ["--max-inflight-microbatches 1", "virtual stages", "give 2 or more"]),
        ({"pp": 2}, 1, {"pipeline_dtype": None}, {}, ["pipeline_dtype"]),
        ({"pp": 2}, 1, {}, {"adjust_tensor_shapes_fn": max}, ["adjust_tensor_shapes_fn has to be None"]),
        ({"pp": 2, "vpp": 2}, 3, {}, {"data_iterator": None}, ["data_iterator has to be a list"]),
        ({"pp": 2}, 1, {}, {"p2p_communicator": 1}, ["p2p_communicator", "pg_collection"]),  # Megatron's own words
        ({"pp": 2}, None, {"pipeline_dtype": None}, {"split": True}, ["--pipeline-schedule zb needs pipeline_dtype"]),
        ({"pp": 2, "vpp": 2}, 1, {}, {"split": True}, ["--pipeline-schedule zb: the cap", "virtual stages"]),
    ],
    ids=["cap", "dtype", "shapes", "iterator", "groups", "dtype of zb", "virtual stages of zb"],
)
def test_what_cannot_run_is_refused_on_every_rank(layout, cap, model, call, words):
    for message in on_ranks(2, refused, layout, cap, model, **call):
        assert all(word in message for word in words), message


def one_fails(split: bool) -> tuple[str, float, int]:
    """Stage 1 fails in its second forward; what each rank gets, after how long, and of how many passes gradients of
    weights are still put off."""
    import torch
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from mindspeed_mem.schedule.weight_gradients import WEIGHT_GRADIENTS
    from tests.capped_runs import capped
    from tests.models import SEQUENCE, _texts, build_gpt

    def forward_step(batches, model):
        if dist.get_rank() == 1 and len(seen) == 1:
            raise ValueError("in a pass")
        seen.append(model)
        text = next(batches)
        positions = torch.arange(SEQUENCE).expand(1, -1)
        output = model(text[:, :-1].contiguous(), positions, None, labels=text[:, 1:].contiguous())
        return output, lambda output: (output.mean(), {})

    seen: list = []
    with parallel(pp=2), capped(None if split else 1, split):  # with zb the first pass waits for its weights by then
        chunks = build_gpt("dense")
        begin = time.monotonic()
        try:
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[_texts(range(4), 1)],
                model=chunks,
                num_microbatches=4,
                seq_length=SEQUENCE,
                micro_batch_size=1,
            )
        except Exception as error:
            seconds = time.monotonic() - begin
            dist.destroy_process_group()  # as when the process ends
            return f"{type(error).__name__}: {error}", seconds, WEIGHT_GRADIENTS.clear()
    return "", 0.0, 0


@pytest.mark.parametrize("split", [False, True])
def test_an_exception_leaves_the_failing_rank_at_once(split):
    (_, _, of_first), (error, seconds, of_second) = on_ranks(2, one_fails, split)
    assert error == "ValueError: in a pass"
    assert of_first == of_second == 0
    assert seconds < 20


def trains_again() -> tuple[list[str], bool]:
    """What ends a first training, and whether a second one, in a pipeline made anew, has Megatron's own gradients.

    Both stages fail in a pass: what stage 1 has asked for, and stage 0 has not sent yet, stays on its way.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from tests.capped_runs import capped
    from tests.models import build_gpt, train_step

    def gradients(fails: bool = False) -> dict[str, Any]:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(1, 2)
        model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        chunks = build_gpt("dense")
        passed: list[int] = []

        def hook(*_):
            passed.append(len(passed))
            if fails and len(passed) == 2 - dist.get_rank():
                dist.barrier()  # what has been sent to stage 1 by then is there: else it would wait, and not fail
                raise ValueError("in a pass")

        chunks[0].register_forward_pre_hook(hook)
        return train_step(chunks, micro_batches=4, micro_batch_size=1).grads

    errors: list[str] = []
    with parallel(pp=2):
        with capped(None, split=True):
            try:
                gradients(fails=True)
            except ValueError as error:
                errors.append(str(error))
            found = gradients()
        same = found.keys() == (plain := gradients()).keys() and all(found[one].equal(plain[one]) for one in plain)
    return errors, same


def test_a_pipeline_made_anew_gets_nothing_of_a_run_that_failed():
    assert on_ranks(2, trains_again, timeout=20) == [(["in a pass"], True)] * 2


def grouped() -> list[int]:
    """How many process groups there are after steps of two layouts, each with its pipelines."""
    import torch.distributed as dist

    from tests.capped_runs import capped
    from tests.models import build_gpt, train_step

    counts = []
    for layout in ({"pp": 2}, {"pp": 2, "vpp": 2}):
        with parallel(**layout), capped(2 if "vpp" in layout else 1):
            chunks = build_gpt("dense")
            before = len(dist.distributed_c10d._world.pg_map)
            for step in range(2):
                train_step(chunks, micro_batches=8, step=step)
            counts.append(len(dist.distributed_c10d._world.pg_map) - before)
    return counts


def test_groups_are_made_once():
    """Two pipelines of two stages; each rank keeps those that it is in."""
    assert on_ranks(4, grouped) == [[2, 4]] * 4

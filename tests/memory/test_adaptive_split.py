"""Adaptive runs where gradients of weights are put off: what waits is measured and planned, and no bit changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.sweeping import but
from tests.worlds import on_ranks, parallel

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("limited_memory")]

STEPS = 20


@contextlib.contextmanager
def scheduled(name: str, cap: int | None = None, **layout: Any) -> Iterator[None]:
    """A layout under ``--split-backward`` ("split") or ``--pipeline-schedule``."""
    from mindspeed_mem import features
    from tests.capped_runs import capped
    from tests.split_runs import split
    from tests.v_runs import in_a_v

    if name == "v":
        with in_a_v(cap, **layout):
            yield
    elif name == "zb":
        with capped(cap, split=True), parallel(**layout):
            yield
    else:
        with split(), parallel(**layout):
            features.put_into_force(features.Settings(on=("--split-backward",)))
            try:
                yield
            finally:
                features.put_into_force(features.Settings())


def profiled(name: str, kind: str, layout: dict[str, int], model: dict[str, Any]) -> tuple:
    """The profile of this rank, its passes, and the most bytes that waited in one pass of each model chunk."""
    from megatron.core import parallel_state

    from mindspeed_mem.schedule.weight_gradients import WEIGHT_GRADIENTS
    from tests.limited_runs import Training, counted, surviving
    from tests.memory.test_profiler import profile

    waited: dict[int, int] = {}
    native = WEIGHT_GRADIENTS.run

    def run(key):
        before = WEIGHT_GRADIENTS.waiting()
        native(key)
        chunk = key[1] if isinstance(key, tuple) else 0
        waited[chunk] = max(waited.get(chunk, 0), before - WEIGHT_GRADIENTS.waiting())

    with counted() as memory, surviving() as engine, scheduled(name, **layout):
        training = Training(memory, kind, 4, **model)
        training.step()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        WEIGHT_GRADIENTS.run = run
        try:
            found, passes, _, _ = profile(engine, training, stage=stage)
        finally:
            del WEIGHT_GRADIENTS.run
    return found, passes, waited


SCHEDULES: dict[str, dict[str, int]] = {"split": {}, "zb": {"pp": 2}, "v": {"pp": 2, "vpp": 2}}
LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


@pytest.mark.parametrize("name", but(SCHEDULES, "zb"))
def test_what_waits_is_measured_to_the_byte_and_timed_apart(name):
    from mindspeed_mem.adaptive.problem import from_profile
    from mindspeed_mem.adaptive.problem.checks import problems_of
    from mindspeed_mem.adaptive.problem.definition import Pipeline

    layout = SCHEDULES[name]
    results = on_ranks(layout.get("pp", 1), profiled, name, "dense", layout, {})
    line = Pipeline(micro_batches=4, schedule=name if name != "split" else "1f1b", split_backward=name == "split")
    problem = from_profile.problem([found for found, *_ in results], line, 2**40)
    assert problems_of(problem) == []
    for stage, (found, passes, waited) in enumerate(results):
        chunks = range(len(found.chunks))
        assert {chunk: problem.waiting(stage, chunk) for chunk in chunks} == waited
        ways = ("forward", "backward", "weight")
        assert {one[:3] for one in passes} == {(way, n, chunk) for way in ways for n in range(4) for chunk in chunks}
        for one in passes:
            assert sum([*one.operators.values(), one.before, one.after, one.copies]) == pytest.approx(one.total)
    for kind in problem.classes:
        assert {one.name for one in kind.operators if one.weight_seconds} == set(LINEARS)
        alone = {group.name for group in kind.groups if group.weights_only}
        # its own backward needs what it saved besides, not what it returned
        assert alone >= {"input_layernorm", "pre_mlp_layernorm", "mlp.activation_func"}
        assert all(group.name not in alone for group in kind.groups if not group.weight_bytes)


def moving_output_gradients(name: str, layout: dict[str, int]) -> dict[str, Any]:
    """What this stage is predicted to hold at most with all kept, and with output gradients moved; what it then does;
    and what these plans change of any number."""
    import dataclasses

    from megatron.core import parallel_state

    from mindspeed_mem.adaptive import Search
    from mindspeed_mem.adaptive.problem import from_profile
    from mindspeed_mem.adaptive.problem.definition import Pipeline
    from mindspeed_mem.adaptive.search.plan_file import memory_config
    from mindspeed_mem.ranks import gather
    from tests.limited_runs import Training, counted, different, surviving
    from tests.memory.test_profiler import profile

    with counted() as memory, scheduled(name, **layout):
        expected = Training(memory, "dense", 4, layers=4)
        results = [expected.step() for _ in range(7)]
        del expected
        with surviving() as engine:
            training = Training(memory, "dense", 4, layers=4)
            training.step()
            stage = parallel_state.get_pipeline_model_parallel_rank()
            profiles = gather(profile(engine, training, stage=stage)[0])
            problem = from_profile.problem(profiles, Pipeline(micro_batches=4, schedule=name), 2**40)
            search, peaks, found = Search(problem), [], list[Any]()
            for plan in (search.keep_all, dataclasses.replace(search.keep_all, output_gradients=True)):
                engine.adopt(memory_config(problem, plan), gather, ())
                step = training.step()
                found += different(step, results[training.number - 1])
                peaks.append((search.simulated(plan).peaks[stage], memory.peak))
            moved = max(problem.with_output_gradients().gradients_on_host(stage, part) for part in range(len(layout)))
    return {"peaks": peaks, "differs": found, "moved": moved}


@pytest.mark.parametrize("name", but(("zb", "v"), "zb"))
def test_output_gradients_leave_as_the_planner_takes_them_to(name):
    layout = SCHEDULES[name]
    results = on_ranks(2, moving_output_gradients, name, layout)
    for one in results:
        (kept, there), (predicted, found) = one["peaks"]
        assert one["differs"] == [] and one["moved"] > 0
        assert predicted < kept and found <= there  # the fullest moment of a stage may be in its first forwards
        assert found == pytest.approx(predicted, rel=0.02)
    assert any(found < there for one in results for (_, there), (_, found) in [one["peaks"]])


def beside_transformer_engine() -> tuple:
    from tests.numerics.test_transformer_engine import of_transformer_engine

    return profiled("split", "dense", {}, {"change_spec": of_transformer_engine})


def test_what_layers_delay_by_their_own_means_waits_from_the_loss_on():
    from mindspeed_mem.adaptive.problem import from_profile
    from mindspeed_mem.adaptive.problem.definition import Pipeline

    [(found, _, waited)] = on_ranks(1, beside_transformer_engine)
    problem = from_profile.problem([found], Pipeline(micro_batches=4, split_backward=True), 2**40)
    assert {0: problem.waiting(0, 0)} == waited
    assert problem.stages[0].parts[0].after.weight_bytes > waited[0] // 2


def evaluate(training: Any) -> None:
    """A call without backwards, of the numbers that the next step will have."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.models import SEQUENCE, _texts

    get_forward_backward_func()(
        forward_step_func=training.forward,
        data_iterator=[iter(list(_texts(range(training.micro_batches), 2))) for _ in training.chunks],
        model=training.chunks,
        num_microbatches=training.micro_batches,
        seq_length=SEQUENCE,
        micro_batch_size=2,
        forward_only=True,
    )


def life(name: str, layout: dict[str, int], share: float, cap: int | None, model: dict[str, Any]) -> dict[str, Any]:
    """Steps with an evaluation after each fourth, without the pack's plans and with them: what differs in any bit, and
    what is known in the end."""
    from tests.adaptive_runs import adapting, room_for, told
    from tests.limited_runs import Training, counted, different

    with counted() as memory, scheduled(name, cap, **layout):
        room, expected = room_for(memory, "dense", share, STEPS, micro_batches=4, **model)
        limit = memory.allocated + room
        with adapting() as engine, told() as lines:
            mine = Training(memory, "dense", micro_batches=4, **model)
            mine.total = limit
            found, evicted = [], None
            for number in range(STEPS):
                found += [(number, what) for what in different(mine.step(), expected[number])]
                if number % 4 == 3:
                    evaluate(mine)
                if engine.adaptation.state == "settled" and evicted is None:
                    evicted = engine.mover.evicted_bytes
            planner, report = engine.adaptation.planner, engine.report()
            return {
                "differs": found,
                "state": engine.adaptation.state,
                "survived": engine.mover.evicted_bytes > 0,
                "evicted": None if evicted is None else engine.mover.evicted_bytes - evicted,
                "within": memory.peak <= limit,
                "moved": report.bytes_out + report.recomputed_bytes,
                "line": None if planner is None else planner.problem.pipeline,
                "lines": lines,
            }


@pytest.mark.parametrize(
    ("name", "share", "cap"),
    [
        pytest.param("split", 0.95, None, marks=pytest.mark.sweep),
        pytest.param("zb", 0.93, None, marks=pytest.mark.sweep),
        pytest.param("zb", 0.85, 1, marks=pytest.mark.sweep),
        ("v", 0.9, None),
    ],
)
def test_training_is_bit_identical_and_settles(name, share, cap):
    layout = SCHEDULES[name]
    results = on_ranks(layout.get("pp", 1), life, name, layout, share, cap, {"layers": 4})
    for one in results:
        assert one["differs"] == []
        assert one["state"] == "settled", one["lines"]
        assert one["evicted"] == 0 and one["within"] and one["moved"] > 0
    assert any(one["survived"] for one in results)  # before there was a plan
    line = results[0]["line"]
    assert (line.schedule, line.split_backward, line.cap) == ("1f1b" if name == "split" else name, name == "split", cap)

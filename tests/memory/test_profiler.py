"""What the profiler says of a run: times that add up, bytes that are there, and a run that is none the wiser."""

from __future__ import annotations

import pytest

from tests.guarding import settled
from tests.sweeping import but
from tests.worlds import on_ranks, parallel

CALLS = 3
pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("limited_memory")]


def profile(engine, training, limit: int | None = None, stage: int = 0) -> tuple:
    """Rank profile, passes, results of the steps, and the seconds that the calls took."""
    import time

    from mindspeed_mem.activation.observe.profiler import Profiler
    from mindspeed_mem.device.link_speed import measure_link

    profiler, results, seconds = Profiler(engine), [], 0.0
    for _ in range(CALLS):
        assert not profiler.done
        begin = time.perf_counter()
        profiler.begin_call()
        results.append(training.step(above=limit))
        profiler.end_call(True)
        seconds += time.perf_counter() - begin
    found = profiler.rank_profile(stage, measure_link(engine.backend))
    passes = profiler.passes
    profiler.detach()
    return found, passes, results, seconds


def wrong_times(found, passes, seconds: float, micro_batches: int) -> list[str]:
    """What does not add up."""
    wrong = []
    for one in passes:
        pieces = [*one.operators.values(), one.before, one.after, one.copies]
        if min(pieces) < 0 or abs(sum(pieces) - one.total) > 1e-6:
            wrong.append(f"{one.direction} of {one.micro_batch} on {one.chunk}: {sum(pieces)} of {one.total} s")
    if not 0 < sum(one.total for one in passes) < seconds:
        wrong.append(f"passes of {sum(one.total for one in passes)} s in calls of {seconds} s")
    expected = {
        (direction, number, chunk)
        for direction in ("forward", "backward")
        for number in range(micro_batches)
        for chunk in range(len(found.chunks))
    }
    if {one[:3] for one in passes} != expected:
        wrong.append(f"passes {sorted(one[:3] for one in passes)}")
    for number, chunk in enumerate(found.chunks):
        timed = [(one.layer, one.op) for one in chunk.operators]
        seen = [(one["layer"], one["op"]) for one in chunk.dataflow["operators"]]
        seen += [(row["layer"], row["op"]) for row in chunk.storages]
        missing = {node for node in seen if node[0] in chunk.layers} - set(timed)
        if missing or len(set(timed)) != len(timed):
            wrong.append(f"chunk {number}: no times of {missing}")
        used = [op for op in chunk.operators if op.op in ("self_attention.linear_proj", "self_attention.linear_qkv")]
        if len(used) != 2 * len(chunk.layers) or not all(one.forward_seconds * one.backward_seconds for one in used):
            wrong.append(f"chunk {number}: matrix products without time")
    return wrong


def times(layout: dict, kind: str, micro_batches: int) -> tuple[list[str], list[tuple]]:
    """What is wrong, and of each chunk its layers and the bytes outside them."""
    from megatron.core import parallel_state

    from tests.limited_runs import Training, counted, surviving

    with counted() as memory, surviving() as engine, parallel(**layout):
        training = Training(memory, kind, micro_batches)
        training.step()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        found, passes, _, seconds = profile(engine, training, stage=stage)
        wrong = wrong_times(found, passes, seconds, micro_batches)
        wrong += [] if found.stage == stage and found.step_seconds > 0 else ["stage or step"]
        wrong += [f"{one.copies} s of copies" for one in passes if one.copies]
        wrong += [] if 0 < found.host.moved_seconds < found.host.rerun_seconds else ["the engine's own time"]
    return wrong, [(chunk.layers, chunk.before.bytes, chunk.after.bytes) for chunk in found.chunks]


HIDDEN = 32 * 2 * 64 * 4  # bytes of the hidden states of a micro-batch
TOKENS = 32 * 2 * 8


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_times_of_a_pass_add_up_and_every_operator_has_one(kind):
    [(wrong, [(layers, before, after)])] = on_ranks(1, times, {}, kind, 2)
    assert wrong == [] and layers == (0, 1, 2, 3)
    positions = TOKENS // 2 if kind == "dense" else 0
    assert HIDDEN + TOKENS <= before <= HIDDEN + TOKENS + TOKENS // 2 + positions
    assert after >= 2 * 32 * 256 * 4  # the softmax of the logits, in fp32


def test_each_chunk_of_a_pipeline_with_virtual_stages_is_told_apart():
    first, last = on_ranks(2, times, {"pp": 2, "vpp": 2}, "dense", 4)
    assert first[0] == last[0] == []
    assert [layers for layers, *_ in first[1]] == [(0,), (2,)] and [layers for layers, *_ in last[1]] == [(1,), (3,)]
    for _, before, _ in (first[1][1], *last[1]):
        assert before == HIDDEN  # what the stage received
    assert first[1][0][1] > HIDDEN
    assert [after for _, _, after in (*first[1], last[1][0])] == [0, 0, 0] and last[1][1][2] > 2 * 32 * 256 * 4


def bytes_found(kind: str) -> dict[str, int]:
    from mindspeed_mem.activation.storage.ledger import LEDGER
    from tests.limited_runs import Training, counted, surviving

    with counted() as memory, surviving() as engine, parallel():
        training = Training(memory, kind)
        training.step()
        LEDGER.reset_peak()
        held = LEDGER.held.now
        before = settled(memory)
        training.step()
        peak, held = before + training.peak, LEDGER.held.peak - held
        found, *_ = profile(engine, training)
    kept = sum(row["bytes"] for row in found.chunks[0].storages if row["layer"] in found.chunks[0].layers)
    outside = found.chunks[0].before.bytes + found.chunks[0].after.bytes
    return {
        "allocated": before,
        "static": found.static_bytes,
        "temporary": found.temporary_bytes,
        "held": held,
        "listed": kept + outside,
        "peak": peak,
    }


@pytest.mark.parametrize("kind", ["dense", "swiglu_gqa_rope", "moe"])
def test_static_temporary_and_held_bytes_make_up_the_peak(kind):
    [found] = on_ranks(1, bytes_found, kind)
    assert abs(found["static"] - found["allocated"]) <= 4096  # what the test keeps of each step
    predicted = found["static"] + found["temporary"] + found["held"]
    above = found["peak"] - found["static"]
    assert found["peak"] <= predicted <= found["peak"] + 0.15 * above, found
    assert 0.99 * found["listed"] <= found["held"] <= 1.05 * found["listed"], found


def baselines(kind: str) -> tuple[int, dict[str, tuple[int, int]]]:
    """Static bytes, and predicted beside measured peaks of keeping everything and of Megatron's own recomputation."""
    from mindspeed_mem.adaptive.problem import from_profile
    from mindspeed_mem.adaptive.problem.definition import Pipeline
    from mindspeed_mem.adaptive.search.baselines import full_recompute
    from tests.limited_runs import Training, counted, surviving

    found = {}
    with counted() as memory, parallel():
        with surviving() as engine:
            training = Training(memory, kind, layers=3, hidden=128)
            training.step()
            profiled, *_ = profile(engine, training)
        problem = from_profile.problem([profiled], Pipeline(micro_batches=training.micro_batches), 10**12)
        config = training.chunks[0].config
        for layers in (0, 1, 3):
            config.recompute_granularity, config.recompute_method = ("full", "block") if layers else (None, None)
            config.recompute_num_layers = layers or None
            before = settled(memory)
            training.step()
            found[f"{layers} layers"] = full_recompute(problem, layers).peaks[0], before + training.peak
    return problem.stages[0].static_bytes, found


@pytest.mark.parametrize("kind", but(["swiglu_gqa_rope", "dense"], "dense"))
def test_peaks_of_megatrons_own_recomputation_are_as_predicted(kind):
    [(static, found)] = on_ranks(1, baselines, kind)
    wrong = {
        name: (one - static, other - static)
        for name, (one, other) in found.items()
        if abs(one - other) > 0.03 * (other - static)
    }
    assert not wrong, found


def under_a_limit(kind: str, share: float, layout: dict, micro_batches: int) -> tuple[list[str], int]:
    """What a profile under a limit has otherwise than one without, in figures or in what is computed."""
    from tests.limited_runs import Training, counted, different, surviving
    from tests.models import forget_routing

    with counted() as memory:
        with parallel(**layout):
            training = Training(memory, kind, micro_batches)
            expected = [training.step() for _ in range(1 + CALLS)]
            peak = training.peak
        forget_routing()
        del training
        profiles = []
        for limit in (None, int(share * peak)):
            with surviving() as engine, parallel(**layout):
                training = Training(memory, kind, micro_batches)
                results = [training.step()]
                found, passes, more, _ = profile(engine, training, limit)
                profiles.append(found)
                forget_routing()  # or the model lives on
                del training
                wrong = [
                    name for one, other in zip(results + more, expected, strict=True) for name in different(one, other)
                ]
    free, tight = profiles
    for one, other in zip(free.chunks, tight.chunks, strict=True):
        wrong += [f"storage {a} became {b}" for a, b in zip(one.storages, other.storages, strict=True) if a != b]
        if [(op.layer, op.op) for op in one.operators] != [(op.layer, op.op) for op in other.operators]:
            wrong.append("operators")
        if one.dataflow != other.dataflow:
            wrong.append("dataflow")
        if (one.before.bytes, one.after.bytes) != (other.before.bytes, other.after.bytes):
            wrong.append("bytes outside")
    if abs(free.static_bytes - tight.static_bytes) > 8192:
        wrong.append(f"static {free.static_bytes} {tight.static_bytes}")
    # What backward is about to be done with may leave: then what takes its place is on top.
    if not 0.75 < tight.temporary_bytes / free.temporary_bytes < 1.75:
        wrong.append(f"temporary {free.temporary_bytes} {tight.temporary_bytes}")
    wrong += [
        f"{one.total} {one}" for one in passes if abs(sum(one.operators.values()) + sum(one[4:7]) - one.total) > 1e-6
    ]
    return wrong, sum(one.copies > 0 for one in passes)


@pytest.mark.parametrize(
    ("kind", "layout", "micro_batches"),
    [("dropout", {}, 2), ("moe", {}, 2), ("swiglu_gqa_rope", {"pp": 2, "vpp": 2}, 4)],
)
def test_a_profile_is_the_same_where_memory_runs_out_and_changes_no_bit(kind, layout, micro_batches):
    for wrong, copying in on_ranks(layout.get("pp", 1), under_a_limit, kind, 0.4, layout, micro_batches):
        assert wrong == []
        assert copying  # and that time is no operator's


def interrupted() -> tuple[list[bool], list[str], dict[str, bool]]:
    """A training call fails in the middle; later the profiler is gone."""
    import contextlib
    import gc
    import weakref

    from mindspeed_mem.activation.observe.profiler import Profiler
    from mindspeed_mem.device.link_speed import measure_link
    from tests.limited_runs import Training, counted, surviving

    class Stop(Exception):
        pass

    def fail(*_):
        raise Stop

    done = []
    with counted() as memory, surviving() as engine, parallel():
        training = Training(memory, "dense")
        training.step()
        profiler = Profiler(engine)
        for number in range(2 * CALLS):
            fails = number % 2 == 0
            hook = training.chunks[0].module.decoder.layers[2].mlp.register_forward_hook(fail) if fails else None
            profiler.begin_call()
            try:
                training.step()
            except Stop:
                profiler.end_call(False)
                hook.remove()
            else:
                profiler.end_call(True)
            done.append(profiler.done)
        found = profiler.rank_profile(0, measure_link(engine.backend))
        wrong = [
            str(one[:3])
            for one in profiler.passes
            if abs(sum(one.operators.values()) + sum(one[4:7]) - one.total) > 1e-6
        ]
        wrong += [] if found.chunks[0].layers == (0, 1, 2, 3) else ["layers"]
        profiler.detach()
        ref = weakref.ref(profiler)
        del profiler
        gc.collect()
        training.step()
        clean = {
            "profiler": ref() is None and engine.observation.profiler is None,
            "stopwatch": engine.observation.stopwatch is None,
            "census": engine.observation.census is None,
            "copies": engine.mover.copying is contextlib.nullcontext,
        }
    return done, wrong, clean


def test_a_call_that_fails_is_measured_again_and_nothing_of_the_profiler_stays():
    [(done, wrong, clean)] = on_ranks(1, interrupted)
    assert done == [False] * 5 + [True] and wrong == []
    assert all(clean.values()), clean


def test_there_is_no_profile_before_all_is_measured():
    [text] = on_ranks(1, too_early)
    assert "3 more training calls are needed" in text


def too_early() -> str:
    from mindspeed_mem.activation.observe.profiler import Profiler
    from mindspeed_mem.device.link_speed import measure_link
    from tests.limited_runs import surviving

    with surviving() as engine:
        try:
            Profiler(engine).rank_profile(0, measure_link(engine.backend))
        except RuntimeError as error:
            return str(error)
    return ""

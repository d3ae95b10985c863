"""--memory-trace: what the file says is what happened."""

from __future__ import annotations

import collections
import itertools
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mem.report import trace_file
from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed


def traced(plan: dict[str, Any], file: str, steps: tuple[int, int], number: int = 4) -> tuple:
    """Trains that many steps; the engine's figures before and after the steps traced, what training gave with a trace
    and without, what was logged, what is left over, and the bytes held before the trace (masks that Megatron keeps)."""
    from mindspeed_mem.activation.storage.ledger import LEDGER
    from mindspeed_mem.report import trace
    from tests.models import build_gpt, train_step
    from tests.swap_runs import difference, left_over, listening, swap

    figures, results = [], []
    for on in (False, True):
        with parallel(), swap(plan) as engine, listening(logging.INFO) as lines:
            chunks = build_gpt("dense")
            held = LEDGER.held.now
            if on:
                trace.start(Path(file), *steps)
            for step in range(number):
                results.append(train_step(chunks, step=step))
                figures += [engine.report()] * on
            trace.stop()
            left = left_over(engine)
    differ = [difference(one, other) for one, other in zip(results[:number], results[number:], strict=True)]
    return figures, differ, [line for line in lines if "trace" in line], left, held


def events_of(file: Path) -> list[dict[str, Any]]:
    return json.loads(trace_file.file_of_rank(file, 0).read_text())["traceEvents"]


def spans(events: list[dict[str, Any]], category: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == category]


def check_nesting(events: list[dict[str, Any]]) -> None:
    """On each track one lies inside another, or beside it."""
    rounding = 0.01
    tracks = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["tid"]].append((event["ts"], -event["dur"]))
    for track in tracks.values():
        around: list[float] = []
        for begin, minus in sorted(track):
            while around and around[-1] <= begin + rounding:
                around.pop()
            assert not around or begin - minus <= around[-1] + rounding
            around.append(begin - minus)


def check_memory(file: Path, peak: int) -> None:
    """What torch's viewer shows of the last step has this peak, and nothing is left in the end."""
    target = trace_file.file_of_rank(file, 0).with_suffix(".memory.pickle")
    [events] = pickle.loads(target.read_bytes())["device_traces"]
    levels, alive = [0], {}
    for one in events:
        if one["action"] == "alloc":
            alive[one["addr"]] = one["size"]
        elif one["action"] == "free_completed":
            del alive[one["addr"]]
        levels.append(sum(alive.values()))
    assert max(levels) == peak and not alive
    assert {one["frames"][0]["name"] for one in events} >= {
        "layer 0 pre_mlp_layernorm",
        "layer 3 self_attention.core_attention",
    }
    assert {one["frames"][1]["name"] for one in events} >= {"forward 0", "backward 3"}


def test_swapped_steps(tmp_path):
    from tests.swap_runs import EVERYTHING

    file = tmp_path / "new" / "trace.json"
    [(figures, differ, lines, left, held)] = on_ranks(1, traced, EVERYTHING, str(file), (2, 3))
    assert differ == [[]] * 4 and not any(left.values())
    events = events_of(file)
    check_nesting(events)
    assert [one["args"]["step"] for one in spans(events, "compute") if "step" in one["args"]] == [2, 3]
    for track, bytes_moved in (("copy out", "bytes_out"), ("copy in", "bytes_in")):
        moved = getattr(figures[2], bytes_moved) - getattr(figures[0], bytes_moved)
        assert sum(one["args"]["bytes"] for one in spans(events, track)) == moved > 0
    counters = [one for one in events if one["ph"] == "C"]
    most = {
        name: max(one["args"]["activations"] for one in counters if one["name"] == name)
        for name in ("host bytes", "device bytes")
    }
    assert most["host bytes"] == figures[-1].host_peak_bytes
    assert 0 < most["device bytes"] <= figures[-1].peak_bytes
    check_memory(file, figures[-1].peak_bytes - held)
    assert len(lines) == 1 and "steps 2-3" in lines[0] and "the one before" in lines[0]
    # The host's copies are made in the passes, which stand still for them.
    assert "0 % of copying behind compute, 0 % in idle time, 100 % in stalls" in lines[0]
    shares = [one["args"]["copying ms"] for one in spans(events, "compute") if "copying ms" in one["args"]]
    took = sum(one["dur"] for track in ("copy out", "copy in") for one in spans(events, track)) / 1e3
    assert len(shares) == 2 and abs(sum(sum(one.values()) for one in shares) - took) < 0.1


def test_operators_of_layers_that_no_plan_touches(tmp_path):
    file = tmp_path / "trace.json"
    [(_, differ, *_)] = on_ranks(1, traced, {"swap_config": {"swap": False}}, str(file), (2, 2), number=3)
    assert differ == [[]] * 3
    compute = spans(events_of(file), "compute")
    names = {(one["args"]["layer"], one["name"]) for one in compute if "op" in one["args"]}
    assert names >= set(itertools.product(range(4), ("mlp.linear_fc1", "self_attention.linear_qkv")))
    passes = [one["name"] for one in compute if "micro-batch" in one["args"] and "op" not in one["args"]]
    assert sorted(passes) == sorted(f"{way} {number}" for way in ("forward", "backward") for number in range(4))
    backward = [one for one in compute if one["name"] == "layer 0, backward"]
    assert len(backward) == 4


def test_second_runs(tmp_path):
    from tests.swap_runs import again

    file = tmp_path / "trace.json"
    [(figures, differ, *_)] = on_ranks(1, traced, again({"mlp": True}), str(file), (3, 3))
    assert differ == [[]] * 4
    events = events_of(file)
    check_nesting(events)
    runs = [sum(one.runs for one in figures[n].recomputed_by_operator) for n in (1, 2)]
    assert len(spans(events, "recompute")) == runs[1] - runs[0] > 0


def put_off(file: str) -> None:
    from mindspeed_mem.report import trace
    from tests.models import build_gpt, train_step
    from tests.split_runs import split
    from tests.swap_runs import swap

    with parallel(), split(), swap({"swap_config": {"swap": False}}):
        chunks = build_gpt("dense", layers=1)
        trace.start(Path(file), 1, 1)
        train_step(chunks, micro_batches=2)
        trace.stop()


def test_gradients_of_weights_that_are_put_off(tmp_path):
    file = tmp_path / "trace.json"
    on_ranks(1, put_off, str(file))
    events = events_of(file)
    check_nesting(events)
    assert len([one for one in spans(events, "compute") if one["name"] == "weight"]) == 2


def test_nothing_reached_is_said(tmp_path):
    file = tmp_path / "trace.json"
    [(_, _, lines, *_)] = on_ranks(1, traced, {"swap_config": {"swap": False}}, str(file), (5, 7), number=1)
    assert len(lines) == 1 and "no step was traced" in lines[0] and not list(tmp_path.iterdir())


def around_a_profile(file: str, number: int) -> list[str]:
    """What is logged where a plan is sought from the second of so many steps on."""
    from mindspeed_mem.activation.observe.profiler import Profiler
    from mindspeed_mem.report import trace
    from tests.limited_runs import surviving
    from tests.models import build_gpt, train_step
    from tests.swap_runs import listening

    with surviving() as engine, parallel(), listening(logging.INFO) as lines:
        chunks = build_gpt("dense", layers=1)
        trace.start(Path(file), 1, 2)
        for step in range(1, number + 1):
            profiler = Profiler(engine) if step == 2 else None
            if profiler is not None:
                profiler.begin_call()
            train_step(chunks, micro_batches=1)
            if profiler is not None:
                profiler.end_call(True)
                profiler.detach()
        trace.stop()
    return [line for line in lines if "trace" in line]


@pytest.mark.parametrize(("number", "steps"), [(2, "1"), (4, "1, 3")])
def test_a_profile_between_traced_steps(tmp_path, number, steps):
    file = tmp_path / "trace.json"
    [lines] = on_ranks(1, around_a_profile, str(file), number)
    assert len(lines) == 1 and f"steps {steps} are in" in lines[0]
    traced = [one["args"]["step"] for one in spans(events_of(file), "compute") if one["name"].startswith("step ")]
    assert ", ".join(map(str, traced)) == steps


def until_after_settling(file: str) -> int:
    """Traces the first training call, and one more of a settled plan; returns the first call that had that."""
    from mindspeed_mem.report import trace
    from tests.adaptive_runs import adapting, room_for, until_settled
    from tests.limited_runs import Training, counted

    with counted() as memory, parallel():
        room, _ = room_for(memory, "dense", 0.6, steps=1, layers=2)
        limit = memory.allocated + room
        with adapting() as engine:
            mine = Training(memory, "dense", layers=2, micro_batches=1)
            mine.total = limit
            trace.start(Path(file), 1, 1, when_settled=True)
            taken = until_settled(engine, mine.step)
            for _ in range(2):
                mine.step()
            trace.stop()
    return taken


def test_a_plan_that_is_settled_on_later_is_traced_too(tmp_path):
    pytest.importorskip("scipy")
    file = tmp_path / "trace.json"
    [taken] = on_ranks(1, until_after_settling, str(file))
    traced = [one["args"]["step"] for one in spans(events_of(file), "compute") if one["name"].startswith("step ")]
    assert traced == [1, taken] and taken > 3


def ranges(file: str) -> tuple[list[str], int, bool]:
    """The names of the ranges that began in the step traced, in order, how many were open at most, and whether
    nothing is looked at any more."""
    from mindspeed_mem.device.cpu import CpuBackend
    from mindspeed_mem.report import trace
    from tests.models import build_gpt, train_step
    from tests.swap_runs import swap

    class Profiled(CpuBackend):
        names: list[str] = []
        open = most = 0

        def begin_range(self, name: str) -> str:
            self.names.append(name)
            self.open += 1
            self.most = max(self.most, self.open)
            return name

        def end_range(self, begun: str | None) -> None:
            self.open -= begun is not None

    backend = Profiled()
    with parallel(), swap({"swap_config": {"swap": False}}, backend=backend) as engine:
        chunks = build_gpt("dense", layers=1)
        trace.start(Path(file), 1, 1)
        train_step(chunks, micro_batches=1)
        train_step(chunks, micro_batches=1)
        trace.stop()
    return backend.names, backend.most - backend.open, engine.in_force.idle


def test_operators_are_ranges_for_the_devices_profiler(tmp_path):
    file = tmp_path / "trace.json"
    [(names, most, idle)] = on_ranks(1, ranges, str(file))
    assert most == 1 and idle
    compute = [one for one in spans(events_of(file), "compute") if "op" in one["args"]]
    where = {0: "layer 0", 1: "after the layers"}
    named = [f"{where[one['args']['layer']]} {one['name']}" for one in compute]
    assert named and [name for name in names if name not in where.values()] == named


def further(file: str) -> None:
    from mindspeed_mem.report import trace
    from tests.models import build_gpt, train_step
    from tests.swap_runs import swap

    with parallel(), swap({"swap_config": {"swap": False}}):
        chunks = build_gpt("dense", layers=1, mtp_num_layers=1)
        trace.start(Path(file), 1, 1)
        train_step(chunks, micro_batches=1)
        trace.stop()


def test_a_layer_of_another_stack_has_its_name(tmp_path):
    file = tmp_path / "trace.json"
    on_ranks(1, further, str(file))
    assert {"decoder:0, backward", "mtp:0, backward"} <= {
        one["name"] for one in spans(events_of(file), "compute") if "op" not in one["args"]
    }
    about = json.loads(trace_file.file_of_rank(file, 0).read_text())["otherData"]
    assert about["stacks"] == {"decoder": [0, 1], "mtp": [1, 2]} and about["stages"] == 1


def gathering(file: str) -> tuple[int, int]:
    """Gathers in the step traced, and bytes."""
    from mindspeed_mem.report import trace
    from mindspeed_mem.zero.buffers import runtime
    from tests.chunk_runs import Case, built, chunked, passed
    from tests.swap_runs import swap

    case = Case(model={"layers": 2})
    with parallel(), swap({"swap_config": {"swap": False}}), chunked(3, chunk=case.chunk):
        models, _ = built(case)
        counts = runtime.current().gathering.counts
        trace.start(Path(file), 2, 2)
        passed(models, case, 0)
        before = counts.gathers, counts.gathered_bytes
        passed(models, case, 1)
        found = counts.gathers - before[0], counts.gathered_bytes - before[1]
        passed(models, case, 2)
        trace.stop()
    return found


def test_gathers_of_chunks_by_rank(tmp_path):
    file = tmp_path / "trace.json"
    counted = on_ranks(2, gathering, str(file))
    merged = trace_file.merged(trace_file.file_of_rank(file, rank) for rank in (0, 1))["traceEvents"]
    for rank, (number, nbytes) in enumerate(counted):
        events = [one for one in merged if one["pid"] == rank]
        begins, ends = ({one["id"]: one for one in events if one["ph"] == phase} for phase in "be")
        assert len(begins) == number > 0 and begins.keys() == ends.keys()
        assert all(begins[key]["ts"] <= ends[key]["ts"] for key in begins)
        assert sum(one["args"]["bytes"] for one in begins.values()) == nbytes
        assert {one["name"] for one in events if one["ph"] == "X"} >= {"step 2", "forward 0", "backward 0"}


def short_of_memory(file: str) -> tuple[int, int]:
    """Evictions and second attempts in the step traced."""
    from mindspeed_mem.report import trace
    from tests.limited_runs import Training, counted, surviving

    with counted() as memory, surviving() as engine, parallel():
        training = Training(memory, layers=4)
        trace.start(Path(file), 3, 3)
        training.step()
        training.step()
        before = engine.mover.evictions, engine.survival.guard.retries
        training.step(above=training.peak // 2)
        trace.stop()
        return engine.mover.evictions - before[0], engine.survival.guard.retries - before[1]


@pytest.mark.usefixtures("limited_memory")
def test_what_leaves_for_lack_of_memory(tmp_path):
    file = tmp_path / "trace.json"
    [(evictions, retries)] = on_ranks(1, short_of_memory, str(file))
    events = events_of(file)
    check_nesting(events)
    times = collections.Counter()
    for one in events:
        if one["ph"] == "i":
            times[one["name"]] += one["args"]["times"]
    assert times["evicted"] == evictions > 0
    assert times["operator ran again for lack of memory"] <= retries  # the rest in the optimizer
    assert spans(events, "copy out") and any("lack of memory" in one["name"] for one in spans(events, "compute"))

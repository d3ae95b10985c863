"""Training under --adaptive-memory-optimization: nothing changes but what is held, and a plan is settled on."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mem.adaptive.problem import profile_file
from tests.guarding import settled
from tests.sweeping import but
from tests.worlds import on_ranks, parallel

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("limited_memory")]

STEPS = 20


def life(kind: str, layout: dict, share: float, plan_file: str | None = None, **model) -> tuple:
    """What differs in any bit from training without the pack, over `STEPS` steps; then the state, bytes evicted since
    it was settled, the peak of the last step, the limit, and what was logged."""
    from tests.adaptive_runs import adapting, room_for, told
    from tests.limited_runs import Training, counted, different

    with counted() as memory, parallel(**layout):
        room, expected = room_for(memory, kind, share, STEPS, micro_batches=4, **model)
        limit = memory.allocated + room
        with adapting(None if plan_file is None else Path(plan_file)) as engine, told() as lines:
            mine = Training(memory, kind, micro_batches=4, **model)
            mine.total = limit
            found, evicted = [], None
            for number in range(STEPS):
                found += [(number, name) for name in different(mine.step(), expected[number])]
                if engine.adaptation.state == "settled" and evicted is None:
                    evicted = engine.mover.evicted_bytes
            evicted = None if evicted is None else engine.mover.evicted_bytes - evicted
            return found, engine.adaptation.state, evicted, memory.peak, limit, lines, engine.report()


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("dense", {"layers": 4}),
        pytest.param("swiglu_gqa_rope", {"layers": 4}, marks=pytest.mark.sweep),
        pytest.param("moe", {"layers": 3}, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_training_is_bit_identical_and_settles(kind, model):
    [(found, state, evicted, peak, limit, lines, report)] = on_ranks(1, life, kind, {}, 0.6, **model)
    assert found == []
    assert state == "settled", lines
    assert evicted == 0 and peak <= limit
    assert report.bytes_out + report.recomputed_bytes > 0  # it was needed
    assert sum(line.startswith("plan 1: predicted") for line in lines) == 1  # it stays with what it settled on


@pytest.mark.parametrize(
    "layout",
    but([{"pp": 2}, {"pp": 2, "vpp": 2}, {"tp": 2}, {"dp": 2}], {"pp": 2}, {"tp": 2}, {"dp": 2}),
    ids=lambda layout: "-".join(f"{key}{value}" for key, value in layout.items()),
)
def test_ranks_settle_together(layout):
    results = on_ranks(2, life, "dense", {key: value for key, value in layout.items() if key != "dp"}, 0.7, layers=4)
    assert [found for found, *_ in results] == [[], []]
    assert {state for _, state, *_ in results} == {"settled"}
    assert all(peak <= limit for _, _, _, peak, limit, *_ in results)
    # Only one rank speaks, and has the figures of all.
    assert results[0][5] and not any("plan 1" in line for line in results[1][5])
    assert results[0][6].adaptive and not results[1][6].adaptive


def without_room() -> tuple[list[str], str, list[str]]:
    """What is said where no plan fits, and where not even eviction makes enough room; and what a terminal shows."""
    from tests.adaptive_runs import adapting, room_for, told
    from tests.limited_runs import Training, counted
    from tests.terminals import terminal

    with counted() as memory, parallel():
        room, _ = room_for(memory, "dense", 0.25, layers=3)
        limit = memory.allocated + room
        with adapting() as engine, told() as lines:
            mine = Training(memory, "dense", layers=3)
            mine.total = limit
            with terminal() as shown:
                while engine.adaptation.planner is None:
                    mine.step()
            return lines, str(engine.survival.no_room("aten.mm", 8, "")), shown


def test_what_to_try_can_be_followed():
    [(lines, error, [shown])] = on_ranks(1, without_room)
    for what in ("step 1 of 3 for a memory plan", "step 3 of 3", "copies to the host", "searching for a memory plan"):
        assert what in shown
    (said,) = (line for line in lines if line.startswith("no plan fits"))
    assert "MiB" in said and "0.00 GiB" not in said
    assert "--recompute-layers" not in error and "try: a smaller" in error  # it cannot be combined with it


def kept(plan_file: str) -> list[list[str]]:
    """What is logged by a first job, by the same job again, and by one with another micro-batch count."""
    from tests.adaptive_runs import adapting, room_for, told, until_settled
    from tests.limited_runs import Training, counted

    said = []
    with counted() as memory, parallel():
        room, _ = room_for(memory, "dense", 0.6, layers=3)
        limit = memory.allocated + room
        for micro_batches in (2, 2, 3):
            with adapting(Path(plan_file)) as engine, told() as lines:
                mine = Training(memory, "dense", micro_batches=micro_batches, layers=3)
                mine.total = limit  # the same for all: what a plan was made for
                lines.append(f"settled after {until_settled(engine, mine.step)}")
                said.append(list(lines))
    return said


def test_a_kept_plan_is_used_again_by_the_same_job_only(tmp_path):
    [(first, second, third)] = on_ranks(1, kept, str(tmp_path / "plan.yaml"))
    assert not any("plan in" in line and "used" in line for line in first)
    assert any("the plan is kept in" in line for line in first)
    sizes = profile_file.read(tmp_path / "plan.profile.json").shapes  # for layout --trace
    assert {sizes[name] for name in ("tensor", "context", "expert", "data")} == {1}
    assert (sizes["sequence_parallel"], sizes["distributed_optimizer"]) == (False, False)
    assert any("is used: it was made for the same job" in line for line in second) and second[-1] == "settled after 1"
    assert any("is not used: micro_batches was 2 and is 3" in line for line in third)


def other_jobs(plan_file: str) -> list[str]:
    """What jobs that differ in one thing say of the first one's plan."""
    from mindspeed_mem.features import Settings, check, put_into_force
    from tests.adaptive_runs import adapting, room_for, told, until_settled
    from tests.limited_runs import Training, counted

    said = []
    with counted() as memory, parallel():
        room, _ = room_for(memory, "dense", 0.6, layers=3)
        limit = memory.allocated + room
        for number, (tied, micro_batches, stage) in enumerate(
            [(True, 2, 0), (False, 2, 0), (True, 2, 0), (True, 4, 2)]
        ):
            put_into_force(check({"device": "cpu", "adaptive_memory_optimization": True, "chunk_zero_stage": stage}))
            with adapting(Path(plan_file)) as engine, told() as lines:
                mine = Training(memory, "dense", tied=tied, layers=3, micro_batches=micro_batches)
                mine.total = limit
                mine.step()
                if not number:  # more micro-batches before anything is planned: that is what the plan is for
                    mine.micro_batches = 4
                    until_settled(engine, mine.step)
                said.append(next((line for line in lines if "plan in" in line), ""))
    put_into_force(Settings())
    return said


def test_a_plan_is_kept_for_what_it_was_made_for(tmp_path):
    [(first, untied, fewer, sharded)] = on_ranks(1, other_jobs, str(tmp_path / "plan.yaml"))
    assert first == ""
    assert "is not used: micro_batches was 4 and is 2, stages_and_sizes was" in untied
    assert "is not used: micro_batches was 4 and is 2" in fewer and "stages_and_sizes" not in fewer
    assert "is not used: chunk_zero_stage was None and is 2" in sharded


def retrying() -> list[list[str]]:
    """What a settled job says when its allocator retries between training calls, and when it does in each of them."""
    from tests.adaptive_runs import adapting, room_for, told, until_settled
    from tests.limited_runs import Training, counted

    found, retries = [], itertools.count()
    with counted() as memory, parallel():
        room, _ = room_for(memory, "dense", 0.6, layers=3)
        limit = memory.allocated + room
        with adapting() as engine, told() as lines, pytest.MonkeyPatch.context() as patch:
            mine = Training(memory, "dense", layers=3)
            mine.total = limit
            until_settled(engine, mine.step)
            for inside, calls in ((False, 12), (True, 20)):  # it is looked at every 10
                lines.clear()
                for _ in range(calls):
                    number = next(retries)
                    patch.setattr(
                        engine.backend, "allocation_retries", retries.__next__ if inside else lambda n=number: n
                    )
                    mine.step()
                found.append([line for line in lines if "planning again" in line])
    return found


def test_an_allocator_that_retries_in_every_call_of_a_settled_plan_leads_to_another():
    assert on_ranks(1, retrying) == [[[], ["the allocator had to retry in every call under the plan: planning again"]]]


def changes() -> tuple[list, list[str]]:
    """A failing step, micro-batches of other sizes, another number of them and a lower limit on the way."""
    import torch

    from tests.adaptive_runs import adapting, room_for, told, until_settled
    from tests.limited_runs import Training, counted, different

    class Broken(RuntimeError):
        pass

    def fail(*_):
        raise Broken

    with counted() as memory, parallel():
        ample, _ = room_for(memory, "dense", 0.8, layers=3)
        tight, _ = room_for(memory, "dense", 0.42, layers=3)
        before = settled(memory)
        with adapting() as engine, told() as lines:
            mine = Training(memory, "dense", layers=3)
            mine.total = before + ample
            mine.step()
            mine.step()
            hook = mine.chunks[0].module.decoder.layers[1].register_forward_hook(fail)
            with contextlib.suppress(Broken):
                mine.step()
            hook.remove()
            until_settled(engine, mine.step)
            lines.append("--- larger micro-batches, for some steps")
            for profiled, planned in ((True, False), (False, True)):
                mine.samples = 3
                for _ in range(5 if planned else 2):
                    mine.step()
                assert (engine.observation.profiler is not None) == profiled
                mine.samples = 2
                for _ in range(3):  # one alone might be an exception
                    mine.step()
                assert engine.observation.profiler is None
                assert engine.report().adaptive[0].startswith("adaptive memory plan (settled)")
            lines.append("--- back")
            mine.micro_batches = 4
            mine.step()
            lines.append("--- less memory")
            mine.total = before + tight
            evicted = engine.mover.evicted_bytes
            for _ in range(24):
                mine.step()
            # Trained the same way without the pack, from the same parameters on.
            values = mine.chunks[0].state_dict().items()
            state = {name: value.numpy().copy() for name, value in values if value is not None}
            last = mine.step()
            grew = engine.mover.evicted_bytes - evicted
            reached = engine.adaptation.state
        other = Training(memory, "dense", micro_batches=4, layers=3)
        other.chunks[0].load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
        other.number = mine.number - 1
        expected = other.step()
        found = [name for name in different(last, expected) if not name.startswith("new ")]
        return found, grew, reached, lines


def test_it_follows_what_changes():
    [(found, grew, reached, lines)] = on_ranks(1, changes)
    assert found == []
    assert any("micro-batches of 3: profiling again" in line for line in lines)
    assert not lines[lines.index("--- back") + 1 : lines.index("--- less memory")]
    less = lines[lines.index("--- less memory") :]
    assert grew > 0 and any("had to be evicted beyond the plan: planning again" in line for line in less)
    assert reached == "settled", less


def collectives_of_a_step() -> tuple[int, int]:
    """Without the pack, and where nobody says how much memory there is, so that nothing is planned."""
    from mindspeed_mem import ranks
    from tests.adaptive_runs import adapting
    from tests.limited_runs import Training, counted

    def second(mine: Training) -> int:
        mine.step()
        before = ranks.collectives()
        mine.step()
        return ranks.collectives() - before

    with counted() as memory, parallel():
        plain = second(Training(memory, "dense", layers=1))
        with adapting():
            return plain, second(Training(memory, "dense", layers=1))


def test_ranks_that_plan_no_more_ask_each_other_nothing():
    assert all(plain == mine > 0 for plain, mine in on_ranks(2, collectives_of_a_step))


def changing(
    what: str, numbers: Sequence[Any], plan_file: str | None = None, **layout: int
) -> tuple[list, list[str], list[str]]:
    """Each step has another number of micro-batches, of samples in each, or other sizes that are told; the states, too.

    ``what``: one attribute of `Training` or several, of which each of ``numbers`` has as many.
    """
    from tests.adaptive_runs import adapting, told
    from tests.limited_runs import Training, counted, different

    def steps(mine: Training, each: Callable[[], None] = lambda: None) -> list:
        results = []
        for number in numbers:
            names = what.split()
            for name, value in zip(names, number if len(names) > 1 else (number,), strict=True):
                setattr(mine, name, value)
            mine.number = 10 * len(results)
            results.append(mine.step())
            each()
        return results

    with counted() as memory, parallel(**layout):
        expected = steps(Training(memory, "dense", layers=layout.get("pp", 1)))
        with adapting(None if plan_file is None else Path(plan_file)) as engine, told() as lines:
            mine, states = Training(memory, "dense", layers=layout.get("pp", 1)), []
            mine.total = memory.allocated + 2**27
            results = steps(mine, lambda: states.append(engine.adaptation.state))
            found = [name for one, other in zip(results, expected, strict=True) for name in different(one, other)]
            return found, states, lines


def test_a_plan_serves_any_number_of_micro_batches_of_one_stage():
    [(found, states, lines)] = on_ranks(1, changing, "micro_batches", (1, 3, 2, 1, 2, 3, 4, 1, 5))
    assert found == [] and states[-1] == "settled"
    assert not any("planning again" in line for line in lines)


SIZES = {
    "by turns": (2, 1) * 12,
    "any": (3, 1, 2, 1, 4, 2, 1, 1, 3, 2, 1, 4, 1, 3, 2, 1, 2, 1, 4, 2, 1, 3, 4, 4, 1, 2, 4, 3, 4, 1, 4),
    "one that never returns": (1, 1, 4, *(1, 2) * 20),
}


@pytest.mark.parametrize("numbers", SIZES.values(), ids=SIZES)
def test_a_plan_is_found_for_the_larger_ones_of_many_sizes(numbers):
    [(found, states, lines)] = on_ranks(1, changing, "samples", numbers)
    assert found == [] and states[-1] == "settled"
    assert not any("stops planning" in line or "planning again" in line for line in lines)


def test_sizes_that_stay_smaller_get_a_plan_of_their_own():
    numbers = (2,) * 8 + (1,) * 18 + (2,) + (1,) * 12
    [(found, states, lines)] = on_ranks(1, changing, "samples", numbers)
    assert found == [] and states[7] == states[16] == "settled"
    assert states[17] == "profile" and states[25:] == ["settled"] * 14
    assert sum("profiling again" in line for line in lines) == 1, "and that plan returns with them"


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([(8, 4), (16, 1)] * 12, id="longer or more"),
        pytest.param([(None, 2)] * 9, id="no length"),
        pytest.param([(size, 1) for size in (80, 70, 60, 50, 40, 30, 80) for _ in range(20)], id="ever smaller"),
    ],
)
def test_sizes_do_not_keep_a_plan_from_being_found(sizes):
    """Nor does one that has been found go."""
    [(found, states, lines)] = on_ranks(1, changing, "length samples", sizes)
    assert found == [] and states[-1] == "settled"
    assert sum("profiling again" in line for line in lines) <= 3


def test_a_kept_plan_says_what_it_was_made_for(tmp_path):
    """Not the call that ran when that was decided."""
    numbers, kept = [(2, 1)] * 3 + [(1, 2), *[(2, 2), (1, 1)] * 6], tmp_path / "plan.yaml"
    for found, states, _ in on_ranks(2, changing, "samples micro_batches", numbers, str(kept), pp=2):
        assert found == [] and states[-1] == "settled"
    sizes = profile_file.read(kept.with_suffix(".profile.json")).shapes
    assert (sizes["micro_batch_size"], sizes["micro_batches"]) == (2, 2)
    (made_for,) = (line for line in kept.read_text().splitlines() if "made for: " in line)
    assert '"micro_batch_size": 2' in made_for and '"micro_batches": 2' in made_for


def one_rank_with_more() -> tuple[list, list[str]]:
    """In the second step the last rank has another number of micro-batches, in the fifth larger ones."""
    import torch.distributed as dist

    from tests.adaptive_runs import adapting, told
    from tests.limited_runs import Training, counted, different

    def steps(mine: Training) -> list:
        odd = dist.get_rank()
        results = []
        for mine.micro_batches, mine.samples in ((1, 1), (1 + odd, 1), (1, 1), (1, 1), (1, 1 + odd), (1, 1)):
            mine.number = 10 * len(results)
            results.append(mine.step())
        return results

    with counted() as memory, parallel():
        expected = steps(Training(memory, "dense", layers=1))
        memory.limit = memory.allocated + 2**27  # what says it: nothing is planned without
        with adapting(), told() as lines:
            mine = Training(memory, "dense", layers=1)
            mine.total = memory.allocated + 2**27
            found = [name for one, other in zip(steps(mine), expected, strict=True) for name in different(one, other)]
    return found, lines


def test_a_rank_with_another_step_leaves_nobody_waiting():
    (found, lines), (others, _) = on_ranks(2, one_rank_with_more, timeout=60)
    assert found == others == []
    assert any("micro-batches of 2: profiling again" in line for line in lines)

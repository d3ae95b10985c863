"""Plans are compared with what they take, corrected, and one is kept."""

from __future__ import annotations

import dataclasses
import itertools
import operator

import pytest

from mindspeed_mem.activation.observe.rank_profile import HostCost
from mindspeed_mem.adaptive import simulate
from mindspeed_mem.adaptive.problem.checks import problems_of
from mindspeed_mem.adaptive.run.correction import Measured, corrected, passes_seconds
from mindspeed_mem.adaptive.run.planner import ROUNDS, Planner
from mindspeed_mem.adaptive.run.training_call import Call, Sizes
from mindspeed_mem.adaptive.search.search import Search
from mindspeed_mem.schedule import peak
from tests.planning import MB, small_problem


def measured(problem, found, *, seconds=1.0, over=0, stall=0.0, evicted=0, retries=0):
    """As predicted, but so many times as long, with so many bytes more on each stage, and so on."""
    simulated = found.simulated
    time = passes_seconds(problem, simulated) * seconds
    rows = zip(simulated.peaks, simulated.stalls, strict=True)
    return [Measured(n, time, peak + over, stalled + stall, evicted, retries) for n, (peak, stalled) in enumerate(rows)]


TWO_STAGES = {"stages": 2, "layers": 3, "micro_batches": 4, "link": 0.5}


either = pytest.mark.parametrize("problem", [{}, TWO_STAGES], ids=["one stage", "two stages"], indirect=True)


@pytest.fixture(
    params=[pytest.param({}, id="one stage"), pytest.param(TWO_STAGES, id="two stages", marks=pytest.mark.sweep)]
)
def problem(request):
    found = small_problem(**request.param)
    kept, least = Search(found).keep_all, Search(found).least()
    highest, lowest = max(simulate(found, kept).peaks), max(least.simulated.peaks)
    return dataclasses.replace(found, device_limit=(2 * lowest + highest) // 3)


@pytest.mark.parametrize(
    ("problem", "number"), [({}, 9), (TWO_STAGES, 1)], ids=["one stage", "two stages"], indirect=["problem"]
)
def test_calls_with_other_numbers_of_micro_batches_show_as_much(problem, number):
    ran, plan = problem.with_micro_batches(number), Planner(problem)
    plan.start()
    found = plan.tries[0].found
    other = dataclasses.replace(found, problem=ran, simulated=simulate(ran, found.plan))
    seen = [one._replace(micro_batches=number) for one in measured(ran, other)]
    assert plan.judge(seen).settled
    assert plan.kept.seconds == pytest.approx(passes_seconds(problem, found.simulated))
    assert [one.peak for one in plan.kept.measured] == list(found.simulated.peaks)
    assert plan.problem == problem


@pytest.mark.parametrize(
    "line",
    [(1, 1, None), (2, 1, None), (4, 1, None), (2, 2, 2), (4, 2, 4), (4, 3, 4), (8, 4, 8)],
    ids=str,
)
def test_a_plan_serves_calls_that_hold_no_more(line):
    stages, virtual_stages, group_size = line
    numbers = [stages * each for each in range(1, 6)] if virtual_stages > 1 else range(1, 4 * stages + 1)
    held = {number: peak(stages, virtual_stages, number, group_size=group_size) for number in numbers}
    calls = {number: Call(*line, None, 8, 1, number) for number in numbers}
    for planned, call in calls.items():
        for number, other in calls.items():
            no_more = all(map(operator.le, held[number], held[planned]))
            assert no_more or not call.serves(other)
            assert call.serves(other) or number > planned
    assert calls[2 * stages].serves(calls[4 * stages])
    larger = call._replace(micro_batch_size=2), call._replace(seq_length=9), call._replace(seq_length=16)
    assert not any(map(call.serves, larger)) and all(one.serves(call) for one in larger)


def test_a_smaller_call_of_more_micro_batches_is_not_measured():
    sizes, call = Sizes(), Call(4, 1, None, None, 8, 2, 1)
    sizes.aim_at(call)
    sizes.begins(call._replace(micro_batch_size=1, micro_batches=4))
    assert not sizes.is_measured
    sizes.aim_at(call._replace(micro_batches=4))
    assert not sizes.is_measured
    sizes.begins(sizes.aim)
    assert sizes.is_measured


def test_sizes_do_not_come_after_one_another_in_a_circle():
    """However little they differ."""
    calls = [Call(1, 1, None, None, *sizes, 1) for sizes in ((100, 60), (150, 39), (200, 28))]
    for order in itertools.permutations(calls):
        aims = [order[0]]
        for call in (*order, *order, *order):
            assert aims[-1].outranks(call) != call.outranks(aims[-1]) or call == aims[-1]
            if aims[-1].part(call) is None:
                aims.append(call)
        assert len(set(aims)) == len(aims)


@either
def test_what_came_as_predicted_is_settled_on(problem):
    planner = Planner(problem)
    first = planner.start()
    assert first.config is not None and not first.settled
    decision = planner.judge(measured(problem, planner.tries[0].found))
    assert decision.settled and decision.config is None
    assert planner.kept.config == first.config
    report = planner.report()
    assert "predicted" in report[0] and any(line.startswith("K keep") for line in report)
    assert "corrected by measurement" not in "".join([*first.lines, *decision.lines, *report])
    assert [line for line in decision.lines if "link at 70 %: +" in line and "copies cost 5 %: +" in line]
    rows = [line for line in report if line.startswith(("swap ", "recompute "))]  # what each decision is worth
    assert {row.split()[0] for row in rows} == {
        {"S": "swap", "R": "recompute"}[letter]
        for stage in planner.kept.found.plan.stages
        for part in stage.parts
        for letter in "".join(part)
        if letter in "SR"
    }


def test_memory_that_was_overlooked_makes_a_smaller_plan(problem):
    planner = Planner(problem)
    planner.start()
    before = planner.tries[0].found
    over = (problem.device_limit - max(before.simulated.peaks)) + problem.device_limit // 20
    decision = planner.judge(measured(problem, before, over=over))
    after = planner.tries[1].found
    assert decision.config is not None and not decision.settled
    assert " s (corrected by measurement) and " in decision.lines[-1]
    assert max(after.simulated.peaks) <= problem.device_limit
    assert [stage.temporary_bytes for stage in planner.problem.stages] == [
        stage.temporary_bytes + over for stage in problem.stages
    ]
    # By the old figures the new plan holds less.
    assert max(simulate(problem, after.plan).peaks) < max(before.simulated.peaks)


def test_memory_that_was_counted_twice_makes_a_faster_plan(problem):
    wrong = dataclasses.replace(
        problem,
        stages=tuple(
            dataclasses.replace(stage, temporary_bytes=stage.temporary_bytes + problem.device_limit // 5)
            for stage in problem.stages
        ),
    )
    planner = Planner(wrong)
    planner.start()
    before = planner.tries[0].found
    planner.judge(measured(wrong, before, over=-(problem.device_limit // 5)))
    late = before.simulated.late  # copies that were in time
    expected = [stage.temporary_bytes + kept for stage, kept in zip(problem.stages, late, strict=True)]
    assert [s.temporary_bytes for s in planner.problem.stages] == expected
    assert planner.tries[-1].found.simulated.seconds < before.simulated.seconds


def test_an_eviction_means_that_a_plan_did_not_fit(problem):
    planner = Planner(problem)
    planner.start()
    # Memory never goes above the limit: what left in an emergency says that it would have.
    decision = planner.judge(measured(problem, planner.tries[0].found, evicted=problem.device_limit // 50))
    assert not decision.settled
    assert all(
        new.temporary_bytes > old.temporary_bytes
        for new, old in zip(planner.problem.stages, problem.stages, strict=True)
    )


def test_a_plan_that_fits_does_not_undo_what_an_eviction_has_shown(problem):
    planner = Planner(problem)
    planner.start()
    planner.judge(measured(problem, planner.tries[0].found, evicted=problem.device_limit // 50))
    raised = [stage.temporary_bytes for stage in planner.problem.stages]
    now = planner.tries[-1]
    below = [before.temporary_bytes - after for before, after in zip(problem.stages, raised, strict=True)]
    assert max(below) < 0
    planner.judge(measured(now.problem, now.found, over=max(below), seconds=1.2))
    assert [stage.temporary_bytes for stage in planner.problem.stages] == raised
    assert all(max(one.found.simulated.peaks) <= problem.device_limit for one in planner.tries)


def test_after_some_plans_the_fastest_that_needed_no_eviction_is_kept(problem):
    planner = Planner(problem)
    decision, seconds = planner.start(), iter((1.0, 1.3, 1.1, 1.2, 1.2))
    for number in range(ROUNDS):
        if decision.settled:
            break
        evicted = problem.device_limit // 50 if number < ROUNDS - 2 else 0
        decision = planner.judge(measured(problem, planner.tries[-1].found, seconds=next(seconds), evicted=evicted))
    assert decision.settled and len(planner.tries) <= ROUNDS
    clean = [one for one in planner.tries if not one.evicted]
    assert planner.kept is min(clean, key=lambda one: one.seconds)
    assert decision.config == (None if planner.kept is planner.tries[-1] else planner.kept.config)


def test_a_slow_link_is_told_from_slow_computation(problem):
    found = Search(problem).best()
    predicted = passes_seconds(problem, found.simulated)
    waiting = measured(problem, found, seconds=1.4, stall=0.4 * predicted)
    link = corrected(problem, found.plan, found.simulated, waiting).link
    assert link.out < problem.link.out and link.back < problem.link.back
    slower = corrected(problem, found.plan, found.simulated, measured(problem, found, seconds=1.4))
    assert slower.link == problem.link
    again = simulate(slower, found.plan)
    assert passes_seconds(slower, again) == pytest.approx(1.4 * predicted, rel=0.1)
    near = measured(problem, found, seconds=1.03)
    assert corrected(problem, found.plan, found.simulated, near) == problem
    both = corrected(problem, found.plan, found.simulated, measured(problem, found, seconds=1.6, stall=0.3 * predicted))
    assert both.link.out < problem.link.out
    kept, before = (Search(one).simulated(Search(one).keep_all).seconds for one in (both, problem))
    assert 1.2 < kept / before < 1.5
    # What left in an emergency took the link, and the time of whoever waited for it.
    evicted = measured(problem, found, seconds=1.6, stall=0.3 * predicted, evicted=problem.device_limit // 50)
    after = corrected(problem, found.plan, found.simulated, evicted)
    assert (after.link, after.classes) == (problem.link, problem.classes) and after.stages != problem.stages


@either
@pytest.mark.parametrize("speed", [1 / 3, 3.0])
def test_a_link_is_found_to_be_as_fast_as_it_is(problem, speed):
    """``speed``: what it really has of what it is taken for. Computation takes a tenth longer, too."""
    found = Search(problem).least()  # it waits for copies
    slower = corrected(problem, found.plan, found.simulated, measured(problem, found, seconds=1.1))
    real = dataclasses.replace(slower, link=problem.link.scaled(speed))
    truth = simulate(real, found.plan)
    rows = zip(truth.peaks, truth.stalls, strict=True)
    seen = [Measured(stage, passes_seconds(real, truth), peak, stall) for stage, (peak, stall) in enumerate(rows)]
    after = corrected(problem, found.plan, found.simulated, seen)
    assert after.link.out == pytest.approx(real.link.out, rel=0.1)
    for plan in (found.plan, Search(problem).keep_all):  # in a pipeline some waits fall into time that is idle anyway
        assert simulate(after, plan).seconds == pytest.approx(simulate(real, plan).seconds, rel=0.08)


def test_gradients_of_weights_are_corrected_with_the_rest_of_the_backward(problem):
    line = dataclasses.replace(problem.pipeline, split_backward=True)
    split = [dataclasses.replace(one, weight_seconds=one.backward_seconds / 2) for one in problem.classes[0].operators]
    kinds = (dataclasses.replace(problem.classes[0], operators=tuple(split)), *problem.classes[1:])
    problem = dataclasses.replace(problem, pipeline=line, classes=kinds)
    found = Search(problem).best()
    faster = corrected(problem, found.plan, found.simulated, measured(problem, found, seconds=0.4))
    assert problems_of(faster) == []
    shares = [(one.weight_seconds, one.backward_seconds / 2) for one in faster.classes[0].operators]
    assert all(weight == pytest.approx(half) for weight, half in shares) and any(weight for weight, _ in shares)


def test_what_the_engine_takes_is_corrected_with_the_rest(problem):
    problem = dataclasses.replace(problem, host=HostCost(moved_seconds=0.01, rerun_seconds=0.02))
    found = Search(problem).best()
    faster = corrected(problem, found.plan, found.simulated, measured(problem, found, seconds=0.4))
    before, after = (one.classes[0].forward_seconds for one in (problem, faster))
    assert after < before
    assert faster.host.moved_seconds == pytest.approx(0.01 * after / before)
    assert faster.host.rerun_seconds == pytest.approx(0.02 * after / before)


def test_where_copies_block_a_plan_that_swaps_and_took_longer_makes_swapping_dear(problem):
    link = dataclasses.replace(problem.link, blocking=True, out=40.0, back=40.0)
    problem = dataclasses.replace(problem, link=link)
    found = Search(problem).best()
    assert max(found.simulated.stalls) > 0  # it swaps
    after = corrected(problem, found.plan, found.simulated, measured(problem, found, seconds=1.2))
    again = simulate(after, found.plan)
    predicted = passes_seconds(problem, found.simulated)
    assert after.link.out < link.out and after.classes == problem.classes
    assert predicted < passes_seconds(after, again) <= predicted * 1.25
    assert max(Search(after).best().simulated.stalls) < max(again.stalls)
    # What took less time than predicted says nothing about copies alone.
    faster = corrected(problem, found.plan, found.simulated, measured(problem, found, seconds=0.8))
    assert faster.classes != problem.classes


def test_where_nothing_fits_the_smallest_plan_runs_and_the_reason_is_told(problem):
    tight = dataclasses.replace(problem, device_limit=1)
    decision = Planner(tight).start()
    assert decision.config is not None
    assert any("no plan fits" in line and "evicted" in line for line in decision.lines)
    planner = Planner(tight)
    planner.start()
    decision = planner.judge(measured(tight, planner.tries[0].found, evicted=MB))
    assert decision.settled and not decision.fits


def test_a_settled_plan_that_no_longer_fits_is_followed_by_another(problem):
    planner = Planner(problem)
    planner.start()
    planner.judge(measured(problem, planner.tries[0].found))
    settled = planner.kept.found
    decision = planner.overrun([(number, problem.device_limit // 10, 0) for number in range(len(problem.stages))])
    assert decision.config is not None and not decision.settled and planner.kept is None
    assert max(simulate(problem, planner.tries[0].found.plan).peaks) <= max(settled.simulated.peaks)


def test_an_allocator_that_had_to_retry_makes_a_smaller_plan_whatever_the_peak_says(problem):
    planner = Planner(problem)
    planner.start()
    before = planner.tries[0].found
    decision = planner.judge(measured(problem, before, over=-problem.device_limit // 10, retries=1))
    assert decision.config is not None and not decision.settled
    assert any("the allocator had to give back memory and retry" in line for line in decision.lines)
    after = planner.tries[1].found
    assert max(simulate(problem, after.plan).peaks) < max(before.simulated.peaks)
    while not decision.settled:  # the same shortest time, without a retry
        decision = planner.judge(measured(planner.problem, planner.tries[-1].found))
    assert not planner.kept.retried


def test_a_settled_plan_whose_allocator_retries_in_every_call_is_followed_by_a_smaller_one(problem):
    planner = Planner(problem)
    planner.start()
    planner.judge(measured(problem, planner.tries[0].found))
    settled = planner.kept.found
    decision = planner.overrun([(number, 0, 1) for number in range(len(problem.stages))])
    assert decision.config is not None and not decision.settled
    assert max(simulate(problem, planner.tries[0].found.plan).peaks) < max(settled.simulated.peaks)


@pytest.mark.parametrize("split", [False, True])
def test_states_that_are_split_need_not_be_split(split):
    problem = small_problem(layers=3, limit=600 * MB)
    stages = tuple(dataclasses.replace(stage, static_bytes=5000 * MB) for stage in problem.stages)
    (said, _) = Planner(dataclasses.replace(problem, stages=stages), split).start().lines
    assert "no plan fits" in said and ("--use-distributed-optimizer" in said) is not split

"""The planner's simulation: step time and peaks are those of a discrete-event machine that runs command by command."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_mem.adaptive import Plan, StagePlan, simulate
from mindspeed_mem.adaptive.problem.definition import GB
from mindspeed_mem.adaptive.search import many
from mindspeed_mem.adaptive.search.decisions import is_valid
from mindspeed_mem.adaptive.search.simulation import StageTrack
from tests.planning import LAYER, SPLIT_LAYER, small_problem
from tests.streams import Machine

CLOSE = 1e-6  # the goal is 2 %; where the rules are the same, nothing but rounding is left


def letters_for(draw, kind, inputs_move, first):
    """One layer's letters, made valid by keeping what cannot be done."""
    text = ""
    for group in kind.groups:
        letter = "-" if group.from_previous and first else draw(st.sampled_from("KSR"))
        rest = "K" * (len(kind.groups) - len(text) - 1)
        fine = letter == "-" or is_valid(kind, text + letter + rest, inputs_move)
        text += letter if fine else "K"
    return text


@st.composite
def cases(draw):
    stages = draw(st.integers(1, 3))
    virtual = draw(st.sampled_from([1, 2])) if stages > 1 else 1
    schedule = draw(st.sampled_from(["1f1b", "zb", "v"] if virtual > 1 else ["1f1b", "zb"] if stages > 1 else ["1f1b"]))
    micro_batches = stages * draw(st.integers(1, 3)) if virtual > 1 else draw(st.integers(1, 5))
    cap = draw(st.sampled_from([None, stages * virtual // 2 + virtual])) if schedule != "1f1b" else None
    problem = small_problem(
        stages=stages,
        virtual=virtual,
        layers=draw(st.integers(1, 3)),
        micro_batches=micro_batches,
        link=draw(st.sampled_from([1.0, 4.0, 20.0])),
        send=draw(st.sampled_from([0.0])),
        blocking=draw(st.booleans()),
        kind=draw(st.sampled_from([LAYER, SPLIT_LAYER])),
        schedule=schedule,
        cap=cap,
        split_backward=draw(st.booleans()),
    )
    inputs_move = draw(st.booleans())
    plans = []
    for stage in problem.stages:
        parts = tuple(
            tuple(letters_for(draw, LAYER, inputs_move, place == 0) for place in range(len(part.layers)))
            for part in stage.parts
        )
        plans.append(StagePlan(parts=parts, distance=draw(st.integers(1, 14))))
    return problem, Plan(stages=tuple(plans), inputs_move=inputs_move)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_time_and_peaks_are_those_of_the_machine(case):
    problem, plan = case
    seconds, peaks = Machine(problem, plan).run()
    found = simulate(problem, plan)
    assert found.seconds == pytest.approx(seconds, rel=CLOSE)
    assert found.peaks == pytest.approx(peaks, rel=CLOSE)


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([100, 400, 10_000]))
def test_a_window_for_late_copies_is_in_time_and_bounds_what_they_hold(case, window):
    problem, plan = case
    at_once = simulate(problem, plan)
    plan = dataclasses.replace(plan, window_bytes=window * 10**6)
    seconds, peaks = Machine(problem, plan).run()
    found = simulate(problem, plan)
    if not problem.link.blocking:
        assert found.seconds == pytest.approx(seconds, rel=CLOSE) and found.seconds <= at_once.seconds * (1 + CLOSE)
        assert all(most <= bound for most, bound in zip(peaks, found.peaks, strict=True))
    for one, without in zip(found.peaks, at_once.peaks, strict=True):
        assert without <= one <= without + (0 if problem.link.blocking else plan.window_bytes)


@settings(max_examples=40, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_plans_played_at_once_take_to_the_bit_what_each_takes_by_itself(case, chance):
    problem, plan = case
    problem = dataclasses.replace(problem, link=dataclasses.replace(problem.link, slows=chance.choice([0.0, 0.1])))
    number = chance.randrange(len(plan.stages))
    mine = plan.stages[number]
    texts = sorted({text for part in mine.parts for text in part[1:]} | {"K" * len(LAYER.groups)})
    several = [mine]
    for _ in range(5):
        parts = tuple((part[0], *(chance.choice(texts) for _ in part[1:])) for part in mine.parts)
        several.append(dataclasses.replace(mine, parts=parts))
    letters = many.letters_of(several)
    alone = many.alone(problem, number, letters, mine.distance)
    together = many.Together(problem, plan.stages, number).play(letters, mine.distance)
    for place, one in enumerate(several):
        track = StageTrack(problem, number, one)
        assert (track.alone(), track.peak, track.stall) == tuple(row[place] for row in alone)
        every = (*plan.stages[:number], one, *plan.stages[number + 1 :])
        found = simulate(problem, dataclasses.replace(plan, stages=every))
        assert (found.seconds, found.peaks[number], found.stalls[number]) == tuple(row[place] for row in together)


def test_a_window_saves_waiting_for_copies():
    problem = small_problem(layers=4, micro_batches=2, link=0.3)
    moved = StagePlan(parts=(("-SSKKK", *["KSSKKK"] * 3),))
    stalls = []
    for window in (0, 200, 600):
        simulated = simulate(problem, Plan(stages=(moved,), window_bytes=window * 10**6))
        stalls.append(simulated.stalls[0])
    assert stalls == sorted(stalls, reverse=True) and len(set(stalls)) == 3


@pytest.mark.parametrize(
    ("virtual", "link", "schedule"),
    [(1, 1.0, "1f1b"), (1, 4.0, "1f1b"), (2, 1.0, "1f1b"), (1, 1.0, "zb"), (2, 1.0, "v")],
)
def test_many_micro_batches_go_on_at_the_pace_of_the_first(virtual, link, schedule):
    problem = small_problem(
        stages=3, virtual=virtual, layers=2, micro_batches=75, link=link, schedule=schedule, kind=SPLIT_LAYER
    )
    parts = tuple(("-SKSKR"[: len(LAYER.groups)].ljust(len(LAYER.groups), "K"),) * 2 for _ in range(virtual))
    parts = tuple((of[0], "K" + of[1][1:]) for of in parts)
    plan = Plan(stages=(StagePlan(parts=parts, distance=3),) * 3)
    seconds, peaks = Machine(problem, plan).run()
    found = simulate(problem, plan)
    assert found.seconds == pytest.approx(seconds, rel=0.002)
    assert found.peaks == pytest.approx(peaks, rel=CLOSE)


def test_copies_that_hide_cost_nothing_and_those_that_do_not_are_waited_for():
    fast, slow = (small_problem(stages=1, layers=3, micro_batches=2, link=link) for link in (1000.0, 0.02))
    kept = StagePlan(parts=((f"-{'K' * 5}", "K" * 6, "K" * 6),))
    moved = StagePlan(parts=((f"-{'K' * 5}".replace("K", "S", 1), "K" * 6, "K" * 6),), distance=4)
    for problem, waits in ((fast, False), (slow, True)):
        without, with_swap = (simulate(problem, Plan(stages=(stage,))) for stage in (kept, moved))
        assert (with_swap.seconds > without.seconds * 1.001) == waits
        assert (with_swap.stalls[0] > 0) == waits
        assert with_swap.seconds - without.seconds == pytest.approx(with_swap.stalls[0])


def test_over_a_link_that_blocks_every_copy_takes_its_time_wherever_it_starts():
    problem = small_problem(stages=1, layers=3, micro_batches=2, link=1000.0, blocking=True)
    group = LAYER.groups[1]
    kept = StagePlan(parts=(("-KKKKK", "KKKKKK", "KKKKKK"),))
    moved = [StagePlan(parts=(("-SKKKK", "KSKKKK", "KSKKKK"),), distance=distance) for distance in (1, 3, 7, 40)]
    without, *found = (simulate(problem, Plan(stages=(stage,))) for stage in (kept, *moved))
    copies = 2 * 3 * 2 * group.bytes / GB / 1000.0  # micro-batches, layers, out and back
    for one in found:
        assert one.seconds - without.seconds == pytest.approx(copies)
        assert one.stalls[0] == pytest.approx(copies)
    peaks = [one.peaks[0] for one in found]
    assert peaks == sorted(peaks) and peaks[0] < min(peaks[-1], without.peaks[0])


def test_recomputation_frees_what_it_makes_again_and_takes_its_time():
    problem = small_problem(stages=1, layers=4, micro_batches=2, link=1.0)
    group = LAYER.groups[-1]
    kept = StagePlan(parts=(("-KKKKK", *["K" * 6] * 3),))
    again = StagePlan(parts=(("-KKKKR", *["KKKKKR"] * 3),))
    without, found = (simulate(problem, Plan(stages=(stage,))) for stage in (kept, again))
    assert found.seconds - without.seconds == pytest.approx(2 * 4 * group.recompute_seconds)
    assert 3 * group.bytes <= without.peaks[0] - found.peaks[0] <= 4 * group.bytes  # one is there while it is needed


def test_copies_that_slow_computation_cost_a_share_of_their_time():
    problem = small_problem(stages=1, layers=3, micro_batches=2, link=1000.0)
    costly = dataclasses.replace(problem, link=dataclasses.replace(problem.link, slows=0.5))
    group = LAYER.groups[1]
    kept = StagePlan(parts=(("-KKKKK", "KKKKKK", "KKKKKK"),))
    moved = StagePlan(parts=(("-SKKKK", "KSKKKK", "KSKKKK"),), distance=4)
    before, after = (simulate(problem, Plan(stages=(stage,))).seconds for stage in (kept, moved))
    assert simulate(costly, Plan(stages=(kept,))).seconds == before
    slowed = simulate(costly, Plan(stages=(moved,))).seconds
    copies = 2 * 3 * 2 * group.bytes / GB / 1000.0  # micro-batches, layers, out and back
    assert slowed - after == pytest.approx(copies / 2, rel=0.01)


def test_a_later_stage_waits_for_the_one_before():
    problem = small_problem(stages=2, layers=1, micro_batches=1, link=1.0)
    later = dataclasses.replace(problem, pipeline=dataclasses.replace(problem.pipeline, send_seconds=0.25))
    plan = Plan(stages=(StagePlan(parts=(("-KKKKK",),)),) * 2)
    assert simulate(later, plan).seconds == pytest.approx(simulate(problem, plan).seconds + 0.5)

"""The planner's simulation: step time and peaks are those of a discrete-event machine that runs command by command."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_mem.activation.observe.rank_profile import HostCost, Outside
from mindspeed_mem.adaptive import Plan, Search, StagePlan, simulate
from mindspeed_mem.adaptive.problem.definition import GB
from mindspeed_mem.adaptive.search import many
from mindspeed_mem.adaptive.search.baselines import full_recompute
from mindspeed_mem.adaptive.search.decisions import is_valid, under
from mindspeed_mem.adaptive.search.simulation import StageTrack, fewer, fits, most_played
from tests.planning import LAYER, MB, SPLIT_LAYER, small_problem, tiny_class
from tests.streams import Machine

ENGINE = HostCost(moved_seconds=0.01, rerun_seconds=0.02)
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
    idle, gradients = stages > 1 and draw(st.booleans()), draw(st.booleans())
    flags = {"inputs_move": inputs_move, "idle_prefetch": idle, "output_gradients": gradients}
    return problem, Plan(stages=tuple(plans), **flags)


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from([HostCost(), ENGINE]))
def test_time_and_peaks_are_those_of_the_machine(case, host):
    problem, plan = case
    problem = dataclasses.replace(problem, host=host)
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


def with_temporaries(problem, chance):
    """The same with 40 MB of each stage's temporaries known by operator, and groups that leave in two parts."""
    [kind] = problem.classes

    def some():
        return {f"{way}_temporary_bytes": chance.randint(0, 40) * MB for way in ("forward", "backward")}

    groups = [
        dataclasses.replace(
            one,
            recompute_temporary_bytes=chance.randint(0, 40) * MB,
            leaves=((one.used_by[1], (one.bytes - one.weight_bytes) // 3),) if len(one.used_by) > 1 else (),
        )
        for one in kind.groups
    ]
    kind = dataclasses.replace(
        kind, operators=tuple(dataclasses.replace(one, **some()) for one in kind.operators), groups=tuple(groups)
    )
    stages = []
    for stage in problem.stages:
        parts = [
            dataclasses.replace(
                part, before=dataclasses.replace(part.before, **some()), after=dataclasses.replace(part.after, **some())
            )
            for part in stage.parts
        ]
        stages.append(dataclasses.replace(stage, parts=tuple(parts), operator_temporary_bytes=40 * MB))
    return dataclasses.replace(problem, classes=(kind,), stages=tuple(stages))


@settings(max_examples=40, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_plans_played_at_once_take_to_the_bit_what_each_takes_by_itself(case, chance):
    problem, plan = case
    problem = dataclasses.replace(problem, link=dataclasses.replace(problem.link, slows=chance.choice([0.0, 0.1])))
    problem = dataclasses.replace(problem, host=chance.choice([HostCost(), ENGINE]))
    if chance.random() < 0.5:
        problem = with_temporaries(problem, chance)
    number, moving = chance.randrange(len(plan.stages)), under(problem, plan)
    mine = plan.stages[number]
    texts = sorted({text for part in mine.parts for text in part[1:]} | {"K" * len(LAYER.groups)})
    several = [mine]
    for _ in range(5):
        parts = tuple((part[0], *(chance.choice(texts) for _ in part[1:])) for part in mine.parts)
        several.append(dataclasses.replace(mine, parts=parts))
    letters = many.letters_of(several)
    alone = many.alone(moving, number, letters, mine.distance)
    together = many.Together(moving, plan.stages, number).play(letters, mine.distance)
    for place, one in enumerate(several):
        track = StageTrack(moving, number, one)
        assert (track.alone(), track.peak, track.stall) == tuple(row[place] for row in alone)
        every = (*plan.stages[:number], one, *plan.stages[number + 1 :])  # none of them in idle time
        found = simulate(problem, dataclasses.replace(plan, stages=every, idle_prefetch=False))
        assert (found.seconds, found.peaks[number], found.stalls[number]) == tuple(row[place] for row in together)


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("plays", [{}, {"window_bytes": 100 * MB}, {"idle_prefetch": True}])
@pytest.mark.parametrize("blocking", [False, True])
def test_the_pace_of_many_micro_batches_is_to_the_bit_that_of_two_pipelines_played_from_the_start(
    virtual, plays, blocking
):
    problem = small_problem(
        stages=3, virtual=virtual, layers=2, micro_batches=60, link=0.4, send=0.03, blocking=blocking
    )
    texts = [("-KKKKK", "KKSKRK"), ("-SKKSK", "KKSKKS"), ("-KKKSK", "SKKKKK")]
    stages = tuple(StagePlan(parts=(text,) * virtual, distance=3 + 4 * place) for place, text in enumerate(texts))
    plan = Plan(stages=stages, **plays)
    few, less = most_played(problem), fewer(problem)
    assert less < few < 60
    a, b = (simulate(problem.with_micro_batches(count), plan) for count in (few, less))
    more = (60 - few) / (few - less)
    once = max(stage.step_seconds for stage in problem.stages)
    found = simulate(problem, plan)
    assert found.timeline == a.timeline and any(found.stalls)
    assert found.seconds == a.timeline.makespan + more * (a.timeline.makespan - b.timeline.makespan) + once
    assert found.stalls == tuple(one + more * (one - other) for one, other in zip(a.stalls, b.stalls, strict=True))
    shared = problem.with_micro_batches(few).shared_passes(less)
    assert min(shared) > 0
    if "idle_prefetch" not in plays:  # each of these passes runs at the same time in both
        for count, one, other in zip(shared, a.timeline.stages, b.timeline.stages, strict=True):
            assert one[:count] == other[:count]
    for limit in (max(found.peaks), max(found.peaks) - 1):
        assert fits(problem.with_limit(limit), plan) == (limit == max(found.peaks))


def test_temporaries_count_while_their_operator_runs():
    """One layer of three groups, kept: its last operator takes 50 MB in backward, when all is there."""
    kind = tiny_class([100, 200, 300], [0.1, 0.1, 0.1])

    def peak(text, again=0, **temporary):
        ways = [{}, *[{f"{one}_temporary_bytes": size * MB} for one, size in temporary.items()], {}]
        operators = [dataclasses.replace(one, **ways[0]) for one in kind.operators]
        operators[-1] = dataclasses.replace(operators[-1], **ways[1])
        groups = [dataclasses.replace(one, recompute_temporary_bytes=again * MB) for one in kind.groups]
        some = dataclasses.replace(kind, operators=tuple(operators), groups=tuple(groups))
        problem = small_problem(layers=1, micro_batches=1, kind=some)
        part = dataclasses.replace(problem.stages[0].parts[0], before=Outside(), after=Outside())
        stage = dataclasses.replace(
            problem.stages[0], parts=(part,), static_bytes=0, temporary_bytes=80 * MB, operator_temporary_bytes=80 * MB
        )
        problem = dataclasses.replace(problem, stages=(stage,))
        return simulate(problem, Plan(stages=(StagePlan(parts=((text,),)),))).peaks[0] / MB

    assert peak("KKK", backward=0) == 600 and peak("KKK", backward=50) == peak("KKK", forward=50) == 650
    assert peak("KKK", backward=90) == 680  # no more than all that is known
    assert peak("KKR", backward=0) == 600 and peak("KKR", again=30, backward=0) == 630


@pytest.mark.parametrize(("stages", "schedule"), [(1, "1f1b"), (2, "zb")])
def test_gradients_of_weights_take_for_a_short_time_what_their_operator_does(stages, schedule):
    """All of 600 MB waits for them, and 100 MB of output gradients, when the first of them takes 50 MB."""
    kind = tiny_class([100, 200, 300], [0, 0, 0])
    groups = tuple(dataclasses.replace(one, weight_bytes=one.bytes) for one in kind.groups)
    first, *between, last = kind.operators
    first = dataclasses.replace(first, weight_seconds=0.1, weight_bytes=60 * MB)
    last = dataclasses.replace(last, weight_seconds=0.1, weight_bytes=40 * MB, backward_temporary_bytes=50 * MB)
    kind = dataclasses.replace(kind, operators=(first, *between, last), groups=groups)
    problem = small_problem(
        stages=stages, layers=1, micro_batches=1, kind=kind, schedule=schedule, split_backward=stages == 1
    )
    memory = {"static_bytes": 0, "temporary_bytes": 80 * MB, "operator_temporary_bytes": 80 * MB}
    of_stages = []
    for stage in problem.stages:
        part = dataclasses.replace(stage.parts[0], before=Outside(), after=Outside())
        of_stages.append(dataclasses.replace(stage, parts=(part,), **memory))
    problem = dataclasses.replace(problem, stages=tuple(of_stages))
    assert simulate(problem, Search(problem).keep_all).peaks == (750 * MB,) * stages


def test_copies_under_way_during_gradients_of_weights_are_told_apart():
    """They are of the one part or of the other, or there are none, and the same script runs beside them."""
    problem = small_problem(
        stages=3, virtual=2, layers=1, micro_batches=6, link=1.0, kind=SPLIT_LAYER, schedule="zb", split_backward=False
    )
    kept = StagePlan(parts=(("-KKKKK",), ("-KKKKK",)))
    mine = StagePlan(parts=(("-KKKKS",), ("-KKKSS",)), distance=6)
    plan = Plan(stages=(kept, mine, kept))
    [seconds], [peak], [stall] = many.Together(problem, plan.stages, 1).play(many.letters_of([mine]), mine.distance)
    found = simulate(problem, plan)
    assert (found.seconds, found.peaks[1], found.stalls[1]) == (seconds, peak, stall)


def test_what_a_group_no_longer_needs_leaves_early():
    kind = tiny_class([100, 0, 0], [0.1, 0, 0])
    group = dataclasses.replace(kind.groups[0], used_by=("a", "end"), leaves=(("end", 70 * MB),))
    for leaves, most in ((group.leaves, 130), ((), 200)):
        groups = (dataclasses.replace(group, leaves=leaves), *kind.groups[1:])
        operators = (
            dataclasses.replace(kind.operators[0], backward_temporary_bytes=100 * MB),
            *kind.operators[1:],
        )
        some = dataclasses.replace(kind, groups=groups, operators=operators)
        problem = small_problem(layers=1, micro_batches=1, kind=some)
        part = dataclasses.replace(problem.stages[0].parts[0], before=Outside(), after=Outside())
        stage = dataclasses.replace(
            problem.stages[0],
            parts=(part,),
            static_bytes=0,
            temporary_bytes=100 * MB,
            operator_temporary_bytes=100 * MB,
        )
        problem = dataclasses.replace(problem, stages=(stage,))
        assert simulate(problem, Search(problem).keep_all).peaks == (most * MB,)


def test_copies_in_idle_time_are_waited_for_less_and_hold_no_more():
    """When the last micro-batches leave the first stage, there is room for what is swapped of them."""
    problem = small_problem(stages=2, layers=3, micro_batches=6, link=2.0)
    swapped = "S" * len(LAYER.groups)
    part = ("-" + swapped[1:], swapped, "K" * len(LAYER.groups))
    plan = Plan(stages=(StagePlan(parts=(part,), distance=1),) * 2)
    plain, ours = simulate(problem, plan), simulate(problem, dataclasses.replace(plan, idle_prefetch=True))
    assert ours.stalls[0] < plain.stalls[0] and ours.seconds < plain.seconds
    assert ours.peaks == plain.peaks


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


def test_what_the_engine_takes_for_many_small_tensors_is_in_the_time_of_each_plan():
    tensors = {"norm": 16, "core": 3}
    groups = [dataclasses.replace(one, bytes=8, tensors=tensors.get(one.name, 1)) for one in LAYER.groups]
    kind = dataclasses.replace(LAYER, groups=tuple(dataclasses.replace(one, recompute_keeps=0) for one in groups))
    problem = small_problem(stages=1, layers=4, micro_batches=2, link=1000.0, kind=kind, blocking=True, engine=0.001)
    free = dataclasses.replace(problem, host=HostCost())
    letters = {"-KKKKK": 0, "-SKKKK": 16 * 0.001, "-RKKKK": 0.002, "-SKSKR": (16 + 3) * 0.001 + 0.002}
    for text, each in letters.items():  # with the copies of 8 bytes themselves
        plan = Plan(stages=(StagePlan(parts=((text, *["K" + text[1:]] * 3),)),))
        with_it, without = (simulate(one, plan).seconds for one in (problem, free))
        assert with_it - without == pytest.approx(2 * 4 * each, abs=1e-9)
    whole = full_recompute(problem)  # Megatron's, without the engine
    assert whole.seconds == full_recompute(free).seconds


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


def test_a_part_may_have_no_layers():
    """The last one has the head alone. Copies of another part's backward start in its own, which the machine, where
    operators start them, leaves out."""
    problem = small_problem(stages=2, virtual=2, micro_batches=4, link=1.0)
    first, last = problem.stages
    parts = (last.parts[0], dataclasses.replace(last.parts[1], layers=()))
    problem = dataclasses.replace(problem, stages=(first, dataclasses.replace(last, parts=parts)))
    for letter in "KSR":
        plans = []
        for stage in problem.stages:
            texts = [[_letters(letter, place == 0) for place in range(len(part.layers))] for part in stage.parts]
            plans.append(StagePlan(parts=tuple(map(tuple, texts)), distance=14))
        plan = Plan(stages=tuple(plans), inputs_move=True)
        seconds, peaks = Machine(problem, plan).run()
        found = simulate(problem, plan)
        assert found.peaks == pytest.approx(peaks, rel=CLOSE)
        assert found.seconds <= seconds * (1 + CLOSE)
        assert letter == "S" or found.seconds == pytest.approx(seconds, rel=CLOSE)
        together = many.Together(under(problem, plan), plan.stages, 1).play(many.letters_of([plans[1]]), 14)
        assert [row[0] for row in together] == [found.seconds, found.peaks[1], found.stalls[1]]


def _letters(letter, first):
    """A layer of which all that may be is of this letter."""
    text = ""
    for group in LAYER.groups:
        wanted = "-" if group.from_previous and first else letter
        rest = "K" * (len(LAYER.groups) - len(text) - 1)
        text += wanted if wanted == "-" or is_valid(LAYER, text + wanted + rest, True) else "K"
    return text


def test_a_plan_has_letters_for_each_layer():
    problem = small_problem(layers=3)
    [plan] = Search(problem).best().plan.stages
    short = dataclasses.replace(plan, parts=(plan.parts[0][:2],))
    with pytest.raises(ValueError, match="shorter"):
        simulate(problem, Plan(stages=(short,)))

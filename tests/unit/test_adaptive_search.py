"""The planner against all there is: where every plan can be tried, it finds one within 0.3 % of the best."""

import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_mem import reserve
from mindspeed_mem.adaptive import InfeasibleError, Plan, Search, StagePlan, simulate
from mindspeed_mem.adaptive.problem import from_shape
from mindspeed_mem.adaptive.problem.definition import GB, Problem
from mindspeed_mem.adaptive.problem.shape import Degrees, Machine, Shape
from mindspeed_mem.adaptive.run import worth
from mindspeed_mem.adaptive.search import milp
from mindspeed_mem.adaptive.search.baselines import full_recompute
from mindspeed_mem.adaptive.search.decisions import Count, host_bytes, is_valid, is_valid_stage, key
from mindspeed_mem.adaptive.search.milp import Rules
from mindspeed_mem.adaptive.search.plan_file import memory_config
from mindspeed_mem.adaptive.search.search import MEGATRON
from tests.planning import LAYER, MB, SPLIT_LAYER, small_problem, tiny_class
from tests.planning_costs import cycle_seconds, host_gb, is_allowed, stage_gb
from tests.sweeping import but

GOAL = 1.003

kinds = st.builds(
    tiny_class,
    st.lists(st.integers(20, 400), min_size=3, max_size=3),
    st.lists(st.sampled_from([0.0, 0.005, 0.02, 0.1, 0.3]), min_size=3, max_size=3),
    st.booleans(),
)
problems = st.builds(
    small_problem,
    kind=kinds,
    stages=st.just(1),
    layers=st.integers(1, 3),
    micro_batches=st.integers(1, 3),
    link=st.sampled_from([0.3, 1.0, 3.0, 30.0]),
    blocking=st.booleans(),
    host=st.sampled_from([None, 300 * MB]),
    engine=st.sampled_from([0.0, 0.02]),
)
shares = st.floats(0.0, 1.0)


def every_count(problem, stage, rules):
    """All counts of a stage that keep the rules and the host's limit."""
    mine = [block for block in problem.blocks if block.stage == stage]
    for chosen in itertools.product(*(_of_block(block) for block in mine)):
        counts = {key(block): row for block, row in zip(mine, chosen, strict=True)}
        limit = problem.host_limit
        if is_allowed(problem, counts, stage, rules) and (
            limit is None or host_gb(problem, counts, stage) * GB <= limit
        ):
            yield counts


def _of_block(block):
    layers = len(block.layers)
    one = [Count(s, r) for s in range(layers + 1) for r in range(layers + 1 - s)]
    return itertools.product(one, repeat=len(block.kind.groups))


@settings(max_examples=60, deadline=None)
@given(problems, st.booleans(), st.sampled_from([0, 1]), shares)
def test_the_program_finds_the_shortest_cycle_of_all_counts(problem, inputs_move, guard, share):
    rules = Rules(inputs_move=inputs_move, guard=guard)
    all_of_them = [
        (stage_gb(problem, counts, 0, rules), cycle_seconds(problem, counts, 0))
        for counts in every_count(problem, 0, rules)
    ]
    sizes = [size for size, _ in all_of_them]
    budget = min(sizes) * (1 - share) + max(sizes) * share + 1e-6
    best = min(seconds for size, seconds in all_of_them if size <= budget)
    counts, seconds, gap = milp.solve(problem, 0, budget, rules)
    assert gap <= milp.GAP and seconds == pytest.approx(cycle_seconds(problem, counts, 0), rel=1e-3)
    assert milp.bound(problem, 0, budget, rules) <= best * (1 + 1e-6)
    assert is_allowed(problem, counts, 0, rules)
    assert stage_gb(problem, counts, 0, rules) <= budget * (1 + 1e-6)
    assert cycle_seconds(problem, counts, 0) <= best * GOAL
    assert milp.solve(problem, 0, min(sizes) * 0.99 - 1e-3, rules) is None


def every_plan(problem, distances):
    """All plans of a problem of one class; distances: of each stage."""
    [kind] = problem.classes
    texts = ["".join(text) for text in itertools.product("KSR", repeat=len(kind.groups))]
    for inputs_move in (False, True):
        fine = [text for text in texts if is_valid(kind, text, inputs_move)]
        stages = [
            [one for one in _every_stage(problem, number, fine, far) if _host_has_room(problem, number, one)]
            for number, far in enumerate(distances)
        ]
        for chosen in itertools.product(*stages):
            yield Plan(stages=chosen, inputs_move=inputs_move)


def _every_stage(problem, number, texts, distances):
    layers = [len(part.layers) for part in problem.stages[number].parts]
    for letters in itertools.product(texts, repeat=sum(layers)):
        rows = iter(letters)
        parts = tuple(tuple(itertools.islice(rows, count)) for count in layers)
        for distance in distances if any("S" in text for text in letters) else distances[:1]:
            yield StagePlan(parts=parts, distance=distance)


def _host_has_room(problem, number, stage):
    return problem.host_limit is None or host_bytes(problem, number, stage) <= problem.host_limit


def one_stage(chance, blocking, engine=0.0):
    sizes = [chance.randint(20, 400) for _ in range(3)]
    seconds = [chance.choice([0.0, 0.005, 0.02, 0.1, 0.3]) for _ in range(3)]
    return small_problem(
        kind=tiny_class(sizes, seconds, chance.random() < 0.5),
        layers=chance.randint(1, 2),
        micro_batches=chance.randint(1, 2),
        link=chance.choice([0.3, 1.0, 3.0, 30.0]),
        host=chance.choice([None, 300 * MB]),
        blocking=blocking,
        engine=engine,
    )


def two_stages(chance, blocking, virtual=1):
    sizes = [chance.randint(20, 400) for _ in range(3)]
    seconds = [chance.choice([0.0, 0.005, 0.02, 0.1, 0.3]) for _ in range(3)]
    kind = tiny_class(sizes, seconds, chance.random() < 0.5)
    return small_problem(
        kind=dataclasses.replace(kind, groups=kind.groups[: 2 if virtual == 1 else 1]),
        stages=2,
        virtual=virtual,
        layers=1,
        micro_batches=chance.randint(1, 5) if virtual == 1 else 2 * chance.randint(1, 2),
        link=chance.choice([0.3, 1.0, 3.0, 30.0]),
        host=chance.choice([None, 300 * MB]),
        blocking=blocking,
    )


def two_stages_of_two_parts(chance, blocking):
    return two_stages(chance, blocking, virtual=2)


def where_the_engine_takes_its_time(chance, blocking):
    return one_stage(chance, blocking, engine=chance.choice([0.005, 0.03]))


def searched(problem, chance):
    """How many times as long as the best of all plans the one takes that is found."""
    searching = Search(problem)
    distances = [stage.distances for stage in searching._stages]
    results = [simulate(problem, plan) for plan in every_plan(problem, distances)]
    peaks = [max(one.peaks) for one in results]
    limit = round(min(peaks) + (max(peaks) - min(peaks)) * chance.random()) + 1
    found = searching.best(limit)
    assert max(found.simulated.peaks) <= limit
    for number, stage in enumerate(found.plan.stages):
        assert is_valid_stage(problem, number, stage, found.plan.inputs_move)
    plans = [one for name, one in found.rivals.items() if not name.startswith(MEGATRON)]  # which repeats what we cannot
    assert all(found.simulated.seconds <= one.seconds for one in plans)
    return found.simulated.seconds / min(one.seconds for one, peak in zip(results, peaks, strict=True) if peak <= limit)


# The search is no proof: of 390 random instances like these two were off, by 1.7 and 13 %, on the slowest link.
@pytest.mark.parametrize("blocking", [False, True], ids=["copies beside computation", "copies that block"])
@pytest.mark.parametrize(
    ("make", "count"),
    [(one_stage, 6), (two_stages, 5), (two_stages_of_two_parts, 3), (where_the_engine_takes_its_time, 6)],
)
def test_the_search_finds_the_fastest_of_all_plans(make, count, blocking):
    chance = random.Random(7)
    assert max(searched(make(chance, blocking), chance) for _ in range(count)) <= 1.0005


@pytest.mark.sweep
@pytest.mark.parametrize("make", [one_stage, two_stages, two_stages_of_two_parts])
def test_the_search_finds_the_fastest_of_all_plans_of_many_problems(make):
    chance = random.Random(11)
    ratios = sorted(searched(make(chance, number % 4 == 0), chance) for number in range(80))
    assert ratios[-1] <= 1.005 and sum(ratios) / len(ratios) <= 1.0005


@settings(max_examples=5, deadline=None)
@given(problems, st.lists(shares, min_size=2, max_size=5))
def test_more_memory_never_gives_a_slower_plan(problem, several):
    searching = Search(problem, work=5000)
    low, high = searching.floor(), max(searching.simulated(searching.keep_all).peaks)
    limits = sorted(round(low * (1 - share) + high * share) + 1 for share in several)
    seconds = [found.simulated.seconds for found in searching.curve(limits)]
    assert seconds == sorted(seconds, reverse=True)
    alone = [Search(problem, work=5000).best(limit).simulated.seconds for limit in limits]
    assert all(later <= earlier * GOAL for earlier, later in itertools.pairwise(alone))


@pytest.mark.parametrize(("virtual", "blocking"), [(1, False), (2, False), (1, True), (2, True)])
def test_on_a_pipeline_every_stage_fits_and_early_stages_do_more(virtual, blocking):
    problem = small_problem(stages=3, virtual=virtual, layers=4, micro_batches=6, link=2.0, blocking=blocking)
    searching = Search(problem)
    peaks = searching.simulated(searching.keep_all).peaks
    limit = round(min(peaks) * 1.02)
    found = searching.best(limit)
    assert max(found.simulated.peaks) <= limit
    assert found.simulated == simulate(problem, found.plan)
    kept = [sum(text.count("K") for part in stage.parts for text in part) for stage in found.plan.stages]
    assert kept[0] < kept[2]


def test_over_a_link_that_blocks_each_group_goes_the_cheaper_way():
    kind = tiny_class([100, 100, 100], [0.002, 0.02, 0.2], needs=False)  # 100 MB are copied out and back in 0.05 s
    problem = small_problem(kind=kind, layers=4, micro_batches=2, link=4.0, blocking=True)
    for limit, letters in ((1_250, {"R", "K"}), (1_000, {"R", "S", "K"})):
        found = Search(problem).best(limit * MB)
        [texts] = found.plan.stages[0].parts
        assert {letter for text in texts for letter in text} == letters
        assert {text[0] for text in texts} <= {"R", "K"} and {text[1] for text in texts} <= {"R", "K"}
        assert {text[2] for text in texts} <= {"S", "K"}


def test_without_swap_plans_keep_and_recompute():
    problem = small_problem(layers=4, micro_batches=2, link=50.0)
    joint, alone = Search(problem), Search(problem, swap=False)
    assert joint.floor() < alone.floor()
    limit = round(alone.floor() * 1.1)
    found, best = alone.best(limit), joint.best(limit)
    letters = {letter for text in found.plan.stages[0].parts[0] for letter in text}
    assert letters == {"-", "K", "R"} and not found.plan.inputs_move
    assert simulate(problem, found.plan) == found.simulated
    assert max(found.simulated.peaks) <= limit and found.simulated.seconds > best.simulated.seconds


def test_what_does_not_fit_names_bytes_stage_holders_and_what_to_try():
    problem = small_problem(stages=2, layers=3, micro_batches=4)
    with pytest.raises(InfeasibleError) as error:
        Search(problem).best(600 * MB)
    first, held, advice = str(error.value).splitlines()
    assert (
        first.startswith(f"no plan fits: pipeline stage {error.value.stage} needs ") and "limit is 572.2 MiB" in first
    )
    assert "parameters, gradients and optimizer states 476.8 MiB" in held
    assert len(advice.split(";")) == 3
    needed = error.value.needed_bytes
    assert Search(problem).best(needed).simulated.peaks[error.value.stage] <= needed
    least = Search(problem).least()
    assert Search(problem).floor() == needed == max(least.simulated.peaks)
    assert least.simulated == simulate(problem, least.plan)


def of_whole_layers(host: int | None = None) -> Problem:
    """What a layer hands on, and what its own code makes beside its operators, leave with all of the layer only."""
    groups = [
        dataclasses.replace(one, swappable=False, recompute_seconds=None) if one.name in ("input", "act") else one
        for one in LAYER.groups
    ]
    return small_problem(layers=6, link=50.0, host=host, kind=dataclasses.replace(LAYER, groups=tuple(groups)))


def test_whole_layers_leave_where_naming_operators_does_not_do():
    problem, freed, counts = of_whole_layers(), small_problem(layers=6, link=50.0), []
    search = Search(problem)
    assert search.floor() == Search(freed).floor()
    for more in range(0, 2400, 400):
        found = Search(problem).best(search.floor() + more * MB)
        swap = memory_config(problem, found.plan).swap
        whole = [layer for entry in swap.layer_swap or () for layer in entry.layers]
        assert whole == list(range(len(whole)))  # the first, which are back last
        assert not {layer for entry in swap.op_swap for layer in entry.layers} & set(whole)
        assert simulate(problem, found.plan) == found.simulated
        counts.append(len(whole))
    assert counts == sorted(counts, reverse=True) and counts[0] == 5 and counts[-1] == 0


def test_whole_layers_stay_where_the_host_has_no_room():
    limit = Search(of_whole_layers()).floor() + 100 * MB
    with pytest.raises(InfeasibleError) as error:
        Search(of_whole_layers(host=2000 * MB)).best(limit)
    assert error.value.needed_bytes > limit


def test_who_holds_what_does_not_count_what_no_operator_takes():
    """Temporaries of 700 MB are known operator by operator, and the peak is where an operator takes none of them."""
    problem = small_problem(layers=3, micro_batches=4)
    stages = tuple(dataclasses.replace(stage, temporary_bytes=700 * MB) for stage in problem.stages)
    whole = dataclasses.replace(problem, stages=stages)
    known = tuple(dataclasses.replace(stage, operator_temporary_bytes=700 * MB) for stage in stages)
    needed = {}
    for name, one in (("whole", whole), ("known", dataclasses.replace(problem, stages=known))):
        with pytest.raises(InfeasibleError) as error:
            Search(one).best(600 * MB)
        needed[name] = error.value.needed_bytes
        assert ("temporaries 667.6 MiB" in str(error.value)) == (name == "whole")
    assert needed["whole"] - needed["known"] == 700 * MB


def test_what_a_loss_takes_for_a_short_time_is_not_said_to_be_the_layers():
    problem = small_problem(layers=3)
    [stage], lines = problem.stages, []
    for nbytes in (0, 700 * MB):
        parts = tuple(
            dataclasses.replace(part, after=dataclasses.replace(part.after, forward_temporary_bytes=nbytes))
            for part in stage.parts
        )
        one = dataclasses.replace(stage, parts=parts, temporary_bytes=700 * MB, operator_temporary_bytes=700 * MB)
        with pytest.raises(InfeasibleError) as error:
            Search(dataclasses.replace(problem, stages=(one,))).best(600 * MB)
        lines.append(str(error.value))
    assert "the layers at work" in lines[0] and "embedding, head and loss at work" in lines[1]


def test_the_host_limit_holds():
    free = small_problem(layers=4, micro_batches=2, link=50.0)
    bound = small_problem(layers=4, micro_batches=2, link=50.0, host=200 * MB)
    limit = 2_800 * MB
    used = [host_bytes(p, 0, Search(p).best(limit).plan.stages[0]) for p in (free, bound)]
    assert used[0] > 200 * MB >= used[1]


def test_where_everything_fits_everything_is_kept():
    problem = small_problem(stages=2, layers=3, micro_batches=4)
    found = Search(problem).best()
    assert {letter for stage in found.plan.stages for text in stage.parts[0] for letter in text} == {"K", "-"}


def test_what_the_solver_prints_is_not_our_output(monkeypatch, capfd):
    import ctypes

    import scipy.optimize

    solve = scipy.optimize.milp

    def chatty(*args, **named):  # as HiGHS 1.8 does now and then, whatever its options
        ctypes.CDLL(None).puts(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();")
        return solve(*args, **named)

    monkeypatch.setattr(scipy.optimize, "milp", chatty)
    ours = milp.Program()
    ours.variable(("x",), high=3, whole=True, price=-1.0)
    print("before")
    assert ours.solve(0.0, 10)[0] == {("x",): 3.0}
    print("after")
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == "before\nafter\n"


def test_a_plan_that_swaps_lets_copies_be_late_where_that_fits():
    search = Search(small_problem(layers=6, micro_batches=4, link=0.6))
    most = max(search.simulated(search.keep_all).peaks)
    roomy = search.best(int(0.9 * most))
    assert roomy.plan.window_bytes == reserve.late_copies(roomy.problem.device_limit) > 0
    assert roomy.simulated.peaks[0] <= roomy.problem.device_limit
    assert search.best(10 * most).plan.window_bytes == 0, "nothing is swapped"
    found = [search.simulated(dataclasses.replace(roomy.plan, window_bytes=window)) for window in (0, 10**12)]
    assert found[0].seconds >= roomy.simulated.seconds >= found[1].seconds
    blocking = Search(small_problem(layers=6, micro_batches=4, link=0.6, blocking=True))
    assert blocking.best(int(0.9 * most)).plan.window_bytes == 0


def test_a_plan_has_copies_back_start_in_idle_time_where_that_is_faster():
    """Four stages over a slow link, without recomputation: all that saves memory is waited for."""
    once = {"recompute_seconds": None, "recompute_keeps": 0, "recompute_operators": (), "needs": ()}
    kind = dataclasses.replace(LAYER, groups=tuple(dataclasses.replace(one, **once) for one in LAYER.groups))
    search = Search(small_problem(stages=4, layers=1, micro_batches=6, link=0.5, kind=kind), work=1000)
    most, least = max(search.simulated(search.keep_all).peaks), search.floor()
    found = search.best(int(0.9 * least + 0.1 * most))
    without = search.simulated(dataclasses.replace(found.plan, idle_prefetch=False))
    assert found.plan.idle_prefetch and found.simulated.seconds < without.seconds
    assert max(found.simulated.peaks) <= found.problem.device_limit
    assert not search.best(10 * most).plan.idle_prefetch, "nothing is swapped"


@pytest.mark.parametrize("blocking", but([False, True], False))
def test_a_plan_moves_output_gradients_where_nothing_else_fits_and_only_where_that_gains(blocking):
    search = Search(
        small_problem(stages=2, layers=2, micro_batches=4, kind=SPLIT_LAYER, schedule="zb", blocking=blocking)
    )
    most, least = max(search.simulated(search.keep_all).peaks), search.floor()
    found = search.best(int(0.9 * least + 0.1 * most))
    without = search.simulated(dataclasses.replace(found.plan, output_gradients=False))
    assert found.plan.output_gradients and max(without.peaks) > found.problem.device_limit
    assert max(found.simulated.peaks) <= found.problem.device_limit
    [row] = [line.split() for line in worth.lines(found) if line.startswith("swap output gradients")]
    assert float(row[-2]) == pytest.approx(1e3 * (found.simulated.seconds - without.seconds), abs=0.06)
    assert found.simulated.seconds > without.seconds
    roomy = search.best(int(0.95 * most))
    moving = search.simulated(dataclasses.replace(search.keep_all, output_gradients=True))
    assert not roomy.plan.output_gradients and roomy.simulated.seconds < moving.seconds
    assert Search(found.problem, swap=False).floor() > found.problem.device_limit


def test_output_gradients_stay_where_the_host_has_no_room_or_nothing_waits():
    limits = {"stages": 2, "layers": 2, "micro_batches": 4, "kind": SPLIT_LAYER}
    waits = small_problem(schedule="zb", **limits)
    search = Search(waits)
    limit = int(0.9 * search.floor() + 0.1 * max(search.simulated(search.keep_all).peaks))
    bound = Search(dataclasses.replace(waits, host_limit=10 * MB))
    with pytest.raises(InfeasibleError) as caught:
        bound.best(limit)
    assert not bound.least().plan.output_gradients
    assert not bound.best(caught.value.needed_bytes).plan.output_gradients
    with pytest.raises(InfeasibleError, match="what waits for gradients of weights") as caught:
        search.best(search.least().simulated.peaks[0] // 2)
    assert search.best(caught.value.needed_bytes).plan.output_gradients
    at_once = Search(small_problem(split_backward=True, **limits))
    assert not at_once.best(int(1.1 * at_once.floor())).plan.output_gradients


def headline(tflops, link_gbps):
    """Llama's 7B shape with 16 layers and long sequences on a device of 105 GB that reaches so much."""
    shape = Shape(
        num_layers=16,
        hidden_size=4096,
        num_attention_heads=32,
        seq_length=8192,
        micro_batch_size=4,
        ffn_hidden_size=11008,
        num_query_groups=32,
        kv_channels=128,
        vocab_size=32000,
        untied=True,
        swiglu=True,
        normalization="RMSNorm",
        rope=True,
        bias=False,
    )
    machine = Machine(memory_bytes=105 * 10**9, link_gbps=link_gbps, tflops=tflops, memory_gbps=3600)
    return from_shape.problem(shape, Degrees(micro_batches=1), machine)


@pytest.mark.parametrize(("tflops", "link", "gain"), [(700, 50, 0.257), (742, 25, 0.215)])
def test_on_a_large_model_swap_and_recompute_gain_more_than_recompute_alone(tflops, link, gain):
    problem = headline(tflops, link)
    found = Search(problem).best()
    assert full_recompute(problem).seconds / found.simulated.seconds - 1 >= gain
    assert found.simulated.seconds < 0.98 * min(rival.seconds for rival in found.rivals.values())


def test_the_same_problem_gets_the_same_plan_and_a_solve_that_was_cut_short_is_told(monkeypatch):
    first, again, short = (Search(small_problem(layers=6, micro_batches=4, link=0.6)) for _ in range(3))
    limit = int(0.8 * max(first.simulated(first.keep_all).peaks))
    found = first.best(limit)
    assert again.best(limit).plan == found.plan and found.gap == 0.0
    monkeypatch.setattr(milp, "GAP", 1e-9)
    monkeypatch.setitem(milp.solve.__kwdefaults__, "gap", 1e-9)
    monkeypatch.setitem(milp.solve.__kwdefaults__, "nodes", 1)
    assert 0 < short.best(limit).gap < 0.1

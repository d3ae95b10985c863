"""Orders of passes: complete, without deadlock, within the cap, and as long as the closed form says."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_mem.passes import BACKWARD, FORWARD, WEIGHT
from mindspeed_mem.schedule import (
    DeadlockError,
    Placement,
    ScheduleError,
    in_flight,
    order,
    peak,
    problems,
    simulate,
    without_virtual_stages,
)
from mindspeed_mem.schedule.order import found_by_simulation
from mindspeed_mem.schedule.simulation import names


@st.composite
def sizes(draw):
    """Arguments of `order` that make a schedule: stages 1-16, virtual stages 1-4, micro-batches 1-64, caps."""
    stages, virtual = draw(st.integers(1, 16)), draw(st.integers(1, 4))
    if virtual == 1 or stages == 1:
        caps = st.none() | st.integers(1, stages + 1)
        return (stages, 1, draw(st.integers(1, 64))), {"cap": draw(caps), "megatron_loop": draw(st.booleans())}
    group = draw(st.integers(stages, 64))
    rest = draw(st.sampled_from([0, *range(stages, group)]))
    micro_batches = group * draw(st.integers(1, 64 // group)) + rest
    if micro_batches > 64:
        micro_batches = group
    need = (virtual - 1) * group + 2 * stages - 1
    megatron_loop = draw(st.booleans())
    least = need  # of Megatron's loop, when it cannot make the group smaller
    cap = draw(st.none() | st.integers(least if megatron_loop else virtual, need + 1))
    default = group == stages and draw(st.booleans())
    more = {"group_size": None if default else group, "cap": cap, "megatron_loop": megatron_loop}
    return (stages, virtual, micro_batches), more


@given(sizes())
@settings(max_examples=300)
def test_every_order_is_whole_ends_and_keeps_its_peak_and_its_cap(case):
    (stages, virtual, micro_batches), more = case
    assert problems(stages, virtual, micro_batches, **more) == []
    passes = order(stages, virtual, micro_batches, **more)
    wanted = set(itertools.product((FORWARD, BACKWARD), range(micro_batches), range(virtual)))
    assert len(passes) == stages
    for of_stage in passes:
        assert len(of_stage) == len(wanted) and set(of_stage) == wanted
        place = {work: i for i, work in enumerate(of_stage)}
        assert all(place[(FORWARD, *rest)] < place[(BACKWARD, *rest)] for _, *rest in of_stage)
        # On each chunk in turn, so that gradients are added up as in Megatron's loop.
        by_chunk = sorted(of_stage, key=lambda work: (work[0], work[2]))
        assert by_chunk == sorted(of_stage, key=lambda work: (work[0], work[2], work[1]))
    simulate(passes, virtual)  # all that a pass needs comes before it: otherwise DeadlockError
    peaks = [max(in_flight(of_stage)) for of_stage in passes]
    assert peaks == peak(stages, virtual, micro_batches, **more)
    if found_by_simulation(stages, virtual, micro_batches, **more) is None:
        assert peaks == sorted(peaks, reverse=True)
    assert more["cap"] is None or max(peaks) <= more["cap"]


@given(sizes())
@settings(max_examples=100)
def test_a_cap_above_the_need_changes_nothing_and_forward_only_knows_none(case):
    (stages, virtual, micro_batches), more = case
    free = {"group_size": more.get("group_size")}
    needed = peak(stages, virtual, micro_batches, **free)[0]
    if virtual > 1:
        needed = (virtual - 1) * (free["group_size"] or stages) + 2 * stages - 1
    for megatron_loop in (False, True):
        high = order(stages, virtual, micro_batches, **free, cap=max(needed, stages), megatron_loop=megatron_loop)
        assert high == order(stages, virtual, micro_batches, **free)
    alone = order(stages, virtual, micro_batches, **more, forward_only=True)
    assert alone == order(stages, virtual, micro_batches, **free, forward_only=True)
    assert {work for of_stage in alone for work in of_stage} == {
        (FORWARD, m, c) for m in range(micro_batches) for c in range(virtual)
    }
    simulate(alone, virtual)
    assert peak(stages, virtual, micro_batches, **more, forward_only=True) == [0] * stages


@given(st.integers(1, 16), st.integers(1, 64), st.integers(1, 9), st.integers(1, 9))
def test_one_forward_one_backward_takes_its_closed_form(stages, micro_batches, forward, backward):
    line = simulate(order(stages, 1, micro_batches), forward=forward, backward=backward)
    assert line.makespan == (micro_batches + stages - 1) * (forward + backward)
    assert line.idle_share() == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert peak(stages, 1, micro_batches) == [min(stages - p, micro_batches) for p in range(stages)]


@given(st.integers(2, 16), st.integers(2, 4), st.integers(1, 4), st.integers(1, 9))
def test_virtual_stages_divide_the_bubble(stages, virtual, groups, backward):
    line = simulate(order(stages, virtual, groups * stages), virtual, backward=backward)
    assert line.makespan == (groups * stages * virtual + stages - 1) * (1 + backward)


@given(st.integers(1, 16), st.integers(1, 64), st.integers(1, 16), st.integers(1, 9))
def test_a_cap_costs_a_round_trip_a_wave(stages, micro_batches, cap, backward):
    cap = min(cap, stages)
    waves, rest = divmod(micro_batches - 1, cap)
    line = simulate(order(stages, 1, micro_batches, cap=cap), backward=backward)
    assert line.makespan == (waves * stages + rest + stages) * (1 + backward)


@pytest.mark.parametrize("stages, virtual, micro_batches", [(4, 2, 16), (8, 3, 32), (16, 4, 64)])
def test_a_cap_of_stages_times_virtual_stages_costs_nothing_between_equal_stages(stages, virtual, micro_batches):
    free = simulate(order(stages, virtual, micro_batches), virtual)
    capped = order(stages, virtual, micro_batches, cap=stages * virtual)
    assert simulate(capped, virtual).makespan == free.makespan
    assert peak(stages, virtual, micro_batches)[0] > peak(stages, virtual, micro_batches, cap=stages * virtual)[0]


@pytest.mark.parametrize(
    "sizes, cap, idle_in_groups, idle",
    [
        ((4, 2, 16), 4, 0.586, 0.503),
        ((8, 2, 16), 12, 0.520, 0.338),
        ((8, 2, 16), 10, 0.632, 0.425),
        ((8, 2, 32), 12, 0.503, 0.262),
        ((8, 2, 32), 8, 0.741, 0.481),
        ((4, 2, 16), 6, 0.232, 0.232),
        ((4, 2, 16), 8, 0.086, 0.086),
    ],
)
def test_virtual_stages_under_a_tight_cap_idle_less_than_in_groups_and_than_without(sizes, cap, idle_in_groups, idle):
    line = simulate(order(*sizes, cap=cap), sizes[1])
    assert line.idle_share() == pytest.approx(idle, abs=5e-4)
    assert (found_by_simulation(*sizes, cap=cap) is None) == (idle == idle_in_groups)
    assert line.makespan < without_virtual_stages(*sizes, cap).makespan


def every_sequence(micro_batches, cap):
    """All sequences of forwards and backwards, each in order, with at most `cap` in flight."""
    for turns in itertools.product((FORWARD, BACKWARD), repeat=2 * micro_batches):
        counts = {FORWARD: 0, BACKWARD: 0}
        passes = []
        for turn in turns:
            passes.append((turn, counts[turn], 0))
            counts[turn] += 1
        if counts[FORWARD] == counts[BACKWARD] and all(0 <= count <= cap for count in in_flight(passes)):
            yield passes


@pytest.mark.parametrize("stages, micro_batches, cap", [(2, 4, 1), (2, 4, 2), (3, 4, 2), (3, 4, 3)])
@pytest.mark.parametrize("backward", [1, 2])
def test_no_order_within_the_cap_is_faster(stages, micro_batches, cap, backward):
    best = float("inf")
    for passes in itertools.product(list(every_sequence(micro_batches, cap)), repeat=stages):
        try:
            best = min(best, simulate(passes, backward=backward).makespan)
        except DeadlockError:
            continue
    assert simulate(order(stages, 1, micro_batches, cap=cap), backward=backward).makespan == best


def test_waves_are_as_drawn():
    passes = order(3, 1, 5, cap=2)
    assert [names(of_stage, 1) for of_stage in passes] == [
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 F1 B0 B1 F2 F3 B2 B3 F4 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


@given(st.integers(2, 8), st.integers(1, 3), st.integers(1, 6), st.none() | st.integers(0, 10))
@settings(max_examples=60)
def test_every_order_with_a_split_backward_is_whole_ends_keeps_its_cap_and_is_no_slower(stages, virtual, number, more):
    number, cap = number * stages if virtual > 1 else number, None if more is None else virtual + more
    passes = order(stages, virtual, number, cap=cap, split=True)
    for of_stage in passes:
        assert len(of_stage) == 3 * virtual * number
        for way, chunk in itertools.product((FORWARD, BACKWARD, WEIGHT), range(virtual)):
            mine = [work for work in of_stage if work[0] == way and work[2] == chunk]
            assert mine == [(way, n, chunk) for n in range(number)]
        place = {work: i for i, work in enumerate(of_stage)}
        assert all(place[BACKWARD, n, c] < place[WEIGHT, n, c] for n in range(number) for c in range(virtual))
    line = simulate(passes, virtual, forward=1, backward=1, weight=1)
    peaks = [max(in_flight(of_stage)) for of_stage in passes]
    assert peaks == peak(stages, virtual, number, cap=cap, split=True)
    assert max(peaks) <= (stages * virtual if cap is None else cap)
    whole = order(stages, virtual, number, cap=stages * virtual if cap is None else cap)
    assert line.makespan <= simulate(whole, virtual, forward=1, backward=2).makespan


@pytest.mark.parametrize(
    "sizes, cap, idle",
    [
        ((4, 1, 8), 4, 0.111),
        ((4, 1, 16), 4, 0.059),
        ((4, 1, 16), 2, 0.407),
        ((8, 1, 16), 8, 0.127),
        ((8, 1, 32), 8, 0.068),
        ((8, 1, 32), 4, 0.373),
        ((4, 2, 16), 8, 0.030),
        ((4, 2, 16), 6, 0.086),
        ((8, 2, 32), 16, 0.035),
        ((8, 2, 32), 8, 0.264),
    ],
)
def test_gradients_of_weights_fill_the_bubble(sizes, cap, idle):
    stages, virtual, micro_batches = sizes
    line = simulate(order(*sizes, cap=cap, split=True), virtual, forward=1, backward=1, weight=1)
    assert line.idle_share() == pytest.approx(idle, abs=5e-4)
    if cap == stages * virtual:  # no stage waits but for the first forward to reach it, or at its end
        assert line.makespan == 3 * virtual * micro_batches + stages - 1
        assert order(*sizes, split=True) == order(*sizes, cap=cap, split=True)


@given(st.integers(2, 8), st.integers(1, 24), st.none() | st.integers(2, 20))
@settings(max_examples=60)
def test_every_order_in_a_v_is_whole_ends_and_keeps_its_cap(stages, number, cap):
    passes = order(stages, 2, number, cap=cap, split=True, v=True)
    for of_stage in passes:
        assert len(of_stage) == 3 * 2 * number
        for way, chunk in itertools.product((FORWARD, BACKWARD, WEIGHT), range(2)):
            assert [work for work in of_stage if work[::2] == (way, chunk)] == [(way, n, chunk) for n in range(number)]
    simulate(passes, 2, v=True)  # all that a pass needs comes before it: otherwise DeadlockError
    peaks = [max(in_flight(of_stage)) for of_stage in passes]
    assert peaks == peak(stages, 2, number, cap=cap, split=True, v=True)
    assert max(peaks) <= (2 * stages if cap is None else cap)
    simulate(order(stages, 2, number, cap=cap, split=True, v=True, forward_only=True), 2, v=True)


@pytest.mark.parametrize(
    "stages, micro_batches, cap, idle",
    [(4, 16, 8, 0.030), (4, 16, 6, 0.068), (8, 32, 16, 0.035), (8, 32, 8, 0.176), (8, 32, 6, 0.360)],
)
def test_parts_in_a_v_idle_no_more_than_zero_bubble_at_the_same_memory(stages, micro_batches, cap, idle):
    line = simulate(order(stages, 2, micro_batches, cap=cap, split=True, v=True), 2, v=True, backward=1, weight=1)
    assert line.idle_share() == pytest.approx(idle, abs=5e-4)
    straight = order(stages, 1, micro_batches, cap=cap // 2, split=True)
    assert line.idle_share() < simulate(straight, backward=1, weight=1).idle_share()


def test_a_v_comes_back_to_the_first_stage():
    placement = Placement(3, 2, v=True)
    assert [placement.place(part) for part in range(placement.parts)] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (2, 1),
        (1, 1),
        (0, 1),
    ]
    assert [placement.part(*placement.place(part)) for part in range(placement.parts)] == list(range(6))


def test_where_filling_idle_time_is_slower_gradients_of_weights_follow_their_backward():
    split, whole = order(3, 2, 24, cap=5, split=True), order(3, 2, 24, cap=5)
    assert [[work for work in of_stage if work[0] != WEIGHT] for of_stage in split] == whole
    assert simulate(split, 2, backward=1, weight=1).makespan <= simulate(whole, 2, backward=2).makespan


def test_a_split_backward_is_as_drawn():
    assert [names(of_stage, 1) for of_stage in order(2, 1, 3, split=True)] == [
        "F0 F1 B0 W0 F2 B1 W1 B2 W2",
        "F0 B0 F1 B1 W0 F2 B2 W1 W2",
    ]


@pytest.mark.parametrize(
    "sizes, more, words",
    [
        ((0, 1, 0), {}, ["stages is 0", "micro-batches is 0"]),
        ((4, 1, 8), {"cap": 0}, ["cap of passes in flight is 0"]),
        ((4, 1, 8), {"group_size": 4}, ["needs virtual stages"]),
        ((1, 2, 8), {"cap": 1}, ["cap of passes in flight is 1", "at least 2 stages"]),
        ((4, 2, 2), {}, ["group size is 4 (the number of stages, as none is given)"]),
        ((4, 2, 10), {}, ["last group of 2"]),
        ((4, 2, 8), {"group_size": 3, "cap": 1}, ["cap of passes", "group size is 3, but"]),
        ((4, 2, 8), {"cap": 10, "megatron_loop": True}, ["own loop needs at least 11"]),
        ((4, 2, 10), {"split": True}, ["last group of 2"]),
        ((4, 2, 8), {"split": True, "cap": 1}, ["cap of passes in flight is 1"]),
        ((4, 1, 8), {"split": True, "megatron_loop": True}, ["own loop has no order for a split backward"]),
        ((4, 3, 8), {"split": True, "v": True, "cap": 2}, ["cap of passes in flight is 2", "exactly 2"]),
        ((1, 2, 8), {"v": True}, ["at least 2 stages", "backward split"]),
    ],
)
def test_sizes_without_a_schedule_are_refused_with_all_reasons(sizes, more, words):
    found = problems(*sizes, **more)
    assert len(found) == len(words)
    for word, reason in zip(words, found, strict=True):
        assert word in reason
    with pytest.raises(ScheduleError) as error:
        order(*sizes, **more)
    assert str(error.value) == "; ".join(found)

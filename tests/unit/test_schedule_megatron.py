"""The orders are Megatron's: its own loops, tables and counts say the same, with a cap as far as they can go."""

import pytest

from mindspeed_mem.schedule import order, problems, warm_up
from mindspeed_mem.schedule.order import group_under
from mindspeed_mem.schedule.simulation import names
from tests.pipeline_loops import outcomes
from tests.worlds import on_ranks

pytestmark = pytest.mark.distributed  # on a rank of one: where the repairs for CPU are applied before megatron.core


def loops(cases):
    """What Megatron's loops do for each (sizes, more), on a rank where the CPU patches are applied."""
    return on_ranks(1, outcomes, cases)[0]


def told(sizes, group_size, cap, megatron_loop=True):
    """The arguments that make Megatron's loop keep the cap, or try to."""
    limits = {"group_size": group_size, "cap": cap, "megatron_loop": megatron_loop}
    group = {"group_size": group_under(*sizes, **limits)} if sizes[1] > 1 else {}
    return {"warm_ups": warm_up(*sizes, **limits), **group}


PLAIN = [(stages, 1, micro_batches) for stages in (1, 2, 3, 4, 7) for micro_batches in (1, 2, 3, 4, 9)]
VIRTUAL = [
    ((3, 2, 3), None),
    ((4, 2, 8), None),
    ((4, 3, 8), None),
    ((3, 4, 6), None),
    ((4, 2, 12), 6),
    ((3, 2, 8), 5),
    ((3, 3, 7), 4),
    ((4, 2, 10), 10),
]


@pytest.mark.parametrize("forward_only", [False, True])
def test_the_loops_run_this_order(forward_only):
    cases = [(sizes, {"forward_only": forward_only}) for sizes in PLAIN]
    cases += [(sizes, {"group_size": group, "forward_only": forward_only}) for sizes, group in VIRTUAL]
    for overlap in (False, True):
        some = [(sizes, {**more, "overlap": overlap}) for sizes, more in cases if sizes[1] > 1 or not overlap]
        for (sizes, more), ran in zip(some, loops(some), strict=True):
            more = {"group_size": more.get("group_size"), "forward_only": forward_only}
            assert ran == order(*sizes, **more), (sizes, more, overlap)


def test_two_virtual_stages_of_two_ranks_run_the_recorded_order():
    recorded = "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0"
    assert names(order(2, 2, 4)[0], 2) == recorded


def tables(cases):
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    from tests.pipeline_loops import Communicated

    found = []
    for stages, virtual, micro_batches, group in cases:
        seen = [Communicated(stage, stages, virtual) for stage in range(stages)]
        counts = [get_pp_rank_microbatches(micro_batches, virtual, group, p2p_communicator=one)[2] for one in seen]
        found.append((get_schedule_table(micro_batches, virtual, group), counts))
    return found


def test_tables_and_warm_ups_are_megatrons_for_large_sizes():
    cases = [(stages, virtual, 64, group) for stages in (2, 5, 16) for virtual in (2, 4) for group in (16, 32, 64)]
    for (*sizes, group), (table, counts) in zip(cases, on_ranks(1, tables, cases)[0], strict=True):
        assert warm_up(*sizes, group_size=group) == counts
        passes = order(*sizes, group_size=group, forward_only=True)
        assert [work[1:] for work in passes[0]] == table


@pytest.mark.parametrize("streams", [None, "batched"])
def test_megatrons_loop_keeps_a_cap_with_fewer_warm_up_forwards(streams):
    plain = [((stages, 1, 9), None, cap) for stages in (2, 3, 4, 7) for cap in range(1, stages + 1)]
    virtual = [
        (sizes, group, cap)
        for sizes, group in VIRTUAL
        for cap in range(sizes[1], (sizes[1] - 1) * (group or sizes[0]) + 2 * sizes[0])
        if not problems(*sizes, group_size=group, cap=cap, megatron_loop=True)
    ]
    cases = plain + virtual
    ran = loops([(sizes, {**told(sizes, group, cap), "streams": streams}) for sizes, group, cap in cases])
    for (sizes, group, cap), passes in zip(cases, ran, strict=True):
        assert passes == order(*sizes, group_size=group, cap=cap, megatron_loop=True), (sizes, group, cap)


@pytest.mark.parametrize("sizes", [(3, 2, 6), (4, 2, 8), (4, 3, 8)])
def test_megatrons_loop_hangs_with_fewer_warm_up_forwards_of_virtual_stages(sizes):
    """One forward less on the first stage is all that its fused calls bear."""
    whole = warm_up(*sizes)[0] + 1
    caps = range(sizes[0] * sizes[1], whole - 1)
    ran = loops([(sizes, told(sizes, None, cap, megatron_loop=False)) for cap in [*caps, whole - 1]])
    assert ran == [*["stuck" for _ in caps], order(*sizes, cap=whole - 1)]


def test_a_cap_on_megatrons_loop_needs_its_grouped_communication():
    # Single sends and receives one after the other between two stages, as NCCL runs them without groups.
    single = {"streams": "pairs"}
    free, capped = loops([((4, 1, 8), single), ((4, 1, 8), {**told((4, 1, 8), None, 3), **single})])
    assert free == order(4, 1, 8)
    assert capped == "stuck"

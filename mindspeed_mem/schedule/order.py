"""The order of passes on each stage: what Megatron-core 0.16.1 runs, and the same with a cap on passes in flight.

All of Megatron's training schedules are one: the forward passes stand in a fixed sequence, the backward passes in
another, and a stage runs its warm-up forwards, then one forward and one backward in turn, then the backwards that are
left. Only the number of warm-up forwards differs between stages, and only it decides how many passes are in flight.

[Note: a cap without virtual stages] The micro-batches go in waves of `cap`: each micro-batch of a wave enters the
first stage when that of the same place in the wave before has left it. Every stage runs its passes in the sequence in
which they then get there if all stages are equally fast: `waves` counts, for each forward, the backwards before it. So
no pass comes before one it waits for, whatever the passes take. A wave of as many micro-batches as stages is 1F1B. The
time is a round trip through all stages for each wave, during which stage 0 can hold no more than the cap; trying all
orders of small sizes finds none faster. Megatron's loop cannot run waves: in the middle of the pipeline they are no
turns of one forward and one backward. It can run fewer warm-up forwards, each stage holding the share cap / stages of
what it holds in 1F1B (`megatron_loop`); that takes little longer if the cap divides the number of stages, and much if
it is more than half of it.

[Note: a cap with virtual stages] With V of them Megatron's warm-up on stage p of P is (V - 1) * group +
2 (P - p - 1), which counts: the forwards of all chunks but the last, for a whole group; one forward for each later
stage, so that the stages follow each other; and one more for each, which only hides communication. A cap takes away
the last first, which costs equal stages nothing down to a cap of V * P, then makes the group smaller, and in the end
brings the stages together. Groups of fewer micro-batches than stages idle long: there an order found by simulation
(`listed`) takes their place wherever it is faster on equal stages whose backward takes two forwards. Megatron's loop
cannot take the first away: it receives for the next forward and the next backward at once, and the first and the last
stage would wait for each other for ever. It can only have a smaller group, of no fewer micro-batches than stages,
which is an option of Megatron's (`megatron_loop`).

Where the backward is split the order is found by simulation, too (`listed`): gradients of weights can wait, and fill
what is idle time here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_mem.passes import BACKWARD, FORWARD, WEIGHT, Pass
from mindspeed_mem.schedule import listed
from mindspeed_mem.schedule.checks import Limits, check, fits
from mindspeed_mem.schedule.placement import Placement
from mindspeed_mem.schedule.simulation import Timeline, simulate

if TYPE_CHECKING:
    from typing_extensions import Unpack


def order(
    stages: int, virtual_stages: int, micro_batches: int, *, forward_only: bool = False, **limits: Unpack[Limits]
) -> list[list[Pass]]:
    """The passes of each stage in the order they run, as (direction, micro-batch, model chunk).

    Args:
        stages: of the pipeline.
        virtual_stages: model chunks of each stage; 1: no virtual stages.
        micro_batches: of one training step.
        forward_only: an evaluation; it keeps nothing in flight, and no cap changes it.
        group_size: Megatron's ``microbatch_group_size_per_vp_stage``; None: the number of stages.
        cap: bounds how many passes of a stage are in flight, that is run forward and not yet backward: micro-batches,
            or with virtual stages passes of one chunk; None: no bound.
        megatron_loop: take an order within the cap that Megatron's own loop can run.
        split: the backward is split: gradients of weights are passes of their own, which fill idle time. What they need
            is in flight until then; without a cap as many micro-batches as stages, as in 1F1B, or with virtual stages
            as many passes of one chunk as hold the same.
        v: the parts of the model lie in a V (placement.py); that needs two virtual stages and `split`. Chunks take
            turns as the simulation says: no group size changes that.

    Raises:
        ScheduleError: there is no such schedule; the message lists every reason.
    """
    sizes = (stages, virtual_stages, micro_batches)
    check(*sizes, **limits)
    cap = limits["cap"] = None if forward_only else limits.get("cap")
    if forward_only:
        if limits.get("v"):
            limits["group_size"] = None
        forwards = _table(virtual_stages, micro_batches, group_under(*sizes, **limits))
        return [[(FORWARD, micro_batch, chunk) for micro_batch, chunk in forwards] for _ in range(stages)]
    if limits.get("split"):
        return _split(*sizes, **limits)
    if virtual_stages == 1 and cap is not None and not limits.get("megatron_loop"):
        return waves(stages, micro_batches, min(cap, stages))
    return found_by_simulation(*sizes, **limits) or _in_groups(*sizes, **limits)


def found_by_simulation(
    stages: int, virtual_stages: int, micro_batches: int, **limits: Unpack[Limits]
) -> list[list[Pass]] | None:
    """The order that `order` takes because it is faster than groups under the cap; None where groups are no slower.

    Every rank finds the same.
    """
    sizes, cap = (stages, virtual_stages, micro_batches), limits.get("cap")
    if cap is None or virtual_stages == 1 or limits.get("megatron_loop") or limits.get("split"):
        return None
    grouped = _in_groups(*sizes, **limits)
    time = round(simulate(grouped, virtual_stages, forward=listed.FORWARD_TIME, backward=listed.BACKWARD_TIME).makespan)
    found = listed.faster(*sizes, cap, time) if time > listed.shortest(*sizes) else None
    return found and [list(of_stage) for of_stage in found]


def without_virtual_stages(
    stages: int,
    virtual_stages: int,
    micro_batches: int,
    cap: int,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    send: float = 0.0,
) -> Timeline:
    """How the same stages run without virtual ones and hold no more; the times are those of a pass of one chunk."""
    passes = order(stages, 1, micro_batches, cap=cap // virtual_stages)
    return simulate(passes, forward=forward * virtual_stages, backward=backward * virtual_stages, send=send)


def _split(stages: int, virtual_stages: int, micro_batches: int, **limits: Unpack[Limits]) -> list[list[Pass]]:
    """The order with gradients of weights where stages would idle, if that is no slower than the whole backward's."""
    sizes, cap = (stages, virtual_stages, micro_batches), limits.get("cap")
    cap = stages * virtual_stages if cap is None else cap
    v = limits.get("v", False)
    found = [list(of_stage) for of_stage in listed.split(Placement(stages, virtual_stages, v), micro_batches, cap)]
    if v:  # nothing else runs on such stages
        return found
    without: Limits = {**limits, "cap": cap, "split": False}
    whole = order(*sizes, **without)
    forward, backward = listed.FORWARD_TIME, listed.BACKWARD_TIME
    time = simulate(whole, virtual_stages, forward=forward, backward=backward).makespan
    if simulate(found, virtual_stages, forward=forward, backward=backward / 2, weight=backward / 2).makespan <= time:
        return found
    apart = {FORWARD: (FORWARD,), BACKWARD: (BACKWARD, WEIGHT)}
    return [[(way, number, chunk) for kind, number, chunk in passes for way in apart[kind]] for passes in whole]


def waves(stages: int, micro_batches: int, size: int) -> list[list[Pass]]:
    """The order without virtual stages in waves of `size` micro-batches, at most as many as there are stages."""
    found = []
    for stage in range(stages):
        passes: list[Pass] = []
        done = 0
        for micro_batch in range(micro_batches):
            wave, place = divmod(micro_batch, size)
            enough = max(0, place + 1 - (stages - stage))  # of this wave: they came back from the last stage
            if wave:
                enough += (wave - 1) * size + min(size, place + stage + 1)
            passes += [(BACKWARD, back, 0) for back in range(done, enough)]
            passes.append((FORWARD, micro_batch, 0))
            done = max(done, enough)
        found.append(passes + [(BACKWARD, back, 0) for back in range(done, micro_batches)])
    return found


def warm_up(stages: int, virtual_stages: int, micro_batches: int, **limits: Unpack[Limits]) -> list[int]:
    """How many forwards each stage runs before it turns to one forward and one backward, where it does: neither in
    waves nor in an order found by simulation."""
    check(stages, virtual_stages, micro_batches, **limits)
    cap = limits.get("cap")
    whole = virtual_stages * micro_batches
    later = range(stages - 1, -1, -1)  # how many stages come after each
    if virtual_stages == 1:
        most = stages if cap is None else min(cap, stages)
        return [min(-(-(after + 1) * most // stages) - 1, whole) for after in later]
    group = group_under(stages, virtual_stages, micro_batches, **limits)
    others = (virtual_stages - 1) * group
    if group < stages and cap is not None:
        apart = group + (micro_batches % group or group)  # by more the first stage would wait for the last for ever
        return [min(others + min(after, apart), cap - 1, whole) for after in later]
    spare = stages - 1 if cap is None else cap - others - stages
    return [min(others + after + min(after, spare), whole) for after in later]


def group_under(stages: int, virtual_stages: int, micro_batches: int, **limits: Unpack[Limits]) -> int:
    """How many micro-batches run on a chunk in a row: `group_size`, or the largest number the cap has room for.

    With room for as many as there are stages it is a number that Megatron takes.
    """
    given, cap = limits.get("group_size"), limits.get("cap")
    group = min(stages if given is None else given, micro_batches)
    if virtual_stages == 1 or cap is None:
        return group
    for size in range(group, 1, -1):
        apart = 2 * stages - 2 if limits.get("megatron_loop") else min(size, stages - 1)
        if (virtual_stages - 1) * size + apart + 1 <= cap and (size < stages or fits(stages, micro_batches, size)):
            return size
    return 1


def _table(virtual_stages: int, micro_batches: int, group: int) -> list[tuple[int, int]]:
    """The forward passes as (micro-batch, chunk): each group of micro-batches runs on one chunk after the other."""
    firsts = range(0, micro_batches, group)
    groups = [range(first, min(first + group, micro_batches)) for first in firsts]
    return [(micro_batch, chunk) for members in groups for chunk in range(virtual_stages) for micro_batch in members]


def _in_groups(stages: int, virtual_stages: int, micro_batches: int, **limits: Unpack[Limits]) -> list[list[Pass]]:
    """The order of each stage as Megatron has it, with the warm-ups and the groups that the limits leave."""
    sizes = (stages, virtual_stages, micro_batches)
    forwards = _table(virtual_stages, micro_batches, group_under(*sizes, **limits))
    return [_in_turns(forwards, virtual_stages, count) for count in warm_up(*sizes, **limits)]


def _in_turns(forwards: list[tuple[int, int]], virtual_stages: int, count: int) -> list[Pass]:
    """The order of a stage that warms up with `count` forwards. The backwards take the chunks in reverse."""
    ahead: list[Pass] = [(FORWARD, micro_batch, chunk) for micro_batch, chunk in forwards]
    back: list[Pass] = [(BACKWARD, micro_batch, virtual_stages - 1 - chunk) for micro_batch, chunk in forwards]
    steady = [work for pair in zip(ahead[count:], back, strict=False) for work in pair]
    return ahead[:count] + steady + back[len(forwards) - count :]

"""How many passes of each stage are in flight at once: in closed form, and counted by replaying an order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mindspeed_mem.passes import BACKWARD, FORWARD, WEIGHT, Pass
from mindspeed_mem.schedule.checks import Limits, check
from mindspeed_mem.schedule.order import found_by_simulation, order, warm_up

if TYPE_CHECKING:
    from typing_extensions import Unpack


def peak(
    stages: int, virtual_stages: int, micro_batches: int, *, forward_only: bool = False, **limits: Unpack[Limits]
) -> list[int]:
    """The most passes in flight on each stage, for the arguments of `order`.

    For stage p of P and M micro-batches that is min(P - p, M, cap); in Megatron's loop the cap scales the whole,
    min(ceil((P - p) * cap / P), M). With V virtual stages it is min((V - 1) * group + 2 (P - p - 1) + 1, M V) passes,
    each of which keeps one chunk's activations, about 1 / V of the stage's; a cap takes from the warm-up, and there
    is always one pass more than that. An order found by simulation, such as any with a split
    backward, is counted. Forward-only passes keep nothing. (Derived in order.py, from Megatron-core's warm-up.) Raises
    ScheduleError, as `order`.
    """
    check(stages, virtual_stages, micro_batches, **limits)
    if forward_only:
        return [0] * stages
    if limits.get("split"):
        return [max(in_flight(of_stage)) for of_stage in order(stages, virtual_stages, micro_batches, **limits)]
    if virtual_stages == 1 and not limits.get("megatron_loop"):
        cap = limits.get("cap")
        most = micro_batches if cap is None else min(cap, micro_batches)
        return [min(stages - stage, most) for stage in range(stages)]
    found = found_by_simulation(stages, virtual_stages, micro_batches, **limits)
    if found is not None:
        return [max(in_flight(of_stage)) for of_stage in found]
    warm_ups = warm_up(stages, virtual_stages, micro_batches, **limits)
    return [min(count + 1, virtual_stages * micro_batches) for count in warm_ups]


def in_flight(passes: Iterable[Pass]) -> list[int]:
    """How many passes are in flight after each pass of this order: until the backward, or where that is split until the
    gradients of weights."""
    passes = list(passes)
    frees = WEIGHT if any(work[0] == WEIGHT for work in passes) else BACKWARD
    counts, now = [], 0
    for direction, _, _ in passes:
        now += (direction == FORWARD) - (direction == frees)
        counts.append(now)
    return counts

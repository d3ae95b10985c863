"""Which sizes of a pipeline schedule there are: what Megatron-core runs, and what a cap allows."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from typing_extensions import Unpack


MOST = 2**20
"""Forward passes of a step, on all stages together, that are put in order on paper: seconds to minutes."""


class ScheduleError(ValueError):
    """These sizes make no schedule; the message lists every reason."""


class Limits(TypedDict, total=False):
    """What else than its sizes determines a schedule, as `problems` takes it."""

    group_size: int | None
    cap: int | None
    megatron_loop: bool
    split: bool
    v: bool


def problems(
    stages: int,
    virtual_stages: int,
    micro_batches: int,
    *,
    group_size: int | None = None,
    cap: int | None = None,
    megatron_loop: bool = False,
    split: bool = False,
    v: bool = False,
) -> list[str]:
    """Every reason, in words, why `order` has no such schedule for these arguments; an empty list if it has.

    Without a cap these are Megatron-core 0.16.1's own conditions; those of its groups do not concern a V.
    """
    given = {
        "the number of pipeline stages": stages,
        "the number of virtual stages": virtual_stages,
        "the number of micro-batches": micro_batches,
        "the group size": 1 if group_size is None else group_size,
        "the cap of passes in flight": 1 if cap is None else cap,
    }
    found = [f"{what} is {number}, but must be at least 1" for what, number in given.items() if number < 1]
    if found:
        return found
    if split and megatron_loop:
        return ["Megatron's own loop has no order for a split backward: leave one of them out"]
    if v:
        return _of_v(stages, virtual_stages, cap, split)
    if virtual_stages == 1:
        return [] if group_size is None else ["a group size needs virtual stages: without them there are no groups"]
    found += _of_cap(virtual_stages, cap)
    if stages == 1:
        return [*found, f"{virtual_stages} virtual stages need a pipeline of at least 2 stages, not 1"]
    wrong = _of_groups(stages, micro_batches, group_size)
    if cap is not None and megatron_loop and not (found or wrong):
        found += _of_loop(stages, virtual_stages, micro_batches, cap)
    return found + wrong


def too_many(stages: int, virtual_stages: int, micro_batches: int) -> str | None:
    """Why this is more than can be shown or planned in a moderate time, in words; None if it is not."""
    passes = stages * virtual_stages * micro_batches
    if passes <= MOST:
        return None
    of_each = f"virtual stages of each: {virtual_stages}, " if virtual_stages > 1 else ""
    sizes = f"pipeline stages: {stages}, {of_each}micro-batches: {micro_batches}"
    return f"{passes} forward passes a step ({sizes}): allowed: at most {MOST}, which may take minutes"


def _of_v(stages: int, virtual_stages: int, cap: int | None, split: bool) -> list[str]:
    found = _of_cap(virtual_stages, cap)
    if virtual_stages != 2:
        found.append(f"the number of virtual stages is {virtual_stages}, but a V has exactly 2: one down, one back")
    if stages == 1:
        found.append("a V needs a pipeline of at least 2 stages, not 1")
    if not split:
        found.append("the order of a V has the backward split")
    return found


def _of_cap(virtual_stages: int, cap: int | None) -> list[str]:
    if cap is None or cap >= virtual_stages:
        return []
    return [
        f"the cap of passes in flight is {cap}, but the first backward pass of a micro-batch comes after its "
        f"forward passes on all {virtual_stages} virtual stages: at least {virtual_stages} are in flight"
    ]


def _of_groups(stages: int, micro_batches: int, group_size: int | None) -> list[str]:
    group = stages if group_size is None else group_size
    what = f"the group size is {group}" + (" (the number of stages, as none is given)" if group_size is None else "")
    if not stages <= group <= micro_batches:
        return [
            f"{what}, but with virtual stages Megatron takes only one from the number of stages, {stages}, "
            f"to the number of micro-batches, {micro_batches}"
        ]
    if not fits(stages, micro_batches, group):
        return [
            f"{what} and {micro_batches} micro-batches leave a last group of {micro_batches % group}, but Megatron "
            f"takes only whole groups, or a last one of at least as many micro-batches as stages, {stages}"
        ]
    return []


def _of_loop(stages: int, virtual_stages: int, micro_batches: int, cap: int) -> list[str]:
    smallest = next(size for size in range(stages, micro_batches + 1) if fits(stages, micro_batches, size))
    least = (virtual_stages - 1) * smallest + 2 * stages - 1
    if cap >= least:
        return []
    return [
        f"the cap of passes in flight is {cap}, but Megatron's own loop needs at least {least}: with virtual stages "
        f"only the group can be made smaller, and the smallest it takes here is {smallest}"
    ]


def fits(stages: int, micro_batches: int, group: int) -> bool:
    """Whether the last group of micro-batches is whole or at least as large as Megatron asks for."""
    return micro_batches % group == 0 or micro_batches % group >= stages


def check(stages: int, virtual_stages: int, micro_batches: int, **limits: Unpack[Limits]) -> None:
    """Raise ScheduleError with all `problems`, if there are any."""
    found = problems(stages, virtual_stages, micro_batches, **limits)
    if found:
        raise ScheduleError("; ".join(found))

"""All ranks make the plan, or none does: what one rank finds wrong is raised on every rank. So with what is not to run
again: what contains collectives runs again on all ranks that take part in them, or on none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_mem.plan import MemoryConfigError, MemoryPlan
from mindspeed_mem.ranks import is_initialized


def agreed(
    make: Callable[[], MemoryPlan], gather: Callable[[Any], list], partners: Collection[int], source: str
) -> MemoryPlan:
    """The plan that ``make`` returns on this rank.

    ``partners``: the ranks that run collectives with this one inside layers. Their plans must be equal: an operator
    that only some of them ran again would wait for the others' collectives for ever. Raises MemoryConfigError on all
    ranks.
    """
    plan: MemoryPlan | None = None
    problems: tuple[str, ...] = ()
    try:
        plan = make()
    except MemoryConfigError as error:
        problems = error.problems
    found = gather((problems, plan.fingerprint() if plan is not None else "", sorted(partners)))
    for theirs, _, _ in found:
        if theirs:
            raise MemoryConfigError(problems or theirs, source)
    differing = {tuple(group) for _, _, group in found if len({found[rank][1] for rank in group}) > 1}
    if differing:
        raise MemoryConfigError(
            [
                f"ranks {', '.join(map(str, group))} have different plans; allowed: one plan for all ranks of a "
                "tensor, context or expert parallel group, since they run collectives together. Give them the same "
                "options"
                for group in sorted(differing)
            ],
            source,
        )
    assert plan is not None
    return plan


def collectives_begun(partners: Set[int]) -> dict[dist.ProcessGroup, int | None]:
    """How many collectives have begun in each group of several of these ranks; None where nobody counts them."""
    found: dict[dist.ProcessGroup, int | None] = {}
    group: Any  # its numbers are torch's own affair
    if len(partners) < 2 or not is_initialized():
        return found
    for group in dist.distributed_c10d._world.pg_map:
        if group.size() > 1 and partners >= set(dist.get_process_group_ranks(group)):
            try:
                found[group] = group._get_sequence_number_for_group()
            except (AttributeError, RuntimeError):
                found[group] = None
    return found


def highest(mine: Sequence[int], groups: Iterable[dist.ProcessGroup], device_type: str) -> list[int]:
    """The highest of each number over all ranks of ``groups``, and over those that share others with them."""
    groups = list(groups)
    if not groups:
        return list(mine)
    numbers = torch.tensor(mine, device=device_type)
    for group in (*groups, *groups):  # a rank of one group learns in the second round what a rank of another has seen
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    return numbers.tolist()

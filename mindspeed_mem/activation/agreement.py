"""All ranks make the plan, or none does: what one rank finds wrong is raised on every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from mindspeed_mem.plan import MemoryConfigError, MemoryPlan


def agreed(
    make: Callable[[], MemoryPlan], gather: Callable[[Any], list], partners: Collection[int], source: str
) -> MemoryPlan:
    """The plan that ``make`` returns on this rank.

    ``partners``: the ranks that run collectives with this one inside layers. Their plans must be equal: an operator
    that only some of them ran again would wait for the others' collectives for ever. Raises MemoryConfigError on all
    ranks.
    """
    plan, problems = None, ()
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
    return plan

"""The search for a plan: each stage by itself (stage_search.py), then all of them together by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindspeed_mem import reserve
from mindspeed_mem.adaptive.problem.definition import Problem
from mindspeed_mem.adaptive.search.decisions import SWAP, Plan, StagePlan
from mindspeed_mem.adaptive.search.hill_climb import WORK
from mindspeed_mem.adaptive.search.infeasible import InfeasibleError
from mindspeed_mem.adaptive.search.simulation import Simulated, simulate
from mindspeed_mem.adaptive.search.stage_search import StageSearch


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best plan found, and what it takes by simulation."""

    problem: Problem
    plan: Plan
    simulated: Simulated


class Search:
    """Searches plans for one problem under any device limits.

    Every plan that was simulated is remembered and counts for each later limit that it fits: asked from small to large
    limits (`curve`), more memory never gives a slower plan. Without `swap` plans only keep and recompute.
    """

    def __init__(self, problem: Problem, *, swap: bool = True):
        self.problem = problem = problem if swap else problem.without_swap()
        needs = any(group.needs for kind in problem.classes for group in kind.groups)
        self._inputs_move = (False, True) if swap and needs else (False,)  # the rules tried, see `Plan.inputs_move`
        self._seen: dict[Plan, Simulated] = {}
        self._stages = [StageSearch(problem, number) for number in range(len(problem.stages))]
        self.keep_all = Plan(stages=tuple(stage.keep_all for stage in self._stages))

    def best(self, device_limit: int | None = None) -> Found:
        """The fastest plan found whose simulated peak is within the limit on every stage.

        Raises InfeasibleError.
        """
        limit = self.problem.device_limit if device_limit is None else device_limit
        problem = self.problem.with_limit(limit)
        good = False
        for inputs_move in self._inputs_move:
            if not good:
                good = self._try(problem, inputs_move)
        fitting = [plan for plan, simulated in self._seen.items() if max(simulated.peaks) <= limit]
        # At equal times with a window, where it fits: what is as fast without one may not be, when copies take longer.
        best = min(fitting, key=lambda plan: (self._seen[plan].seconds, -plan.window_bytes), default=None)
        if best is None:
            least = self.least()
            raise InfeasibleError(problem, least.plan, least.simulated.peaks)
        return Found(problem=problem, plan=best, simulated=self._seen[best])

    def curve(self, limits: Sequence[int]) -> list[Found | None]:
        """The best plan for each limit; None where there is none."""
        found: dict[int, Found | None] = {}
        for limit in sorted(set(limits)):
            try:
                found[limit] = self.best(limit)
            except InfeasibleError:
                found[limit] = None
        return [found[limit] for limit in limits]

    def least(self) -> Found:
        """The plan that needs the least device memory of all found, whatever the limit."""
        plans = [
            Plan(stages=tuple(stage.least(inputs_move) for stage in self._stages), inputs_move=inputs_move)
            for inputs_move in self._inputs_move
        ]
        plan = min(plans, key=lambda one: max(self.simulated(one).peaks))
        return Found(problem=self.problem, plan=plan, simulated=self._seen[plan])

    def floor(self) -> int:
        """The smallest device limit that a plan was found for."""
        return max(self.least().simulated.peaks)

    def simulated(self, plan: Plan) -> Simulated:
        """What a plan takes; simulated once."""
        if plan not in self._seen:
            self._seen[plan] = simulate(self.problem, plan)
        return self._seen[plan]

    def _try(self, problem: Problem, inputs_move: bool) -> bool:
        """Search with this rule for inputs; whether what was found is as good as keeping everything."""
        stages = [found for stage in self._stages if (found := stage.best(problem, inputs_move)) is not None]
        if len(stages) < len(self._stages):
            return False
        self._simulate(problem, stages, inputs_move)
        if all(map(StageSearch.is_good, self._stages, stages)):
            return True
        work = WORK
        for number in sorted(range(len(stages)), key=lambda number: -self._stages[number].judge(stages[number])[0]):
            if work > 0 and not self._stages[number].is_good(stages[number]):
                stages[number], work = self._stages[number].climbed(problem, stages[number], inputs_move, work)
        self._simulate(problem, stages, inputs_move)
        return all(map(StageSearch.is_good, self._stages, stages))

    def _simulate(self, problem: Problem, stages: Sequence[StagePlan], inputs_move: bool) -> None:
        """With copies that may be late, too: that waits less, and holds more."""
        plan = Plan(stages=tuple(stages), inputs_move=inputs_move)
        self.simulated(plan)
        if not problem.link.blocking and any(SWAP in text for one in stages for part in one.parts for text in part):
            self.simulated(replace(plan, window_bytes=reserve.late_copies(problem.device_limit)))

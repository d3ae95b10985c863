"""The search for a plan: solve for counts, lay them out, simulate, correct the budget, again; then improve by hand.

The closed form is only a guide: what a plan takes and holds is what its simulation says. Each stage's budget is moved
by what the simulated peak is off the limit, up or down, so that a guide that is too careful costs nothing.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mindspeed_mem.adaptive import greedy, program
from mindspeed_mem.adaptive.closed_form import Rules, all_kept, at_once
from mindspeed_mem.adaptive.improve import WORK, improved, is_valid_stage
from mindspeed_mem.adaptive.infeasible import InfeasibleError, shortage
from mindspeed_mem.adaptive.layout import LAYOUTS, SWAP, Counts, Plan, StagePlan, lay_out
from mindspeed_mem.adaptive.problem import GB, Problem
from mindspeed_mem.adaptive.simulation import Simulated, Track, simulate

ROUNDS = 4
_CLOSE = 2e-3
"""A budget that would change by less than this share of the limit is not worth solving again."""
_GOOD = 5e-4
"""A stage that is slower than keeping everything by no more than this share is not searched any further."""
_REACH = (0.25, 1, 2)
"""Distances tried, in layers."""

Solver = Callable[..., Counts | None]


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best plan found, and what it takes by simulation."""

    problem: Problem
    plan: Plan
    simulated: Simulated
    solver: str
    """``HiGHS``, or why not: ``greedy (scipy is not installed)``."""


def default_solver() -> tuple[Solver, str]:
    """HiGHS if scipy is there."""
    if importlib.util.find_spec("scipy") is None:
        return greedy.solve, "greedy (scipy is not installed: pip install 'mindspeed-mem[adaptive]' finds faster plans)"
    return program.solve, "HiGHS"


class Search:
    """Searches plans for one problem under any device limits.

    Every plan that was simulated is remembered and counts for each later limit that it fits: asked from small to large
    limits (`curve`), more memory never gives a slower plan.
    """

    def __init__(self, problem: Problem, solver: Solver | None = None, solver_name: str = "given"):
        self.problem = problem
        self._solve, self._name = (solver, solver_name) if solver is not None else default_solver()
        self._seen: dict[Plan, Simulated] = {}
        self._stages = [StageSearch(problem, number, self._solve) for number in range(len(problem.stages))]
        self.keep_all = Plan(stages=tuple(stage.keep_all for stage in self._stages))

    def best(self, device_limit: int | None = None) -> Found:
        """The fastest plan found whose simulated peak is within the limit on every stage.

        Raises InfeasibleError.
        """
        limit = self.problem.device_limit if device_limit is None else device_limit
        problem = self.problem.with_limit(limit)
        good = False
        for inputs_move in (False, True):
            if not good and (inputs_move is False or self._needs):
                good = self._try(problem, inputs_move)
        best = self._fastest(limit)
        if best is None:
            raise self._shortage(problem)
        return Found(problem=problem, plan=best, simulated=self._seen[best], solver=self._name)

    def curve(self, limits: Sequence[int]) -> list[Found | None]:
        """The best plan for each limit; None where there is none."""
        found = {}
        for limit in sorted(set(limits)):
            try:
                found[limit] = self.best(limit)
            except InfeasibleError:
                found[limit] = None
        return [found[limit] for limit in limits]

    def floor(self) -> int:
        """The smallest device limit that a plan was found for."""
        return min(max(self.simulated(plan).peaks) for plan in self._least())

    def simulated(self, plan: Plan) -> Simulated:
        """What a plan takes; simulated once."""
        if plan not in self._seen:
            self._seen[plan] = simulate(self.problem, plan)
        return self._seen[plan]

    @property
    def _needs(self) -> bool:
        return any(group.needs for kind in self.problem.classes for group in kind.groups)

    def _try(self, problem: Problem, inputs_move: bool) -> bool:
        """Search with this rule for inputs; whether what was found is as good as keeping everything."""
        stages = [stage.best(problem, inputs_move) for stage in self._stages]
        if None in stages:
            return False
        self.simulated(Plan(stages=tuple(stages), inputs_move=inputs_move))
        if all(map(StageSearch.is_good, self._stages, stages)):
            return True
        work = WORK
        for number in sorted(range(len(stages)), key=lambda number: -self._stages[number].judge(stages[number])[0]):
            if work > 0 and not self._stages[number].is_good(stages[number]):
                stages[number], work = self._stages[number].climbed(problem, stages[number], inputs_move, work)
        self.simulated(Plan(stages=tuple(stages), inputs_move=inputs_move))
        return all(map(StageSearch.is_good, self._stages, stages))

    def _fastest(self, limit: int) -> Plan | None:
        fitting = [plan for plan, simulated in self._seen.items() if max(simulated.peaks) <= limit]
        return min(fitting, key=lambda plan: self._seen[plan].seconds, default=None)

    def _least(self) -> list[Plan]:
        return [
            Plan(stages=tuple(stage.least(inputs_move) for stage in self._stages), inputs_move=inputs_move)
            for inputs_move in (False, True)
        ]

    def _shortage(self, problem: Problem) -> InfeasibleError:
        least = min(self._least(), key=lambda plan: max(self.simulated(plan).peaks))
        return shortage(problem, least, self.simulated(least).peaks)


class StageSearch:
    """The plans of one stage that were tried, by themselves: nothing is waited for but copies."""

    def __init__(self, problem: Problem, number: int, solver: Solver):
        self.number, self._solve = number, solver
        line, stages = problem.pipeline, len(problem.stages)
        group = line.group_size or stages
        rest = line.micro_batches % group if problem.virtual_stages > 1 else 0
        few = stages + 3 if problem.virtual_stages == 1 else 2 * group + rest
        self._short = problem.with_micro_batches(min(line.micro_batches, few))
        distances = {round(len(kind.operators) * reach) for kind in problem.classes for reach in _REACH}
        self.distances = sorted(distances | {1})
        self._known: dict[StagePlan, tuple[float, int]] = {}
        self._least: dict[bool, StagePlan] = {}
        self._pool: dict[StagePlan, tuple[bool, bool]] = {}  # whether it is valid with inputs that stay, that move
        letters = lay_out(problem, all_kept(problem), "first", False)[number]
        self.keep_all = StagePlan(chunks=tuple(map(tuple, letters)))
        self._guards = (1, 0) if any(at_once(problem, number, c) for c in range(problem.virtual_stages)) else (1,)

    def judge(self, plan: StagePlan) -> tuple[float, int]:
        """Seconds and peak, with as few micro-batches as show both."""
        if plan not in self._known:
            track = Track(self._short, self.number, plan)
            self._known[plan] = track.alone(), track.peak
        return self._known[plan]

    def is_good(self, plan: StagePlan) -> bool:
        """Whether it is as fast as keeping everything."""
        return self.judge(plan)[0] <= self.judge(self.keep_all)[0] * (1 + _GOOD)

    def best(self, problem: Problem, inputs_move: bool) -> StagePlan | None:
        """The fastest that was found to fit the limit; None if none was."""
        if self.judge(self.keep_all)[1] <= problem.device_limit:
            return self.keep_all
        found = self._fitting(problem, inputs_move)
        for guard in self._guards:
            if found is not None and self.is_good(found):
                return found
            self._refine(problem, Rules(inputs_move=inputs_move, guard=guard))
            found = self._fitting(problem, inputs_move)
        if found is None:
            least = self.least(inputs_move)
            return least if self.judge(least)[1] <= problem.device_limit else None
        return found

    def climbed(self, problem: Problem, best: StagePlan, inputs_move: bool, work: int) -> tuple[StagePlan, int]:
        """The best after small changes to it, and, as long as there is work left, to plans of other kinds."""
        starts = [lambda: best]
        others = ({"ahead": 0.0}, {"swap": False}, {"recompute": False})
        kinds = [Rules(inputs_move=inputs_move, **other) for other in others]
        starts += [lambda rules=rules: self._refine(problem, rules) for rules in kinds]
        starts.append(lambda: self.least(inputs_move))
        for start in starts:
            plan = start() if work > 0 else None
            if plan is not None:
                found, work = improved(plan, problem, self.number, inputs_move, self.judge, self.distances, work)
                seconds, peak = self.judge(found)
                if peak <= problem.device_limit and seconds < self.judge(best)[0]:
                    best = found
        return best, work

    def least(self, inputs_move: bool) -> StagePlan:
        """The plan of the lowest peak there is, as far as can be found."""
        if inputs_move not in self._least:
            for guard, ahead in itertools.product(self._guards, (0.0, 1.0)):
                rules = Rules(inputs_move=inputs_move, guard=guard, ahead=ahead)
                counts = self._solve(self._short, self.number, 0.0, rules, overflow=True)
                if counts is not None:
                    for how in LAYOUTS:
                        self._lay_out(counts, rules, how, 0)
            pool = [plan for plan, valid in self._pool.items() if valid[inputs_move]]
            lowest = min(pool, key=lambda plan: (self.judge(plan)[1], plan.chunks), default=self.keep_all)
            none = self._short.with_limit(0)
            lowest, _ = improved(lowest, none, self.number, inputs_move, self.judge, self.distances)
            self._remember([lowest])
            self._least[inputs_move] = lowest
        return self._least[inputs_move]

    def _remember(self, plans: Sequence[StagePlan]) -> None:
        valid = tuple(is_valid_stage(self._short, self.number, plans[0], move) for move in (False, True))
        self._pool.update(dict.fromkeys(plans, valid))

    def _fitting(self, problem: Problem, inputs_move: bool) -> StagePlan | None:
        pool = (plan for plan, valid in self._pool.items() if valid[inputs_move])
        fitting = [plan for plan in pool if self.judge(plan)[1] <= problem.device_limit]
        # Ties by what they are made of: the same plan in every run and on every rank.
        return min(fitting, key=lambda plan: (self.judge(plan), plan.distance, plan.chunks), default=None)

    def _refine(self, problem: Problem, rules: Rules) -> StagePlan | None:
        """Solve, lay out and simulate, moving the budget by what the peak is off the limit; the last plan laid out."""
        limit = problem.device_limit
        budget, tried, best = limit / GB, set(), None
        for _ in range(ROUNDS):
            counts = self._solve(problem, self.number, budget, rules)
            counts = counts or self._solve(problem, self.number, budget, rules, overflow=True)
            mark = counts and tuple(counts.values())
            if counts is None or mark in tried:
                break
            tried.add(mark)
            plans = []
            for how in LAYOUTS:
                plans.append(self._lay_out(counts, rules, how, limit))
                if self.judge(plans[-1])[1] <= limit and self.is_good(plans[-1]):
                    return plans[-1]
            best = min(plans, key=lambda plan: self.judge(plan)[1])
            change = (limit - self.judge(best)[1]) / GB
            if 0 <= change <= _CLOSE * limit / GB:
                break
            budget += change
        return best

    def _lay_out(self, counts: Counts, rules: Rules, how: str, limit: int) -> StagePlan:
        """The counts laid out, with the distance that is fastest within the limit."""
        one = lay_out(self._short, counts, how, rules.inputs_move, max(1, rules.guard), only=self.number)[self.number]
        chunks = tuple(map(tuple, one))
        swaps = any(SWAP in text for chunk in chunks for text in chunk)
        choices: list[StagePlan] = []
        for far in self.distances if swaps else (1,):
            choices.append(StagePlan(chunks=chunks, distance=far))
            (seconds, peak), before = self.judge(choices[-1]), choices[-2:-1]
            # Further ahead holds more; it is no faster once nothing is waited for.
            if peak > limit or any(seconds >= self.judge(one)[0] * (1 - 1e-4) for one in before):
                break
        self._remember(choices)
        fitting = [choice for choice in choices if self.judge(choice)[1] <= limit]
        if fitting:
            return min(fitting, key=lambda choice: self.judge(choice)[0])
        return min(choices, key=lambda choice: self.judge(choice)[1])

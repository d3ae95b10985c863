"""The search on one stage by itself: solve for counts, lay them out, play them, move the budget, again; then improve.

The closed form is only a guide: what a plan takes and holds is what its simulation says. The budget is moved by what
the simulated peak is off the limit, up or down, so that a guide that is too careful costs nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from mindspeed_mem.adaptive.problem.definition import GB, Problem
from mindspeed_mem.adaptive.search.decisions import ORDERS, SWAP, Counts, StagePlan, all_kept, is_valid_stage, lay_out
from mindspeed_mem.adaptive.search.hill_climb import Climb
from mindspeed_mem.adaptive.search.milp import Rules, at_once, solve
from mindspeed_mem.adaptive.search.simulation import StageTrack

ROUNDS = 4
_CLOSE = 2e-3
"""A budget that would change by less than this share of the limit is not worth solving again."""
_GOOD = 5e-4
"""A stage that is slower than keeping everything by no more than this share is not searched any further."""
_REACH = (0.25, 1, 2)
"""Distances tried, in layers."""


class StageSearch:
    """The plans of one stage that were tried, by themselves: nothing is waited for but copies."""

    def __init__(self, problem: Problem, number: int):
        self.number = number
        line, stages = problem.pipeline, len(problem.stages)
        group = line.group_size or stages
        rest = line.micro_batches % group if problem.virtual_stages > 1 else 0
        few = stages + 3 if problem.virtual_stages == 1 else 2 * group + rest
        self._short = problem.with_micro_batches(min(line.micro_batches, few))
        distances = {round(len(kind.operators) * reach) for kind in problem.classes for reach in _REACH}
        # Over a link that blocks a copy costs the same whenever it starts: the nearest distance holds the least.
        self.distances = [1] if problem.link.blocking else sorted(distances | {1})
        self._ahead = 0.0 if problem.link.blocking else Rules.ahead  # and no copy is ever under way
        self._known: dict[StagePlan, tuple[float, int]] = {}
        self._least: dict[bool, StagePlan] = {}
        self._pool: dict[StagePlan, tuple[bool, bool]] = {}  # whether it is valid with inputs that stay, that move
        letters = lay_out(problem, all_kept(problem), "first", False)[number]
        self.keep_all = StagePlan(parts=tuple(map(tuple, letters)))
        self._guards = (1, 0) if any(at_once(problem, number, c) for c in range(problem.virtual_stages)) else (1,)

    def judge(self, plan: StagePlan) -> tuple[float, int]:
        """Seconds and peak, with as few micro-batches as show both."""
        if plan not in self._known:
            track = StageTrack(self._short, self.number, plan)
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
            self._refine(problem, Rules(inputs_move=inputs_move, guard=guard, ahead=self._ahead))
            found = self._fitting(problem, inputs_move)
        if found is None:
            least = self.least(inputs_move)
            return least if self.judge(least)[1] <= problem.device_limit else None
        return found

    def climbed(self, problem: Problem, best: StagePlan, inputs_move: bool, work: int) -> tuple[StagePlan, int]:
        """The best after small changes to it, and, as long as there is work left, to plans of other kinds."""
        rules = Rules(inputs_move=inputs_move, ahead=self._ahead)
        kinds = [replace(rules, ahead=0.0), replace(rules, swap=False), replace(rules, recompute=False)]
        starts: list[Callable[[], StagePlan | None]] = [lambda: best]
        starts += [partial(self._refine, problem, kind) for kind in kinds]
        starts.append(lambda: self.least(inputs_move))
        for start in starts:
            plan = start() if work > 0 else None
            if plan is not None:
                climb = Climb(problem, self.number, inputs_move, self.judge, self.distances, work)
                found, work = climb.run(plan), climb.work
                seconds, peak = self.judge(found)
                if peak <= problem.device_limit and seconds < self.judge(best)[0]:
                    best = found
        return best, work

    def least(self, inputs_move: bool) -> StagePlan:
        """The plan of the lowest peak there is, as far as can be found."""
        if inputs_move not in self._least:
            for guard, ahead in itertools.product(self._guards, (0.0, 1.0)):
                rules = Rules(inputs_move=inputs_move, guard=guard, ahead=ahead)
                counts = solve(self._short, self.number, 0.0, rules, overflow=True)
                if counts is not None:
                    for how in ORDERS:
                        self._lay_out(counts, rules, how, 0)
            pool = [plan for plan, valid in self._pool.items() if valid[inputs_move]]
            lowest = min(pool, key=lambda plan: (self.judge(plan)[1], plan.parts), default=self.keep_all)
            none = self._short.with_limit(0)
            lowest = Climb(none, self.number, inputs_move, self.judge, self.distances).run(lowest)
            self._remember([lowest])
            self._least[inputs_move] = lowest
        return self._least[inputs_move]

    def _remember(self, plans: Sequence[StagePlan]) -> None:
        stay, move = (is_valid_stage(self._short, self.number, plans[0], inputs_move) for inputs_move in (False, True))
        self._pool.update(dict.fromkeys(plans, (stay, move)))

    def _fitting(self, problem: Problem, inputs_move: bool) -> StagePlan | None:
        pool = (plan for plan, valid in self._pool.items() if valid[inputs_move])
        fitting = [plan for plan in pool if self.judge(plan)[1] <= problem.device_limit]
        # Ties by what they are made of: the same plan in every run and on every rank.
        return min(fitting, key=lambda plan: (self.judge(plan), plan.distance, plan.parts), default=None)

    def _refine(self, problem: Problem, rules: Rules) -> StagePlan | None:
        """Solve, lay out and simulate, moving the budget by what the peak is off the limit; the last plan laid out."""
        limit = problem.device_limit
        budget, tried = limit / GB, set()
        best: StagePlan | None = None
        for _ in range(ROUNDS):
            counts = solve(problem, self.number, budget, rules)
            counts = counts or solve(problem, self.number, budget, rules, overflow=True)
            mark = counts and tuple(counts.values())
            if counts is None or mark in tried:
                break
            tried.add(mark)
            plans = []
            for how in ORDERS:
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
        parts = tuple(map(tuple, one))
        swaps = any(SWAP in text for part in parts for text in part)
        choices: list[StagePlan] = []
        for far in self.distances if swaps else (1,):
            choices.append(StagePlan(parts=parts, distance=far))
            (seconds, peak), before = self.judge(choices[-1]), choices[-2:-1]
            # Further ahead holds more; it is no faster once nothing is waited for.
            if peak > limit or any(seconds >= self.judge(one)[0] * (1 - 1e-4) for one in before):
                break
        self._remember(choices)
        fitting = [choice for choice in choices if self.judge(choice)[1] <= limit]
        if fitting:
            return min(fitting, key=lambda choice: self.judge(choice)[0])
        return min(choices, key=lambda choice: self.judge(choice)[1])

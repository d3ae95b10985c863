"""The search on one stage by itself: solve for counts, lay them out, play them, move the budget, again; then improve.

The closed form is only a guide: what a plan takes and holds is what its simulation says. Counts can be laid out in many
ways. The budget is moved for each of the best of them by what its own simulated peak is off the limit, up or down, so
that a guide that is too careful costs nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from mindspeed_mem.adaptive.problem.definition import GB, Problem
from mindspeed_mem.adaptive.search import many
from mindspeed_mem.adaptive.search.decisions import (
    SWAP,
    Counts,
    StagePlan,
    all_kept,
    host_bytes,
    is_valid_stage,
    lay_out,
)
from mindspeed_mem.adaptive.search.descent import Descent
from mindspeed_mem.adaptive.search.milp import NODES, Rules, Solved, at_once, bound, loose, solve
from mindspeed_mem.adaptive.search.simulation import StageTrack

ROUNDS = 3
_CLOSE = 2e-3
"""A budget that would change by less than this share of the limit is not worth solving again."""
GOOD = 5e-4
"""A stage that is slower than the fastest there can be by no more than this share is not searched any further."""
_REACH = (0.25, 1, 2, 4, 8)
"""Distances that every way is tried with, in layers."""
_LAST = (1, 3)
"""Layers at the end of a part that swap last, where swaps are spread."""
_WAYS = 2
"""Ways to lay out counts that are looked at more closely."""
_STEP = 0.01
"""By what share of the limit memory's price is found."""
_PUT_BY = 4
"""One part of so many of the work is put by for changes of two letters of one layer."""
_LEAST = 1_000_000
"""Operators played at most for the plan of the lowest peak."""


class Judged(NamedTuple):
    """What a plan of a stage takes."""

    seconds: float
    peak: int
    """Bytes."""
    stall: float
    """Of these seconds, those in which computation waits for copies."""


class Way(NamedTuple):
    """How counts become a plan."""

    how: str
    """The order of the layers, see `lay_out`."""
    last: int
    """The layers at the end of a part that come last in that order."""
    distance: int


class StageSearch:
    """The plans of one stage that were tried, by themselves: nothing is waited for but copies."""

    def __init__(self, problem: Problem, number: int, nodes: int = NODES):
        """nodes: of each search tree at most."""
        self.number, self._nodes = number, nodes
        line, stages = problem.pipeline, len(problem.stages)
        group = line.group_size or stages
        rest = line.micro_batches % group if problem.virtual_stages > 1 else 0
        few = stages + 3 if problem.virtual_stages == 1 else 2 * group + rest
        self.rounds = min(line.micro_batches, few)
        self._short = problem.with_micro_batches(self.rounds)
        distances = {max(1, round(len(kind.operators) * reach)) for kind in problem.classes for reach in _REACH}
        # Over a link that blocks a copy costs the same whenever it starts: the nearest distance holds the least.
        self.distances = [1] if problem.link.blocking else sorted(distances | {1})
        self._ahead = 0.0 if problem.link.blocking else Rules.ahead  # and no copy is ever under way
        self._known: dict[StagePlan, Judged] = {}
        self._least: dict[bool, StagePlan] = {}
        self._pool: dict[StagePlan, tuple[bool, bool]] = {}  # whether it is valid with inputs that stay, that move
        self._solutions: dict[tuple, Solved | None] = {}
        self._bounds: dict[tuple[float, Rules], float] = {}
        self._letters: dict[tuple, tuple[tuple[str, ...], ...]] = {}
        letters = lay_out(problem, all_kept(problem), "first", False)[number]
        self.keep_all = StagePlan(parts=tuple(map(tuple, letters)))
        self._guards = (1, 0) if any(at_once(problem, number, c) for c in range(problem.virtual_stages)) else (1,)

    @property
    def gap(self) -> float:
        """The largest gap that a solve has left because it came to its limit of nodes, as a share of the cycle."""
        return max((one.gap for one in self._solutions.values() if one is not None and one.stopped), default=0.0)

    def judge(self, plan: StagePlan) -> Judged:
        """With as few micro-batches as show seconds and peak."""
        if plan not in self._known:
            track = StageTrack(self._short, self.number, plan)
            self._known[plan] = Judged(track.alone(), track.peak, track.stall)
        return self._known[plan]

    def least_seconds(self, problem: Problem, inputs_move: bool) -> float:
        """What no plan that fits is below, of what `judge` plays."""
        return self.rounds * self._bound(problem, problem.device_limit / GB, Rules(inputs_move=inputs_move))

    def _bound(self, problem: Problem, budget: float, rules: Rules) -> float:
        key = budget, loose(rules)
        if key not in self._bounds:
            self._bounds[key] = bound(problem, self.number, *key)
        return self._bounds[key]

    def is_good(self, problem: Problem, plan: StagePlan, inputs_move: bool, enough: float) -> bool:
        """Whether hardly anything can be faster, or it takes no more seconds than are `enough`."""
        return self.judge(plan).seconds <= max(enough, self.least_seconds(problem, inputs_move) * (1 + GOOD))

    def best(self, problem: Problem, inputs_move: bool, enough: float) -> StagePlan | None:
        """The fastest that was found to fit the limit; None if none was.

        enough: seconds that nothing is gained below.
        """
        if self.judge(self.keep_all).peak <= problem.device_limit:
            return self.keep_all
        found = self._fitting(problem, inputs_move)
        for guard in self._guards:
            if found is not None and self.is_good(problem, found, inputs_move, enough):
                return found
            self._refine(problem, Rules(inputs_move=inputs_move, guard=guard, ahead=self._ahead), enough)
            found = self._fitting(problem, inputs_move)
        if found is None:
            least = self.least(inputs_move)
            return least if self.judge(least).peak <= problem.device_limit else None
        return found

    def climbed(
        self, problem: Problem, best: StagePlan, inputs_move: bool, work: int, enough: float
    ) -> tuple[StagePlan, int]:
        """The best after small changes to it and, as long as there is work left, to plans of other kinds.

        enough: seconds that nothing is gained below.
        """
        rules = Rules(inputs_move=inputs_move, ahead=self._ahead)
        kinds = [replace(rules, ahead=0.0), replace(rules, recompute=False)]
        starts: list[Callable[[], StagePlan | None]] = [lambda: best, lambda: self._without_swap(problem)]
        starts.append(lambda: self._nearly(problem, best, inputs_move))
        starts += [partial(self._further, problem, best, inputs_move, far) for far in (2.0, 0.5)]
        starts += [partial(self._refine, problem, kind, enough) for kind in kinds]
        starts += [lambda: self.least(inputs_move), lambda: best]
        for within, rest in ((False, work // _PUT_BY), (True, 0)):
            most = (work - rest) // 4
            for number, start in enumerate(starts, 1):
                left = work - rest
                plan = start() if left > 0 and not self.is_good(problem, best, inputs_move, enough) else None
                if plan is not None:
                    mine = left if number == len(starts) else min(left, most)
                    descent = self._descent(problem, inputs_move, mine)
                    found = descent.run(plan, deep=number == len(starts), within=within)
                    work += descent.work - mine
                    judged = self.judge(found)
                    if judged.peak <= problem.device_limit and judged.seconds < self.judge(best).seconds:
                        best = found
                        self.remember(best)
        return best, work

    def least(self, inputs_move: bool) -> StagePlan:
        """The plan of the lowest peak that the host has room for, as far as can be found."""
        if inputs_move not in self._least:
            for guard, ahead in itertools.product(self._guards, (0.0, 1.0)):
                rules = Rules(inputs_move=inputs_move, guard=guard, ahead=ahead)
                solved = self._solve(self._short, 0.0, rules, overflow=True)
                if solved is not None:
                    for way in itertools.chain.from_iterable(self._ways(solved.counts)):
                        self._lay_out(solved.counts, rules, way)
            pool = [plan for plan, valid in self._pool.items() if valid[inputs_move] and self.has_room(plan)]
            lowest = min(pool, key=lambda plan: (self.judge(plan).peak, plan.parts), default=self.keep_all)
            none = self._short.with_limit(0)
            lower = self._descent(none, inputs_move, _LEAST).run(lowest)
            lowest = lower if self.has_room(lower) else lowest
            self.remember(lowest)
            self._least[inputs_move] = lowest
        return self._least[inputs_move]

    def has_room(self, plan: StagePlan) -> bool:
        """Whether the host has room for what it swaps."""
        limit = self._short.host_limit
        return limit is None or host_bytes(self._short, self.number, plan) <= limit

    def _descent(self, problem: Problem, inputs_move: bool, work: int) -> Descent:
        import numpy

        kinds = (problem.class_of[name] for part in problem.stages[self.number].parts for name in part.layers)
        price = sum(len(kind.operators) for kind in kinds) * min(8, len(self._short.passes[self.number]))

        def play(rows: many.Array, distance: int) -> many.Several:
            if len(rows) == 1:  # faster by itself, and perhaps known
                judged = self.judge(many.plan_of(self._short, self.number, rows[0], distance))
                return many.Several(*(numpy.array([one]) for one in judged))
            return many.alone(self._short, self.number, rows, distance)

        return Descent(problem, self.number, inputs_move, play, self.distances, work, price=price)

    def remember(self, plan: StagePlan) -> None:
        """It counts from now on, wherever it fits."""
        if plan not in self._pool:
            valid = [is_valid_stage(self._short, self.number, plan, inputs_move) for inputs_move in (False, True)]
            self._pool[plan] = valid[0], valid[1]

    def fitting(self, problem: Problem, inputs_move: bool) -> list[StagePlan]:
        """All that were found to fit the limit, the fastest first; at equal times always in the same order."""
        pool = (plan for plan, valid in self._pool.items() if valid[inputs_move])
        found = [plan for plan in pool if self.judge(plan).peak <= problem.device_limit]
        return sorted(found, key=lambda plan: (self.judge(plan), plan.distance, plan.parts))

    def _fitting(self, problem: Problem, inputs_move: bool) -> StagePlan | None:
        return next(iter(self.fitting(problem, inputs_move)), None)

    def _without_swap(self, problem: Problem) -> StagePlan | None:
        found = self.fitting(problem, False)
        return next((plan for plan in found if not any(SWAP in text for part in plan.parts for text in part)), None)

    def _nearly(self, problem: Problem, best: StagePlan, inputs_move: bool) -> StagePlan | None:
        """What is faster, and misses the limit by least."""
        pool = (plan for plan, valid in self._pool.items() if valid[inputs_move])
        faster = [plan for plan in pool if self.judge(plan).seconds < self.judge(best).seconds]
        over = (plan for plan in faster if self.judge(plan).peak > problem.device_limit)
        return min(over, key=lambda plan: (self.judge(plan).peak, self.judge(plan).seconds, plan.parts), default=None)

    def _further(self, problem: Problem, best: StagePlan, inputs_move: bool, far: float) -> StagePlan | None:
        """The fastest whose copies come back so many times as early, or more; of a share below one, that much later."""
        limit = best.distance * far
        found = self.fitting(problem, inputs_move)
        return next((plan for plan in found if (plan.distance - limit) * (far - 1) >= 0), None)

    def _refine(self, problem: Problem, rules: Rules, enough: float) -> StagePlan | None:
        """Solve, lay out and simulate in every way, then solve again for the ways that come out best, each with the
        budget moved by what its own peak is off the limit; the fastest of their first plans."""
        limit = problem.device_limit
        solved = self._solve(problem, limit / GB, rules) or self._solve(problem, limit / GB, rules, overflow=True)
        if solved is None:
            return None
        counts, price = solved.counts, self._price(problem, rules)

        def cost(way: Way) -> float:
            judged = self.judge(self._lay_out(counts, rules, way))
            return judged.seconds + price * (judged.peak - limit) / GB

        best: list[tuple[float, Way]] = []
        for ways in self._ways(counts):
            tried: list[tuple[float, Way]] = []
            for way in ways:
                tried.append((cost(way), way))
                if not self.judge(self._lay_out(counts, rules, way)).stall:
                    break  # further ahead holds more, and is no faster
            best.append(min(tried))
        plans = []
        for _, way in sorted(best)[:_WAYS]:
            way = self._at_its_distance(cost, way)
            plan = self._lay_out(counts, rules, way)
            plans.append(plan)
            judged = self.judge(plan)
            done = self._fitting(problem, rules.inputs_move)
            if done is not None and self.is_good(problem, done, rules.inputs_move, enough):
                break
            self._settle(problem, rules, way, plan)
            if not problem.link.blocking and judged.stall > GOOD * judged.seconds:
                idle = judged.stall / self.rounds / problem.virtual_stages
                self._settle(problem, replace(rules, idle=idle), way, plan)
        return min(plans, key=lambda plan: self.judge(plan))

    def _at_its_distance(self, cost: Callable[[Way], float], way: Way) -> Way:
        """Between the distances that all ways are tried with, by steps that get smaller."""
        place, best = self.distances.index(way.distance), (cost(way), way)
        step = max(abs(other - way.distance) for other in self.distances[max(0, place - 1) : place + 2]) // 2
        while step:
            sides = (
                way._replace(distance=far) for far in (best[1].distance - step, best[1].distance + step) if far > 0
            )
            best = min(best, *((cost(side), side) for side in sides))
            step //= 2
        return best[1]

    def _settle(self, problem: Problem, rules: Rules, way: Way, plan: StagePlan) -> None:
        """Move the budget until this way's plan is as near below the limit as it gets."""
        limit = problem.device_limit / GB
        budget, tried = limit, {plan}
        for _ in range(ROUNDS):
            budget += limit - self.judge(plan).peak / GB
            solved = self._solve(problem, budget, rules) or self._solve(problem, budget, rules, overflow=True)
            if solved is None:
                break
            plan = self._lay_out(solved.counts, rules, way)
            if plan in tried or 0 <= limit - self.judge(plan).peak / GB <= _CLOSE * limit:
                break
            tried.add(plan)

    def _solve(self, problem: Problem, budget: float, rules: Rules, *, overflow: bool = False) -> Solved | None:
        key = problem.pipeline.micro_batches, budget, rules, overflow
        if key not in self._solutions:
            self._solutions[key] = solve(problem, self.number, budget, rules, overflow=overflow, nodes=self._nodes)
        return self._solutions[key]

    def _price(self, problem: Problem, rules: Rules) -> float:
        """Seconds of what the judge plays that a GB of device memory is worth, by fractions of layers."""
        limit = problem.device_limit / GB
        seconds = [self._bound(problem, limit * share, rules) for share in (1 - _STEP, 1)]
        return (seconds[0] - seconds[1]) * self.rounds / (limit * _STEP) if seconds[0] < math.inf else 0.0

    def _ways(self, counts: Counts) -> list[list[Way]]:
        """For each order of layers, those with each distance, the nearest first."""
        swaps = any(one.swap for row in counts.values() for one in row)
        orders = [("first", 1), *(("spread", last) for last in (_LAST if swaps else (1,)))]
        return [[Way(*order, far) for far in (self.distances if swaps else (1,))] for order in orders]

    def _lay_out(self, counts: Counts, rules: Rules, way: Way) -> StagePlan:
        """The counts laid out this way."""
        last = max(way.last, rules.guard)
        key = way.how, rules.inputs_move, last, tuple(counts.items())
        if key not in self._letters:
            one = lay_out(self._short, counts, way.how, rules.inputs_move, last, only=self.number)[self.number]
            self._letters[key] = tuple(map(tuple, one))
        plan = StagePlan(parts=self._letters[key], distance=way.distance)
        self.remember(plan)
        return plan

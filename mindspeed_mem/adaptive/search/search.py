"""The search for a plan: each stage by itself (stage_search.py), then all of them together by simulation."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from mindspeed_mem import reserve
from mindspeed_mem.adaptive.problem.definition import Problem
from mindspeed_mem.adaptive.search import baselines, many
from mindspeed_mem.adaptive.search.decisions import (
    SWAP,
    Plan,
    StagePlan,
    host_bytes,
    under,
    whole_layers_swapped,
)
from mindspeed_mem.adaptive.search.descent import WORK, Descent
from mindspeed_mem.adaptive.search.infeasible import InfeasibleError
from mindspeed_mem.adaptive.search.milp import NODES
from mindspeed_mem.adaptive.search.simulation import Simulated, most_played, simulate
from mindspeed_mem.adaptive.search.stage_search import GOOD, StageSearch

if TYPE_CHECKING:
    from mindspeed_mem.adaptive.search.descent import Play
    from mindspeed_mem.adaptive.search.many_scripts import Array

MEGATRON = "Megatron's "
WITHOUT_SWAP = "the best without swap"


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best plan found, and what it takes by simulation."""

    problem: Problem
    plan: Plan
    simulated: Simulated
    rivals: Mapping[str, Simulated] = field(default_factory=dict)
    """What else fits, by what it does: simple plans, none of which is faster, and Megatron's own recomputation of
    layers."""
    gap: float = 0.0
    """How far from the best counts a solve may be that came to its limit of nodes, as a share of the step; 0: none
    did."""


class _Simple(NamedTuple):
    """What simpler means achieve, by what they do: those that are plans, and others."""

    plans: dict[str, Plan]
    others: dict[str, Simulated]


class Search:
    """Searches plans for one problem under any device limits.

    Every plan that was simulated is remembered and counts for each later limit that it fits: asked from small to large
    limits (`curve`), more memory never gives a slower plan. Without `swap` plans only keep and recompute.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        swap: bool = True,
        work: int = WORK,
        nodes: int = NODES,
        output_gradients: bool = True,
    ):
        """
        Args:
            work: operators simulated for small changes at most.
            nodes: of each tree of the solver at most.
            output_gradients: plans may move those that wait for gradients of weights.
        """
        self._known: dict[Plan, Simulated] = {}
        self._simple: dict[int, _Simple] = {}
        self._without = Search(problem, swap=False, work=work // 5, nodes=nodes) if swap else None
        if self._without is not None:  # which asks for plans without swap, that take the same
            self._without._known, self._without._simple = self._known, self._simple
        self._work, self._nodes = work, nodes
        self.problem = problem = problem if swap else problem.without_swap()
        needs = any(group.needs for kind in problem.classes for group in kind.groups)
        self._inputs_move = (False, True) if swap and needs else (False,)  # the rules tried, see `Plan.inputs_move`
        waits = any(one.gradient_bytes for kind in problem.classes for one in kind.operators)
        waits = waits or any(part.after.gradient_bytes for stage in problem.stages for part in stage.parts)
        self._gradients_may = (
            output_gradients and swap and waits and problem.pipeline.apart and not problem.output_gradients
        )
        fixed = any(not group.swappable for kind in problem.classes for group in kind.groups)
        self._names_whole_layers = swap and fixed
        self._seen: dict[Plan, Simulated] = {}
        self._stages = [StageSearch(problem, number, nodes) for number in range(len(problem.stages))]
        self.keep_all = Plan(stages=tuple(stage.keep_all for stage in self._stages))

    def best(self, device_limit: int | None = None) -> Found:
        """The fastest plan found whose simulated peak is within the limit on every stage.

        Raises InfeasibleError.
        """
        limit = self.problem.device_limit if device_limit is None else device_limit
        problem = self.problem.with_limit(limit)
        kept = self.simulated(self.keep_all)
        if self._fits(self.keep_all, limit):  # nothing is faster
            return Found(problem=problem, plan=self.keep_all, simulated=kept)
        rivals = self._rivals(problem)
        stages: list[StagePlan] = []
        for inputs_move in self._inputs_move:
            if self._may_gain(problem, stages, inputs_move):
                stages = self._try(problem, inputs_move) or stages
        gap = max(stage.gap for stage in self._stages)
        best = self._fastest(limit) or self._with_whole_layers(limit)
        if self._with_gradients is not None and self._gradients_may_gain(limit, best):
            of_these = self._move_gradients(self._with_gradients, limit)
            best = self._fastest(limit)
            gap = of_these if best is not None and best.output_gradients else gap
        if best is None:
            least = self.least()
            raise InfeasibleError(problem, least.plan, least.simulated.peaks)
        return Found(problem=problem, plan=best, simulated=self._seen[best], rivals=rivals, gap=gap)

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
        if self._names_whole_layers:
            everything = whole_layers_swapped(self.problem, plans[0], self.problem.num_layers)
            plans += [everything] * self._host_has_room(everything)
        if self._with_gradients is not None:
            plans.append(replace(self._with_gradients.least().plan, output_gradients=True))
        plan = min(plans, key=lambda one: max(self.simulated(one).peaks))
        return Found(problem=self.problem, plan=plan, simulated=self._seen[plan])

    def floor(self) -> int:
        """The smallest device limit that a plan was found for."""
        return max(self.least().simulated.peaks)

    def simulated(self, plan: Plan) -> Simulated:
        """What a plan takes; simulated once."""
        if plan not in self._seen:
            if plan not in self._known:
                self._known[plan] = simulate(self.problem, plan)
            self._seen[plan] = self._known[plan]
        return self._seen[plan]

    @cached_property
    def _with_gradients(self) -> Search | None:
        """The same where gradients of outputs move, if any wait for gradients of weights."""
        problem, host = self.problem.with_output_gradients(), self.problem.host_limit
        least = (host_bytes(problem, *one) for one in enumerate(self.keep_all.stages))
        if not self._gradients_may or (host is not None and max(least) > host):
            return None
        return Search(problem, work=self._work, nodes=self._nodes)

    def _move_gradients(self, search: Search, limit: int) -> float:
        """Simulate the best plans that move them; returns the gap of their search. That plans without a window, which
        waits for every copy; so it also leaves the window room."""
        gap, window = 0.0, 0 if self.problem.link.blocking else reserve.late_copies(limit)
        for room in sorted({limit - window, limit}):
            with contextlib.suppress(InfeasibleError):
                found = search.best(room)
                gap = max(gap, found.gap)
                for late in {found.plan.window_bytes, window}:
                    self.simulated(replace(found.plan, output_gradients=True, window_bytes=late))
        return gap

    def _fastest(self, limit: int) -> Plan | None:
        """Of all that was found and fits, with copies in idle time where these gain anything."""
        fitting = [plan for plan in self._seen if self._fits(plan, limit)]
        best = min(fitting, key=self._order, default=None)
        if best is not None and (other := self._in_idle_time(best)) is not None and self._fits(other, limit):
            best = min(best, other, key=self._order)
        return best

    def _with_whole_layers(self, limit: int) -> Plan | None:
        """Where naming operators does not do: the plan that needs least of these, with the fewest layers of each part
        that leave as a whole; None: not even with all."""
        if not self._names_whole_layers:
            return None
        least = Plan(stages=tuple(stage.least(False) for stage in self._stages))
        layers = range(1, 1 + max(len(part.layers) for stage in self.problem.stages for part in stage.parts))

        def plan(count: int) -> Plan:
            return whole_layers_swapped(self.problem, least, count)

        place = bisect.bisect_left(layers, True, key=lambda count: max(self.simulated(plan(count)).peaks) <= limit)
        fewest = plan(layers[min(place, len(layers) - 1)])
        return fewest if self._fits(fewest, limit) else None

    def _gradients_may_gain(self, limit: int, best: Plan | None) -> bool:
        """Whether to move them, and nothing else, is faster than the best without."""
        window = 0 if self.problem.link.blocking else reserve.late_copies(limit)
        least = self.simulated(replace(self.keep_all, output_gradients=True, window_bytes=window))
        return best is None or self._seen[best].seconds > least.seconds * (1 + GOOD)

    def _fits(self, plan: Plan, limit: int) -> bool:
        """Whether it needs no more of the device than the limit, nor of the host than there is."""
        return max(self.simulated(plan).peaks) <= limit and self._host_has_room(plan)

    def _host_has_room(self, plan: Plan) -> bool:
        host, problem = self.problem.host_limit, under(self.problem, plan)
        return host is None or all(host_bytes(problem, *one) <= host for one in enumerate(plan.stages))

    def _in_idle_time(self, plan: Plan) -> Plan | None:
        """The same with more copies back where a pass has ended, if that may change anything."""
        moves = any(SWAP in text for one in plan.stages for part in one.parts for text in part)
        if plan.idle_prefetch or len(plan.stages) == 1 or self.problem.link.blocking or not moves:
            return None
        return replace(plan, idle_prefetch=True)

    def _order(self, plan: Plan) -> tuple[float, int, bool, int]:
        """Of plans that are as fast, one that moves less; of the same with and without a window one that has it: when
        copies take longer than was thought, it waits less."""
        problem = under(self.problem, plan)
        moved = sum(host_bytes(problem, number, stage) for number, stage in enumerate(plan.stages))
        return self._seen[plan].seconds, moved, plan.idle_prefetch, -plan.window_bytes

    def _rivals(self, problem: Problem) -> dict[str, Simulated]:
        """What simpler means achieve. Those that are plans count as found from now on, so that none of them is better
        than what is."""
        if problem.device_limit not in self._simple:
            self._simple[problem.device_limit] = _simple(problem)
        plans, blocks = self._simple[problem.device_limit]
        plans = dict(plans)
        if self._without is not None:
            with contextlib.suppress(InfeasibleError):
                plans[WITHOUT_SWAP] = self._without.best(problem.device_limit).plan
        for plan in plans.values():
            for stage, one in zip(self._stages, plan.stages, strict=True):
                stage.remember(one)
        return {name: self.simulated(plan) for name, plan in plans.items()} | blocks

    def _may_gain(self, problem: Problem, stages: Sequence[StagePlan], inputs_move: bool) -> bool:
        """Whether anything with this rule for inputs can be faster than these plans."""
        pairs = list(zip(self._stages, stages, self._enough(problem, inputs_move), strict=False))
        return not pairs or not all(stage.is_good(problem, plan, inputs_move, enough) for stage, plan, enough in pairs)

    def _enough(self, problem: Problem, inputs_move: bool) -> list[float]:
        """Seconds that a stage by itself need not be below: those of the stage that sets the pace, as long as what
        it adds once to the step, when the pipeline fills and empties, is little."""
        least = [stage.least_seconds(problem, inputs_move) for stage in self._stages]
        share = GOOD * (problem.pipeline.micro_batches / len(least) + 1)
        return [min(max(least), one * (1 + share)) for one in least]

    def _try(self, problem: Problem, inputs_move: bool) -> list[StagePlan]:
        """Search with this rule for inputs; the best plan of each stage by itself, none if one has none.

        The stage with the least room comes first: what is found for it may do for those that have its layers.
        """
        enough, work = self._enough(problem, inputs_move), self._work
        least = [stage.least_seconds(problem, inputs_move) for stage in self._stages]
        found: dict[int, StagePlan] = {}
        for number in sorted(range(len(least)), key=lambda number: -least[number]):
            stage = self._stages[number]
            self._lend(found, number)
            best = stage.best(problem, inputs_move, enough[number])
            if best is None:
                return []
            if work > 0:
                best, work = stage.climbed(problem, best, inputs_move, work, enough[number])
            found[number] = best
        stages = [found[number] for number in range(len(least))]
        self._simulate(problem, stages, inputs_move)
        if len(stages) > 1:
            self._simulate(problem, self._together(problem, stages, inputs_move), inputs_move)
        return stages

    def _lend(self, found: Mapping[int, StagePlan], number: int) -> None:
        """Let a stage know what was found for others with the same layers."""
        layers = [[part.layers for part in stage.parts] for stage in self.problem.stages]
        stage = self._stages[number]
        for plan in (plan for other, plan in found.items() if layers[other] == layers[number]):
            if stage.has_room(plan):
                stage.remember(plan)

    def _together(self, problem: Problem, stages: Sequence[StagePlan], inputs_move: bool) -> list[StagePlan]:
        """The stages after small changes, judged by playing all of them: where stages wait for each other, the fastest
        by itself need not be the best."""
        changed, work = list(stages), self._work // 2
        line = problem.pipeline
        price = sum(
            len(problem.class_of[n].operators) for one in problem.stages for part in one.parts for n in part.layers
        )
        price *= 2 * min(line.micro_batches, most_played(problem))
        for number in sorted(
            range(len(stages)), key=lambda number: -self._stages[number].judge(stages[number]).seconds
        ):
            if work <= 0:
                break
            played = _of_all(problem, changed, number)
            far = self._stages[number].distances
            descent = Descent(problem, number, inputs_move, played, far, work, price=price)
            changed[number], work = descent.run(changed[number]), descent.work
        return changed

    def _simulate(self, problem: Problem, stages: Sequence[StagePlan], inputs_move: bool) -> None:
        """With copies that may be late, too: that waits less, and holds more."""
        plan = Plan(stages=tuple(stages), inputs_move=inputs_move)
        self.simulated(plan)
        moves = problem.output_gradients or any(SWAP in text for one in stages for part in one.parts for text in part)
        if moves and not problem.link.blocking:
            self.simulated(replace(plan, window_bytes=reserve.late_copies(problem.device_limit)))


def _of_all(problem: Problem, stages: Sequence[StagePlan], number: int) -> Play:
    """What all stages take under plans of one of them."""
    import numpy

    others = many.Together(problem, stages, number)

    def play(rows: Array, distance: int) -> many.Several:
        if len(rows) > 1:
            return others.play(rows, distance)
        mine = many.plan_of(problem, number, rows[0], distance)  # faster by itself
        found = simulate(problem, Plan(stages=(*stages[:number], mine, *stages[number + 1 :])))
        takes = found.seconds, found.peaks[number], found.stalls[number]
        return many.Several(*(numpy.array([one]) for one in takes))

    return play


def _simple(problem: Problem) -> _Simple:
    plans, others = dict[str, Plan](), dict[str, Simulated]()
    if (same := baselines.same_operators(problem)) is not None:
        plans[f"recompute in all layers: {', '.join(same[0])}"] = same[1]
    if (whole := baselines.whole_layers(problem)) is not None:
        plans[f"recompute {whole[0]} layers of each part"] = whole[1]
    if (block := baselines.block_recompute(problem)) is not None:
        others[f"{MEGATRON}--recompute-num-layers {block[0]}"] = block[1]
    return _Simple(plans, others)

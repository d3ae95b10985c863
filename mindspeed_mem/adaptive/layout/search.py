"""The search over layouts, each with its best memory plan: the best bound first.

Of every layout the time with everything kept is known in closed form. The one with the lowest bound is looked at next:
first its bound is raised by what the integer program's fractions say it must recompute or wait for to fit; when it
comes up again its plan is searched and played. So when the lowest bound is that of a plan, nothing is faster, within
the model. Of layouts that are looked at the same things are said in the same order each time, unless time runs out.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from mindspeed_mem import reserve
from mindspeed_mem.adaptive.layout import closed_form
from mindspeed_mem.adaptive.layout.cluster import Cluster
from mindspeed_mem.adaptive.layout.enumeration import Layout, Model
from mindspeed_mem.adaptive.problem import from_shape
from mindspeed_mem.adaptive.problem.definition import GB, Problem
from mindspeed_mem.adaptive.problem.shape import Degrees, Machine, Shape
from mindspeed_mem.adaptive.search.infeasible import InfeasibleError
from mindspeed_mem.adaptive.search.milp import Rules, bound
from mindspeed_mem.adaptive.search.search import Found, Search

Estimate: TypeAlias = Callable[[Shape, Degrees, Machine], Problem]
SWAP, RECOMPUTE, CHUNKS = ALLOWED = ("swap", "recompute", "chunk-zero")
"""What a plan may do."""
WORK, TREE = 100_000, 20
"""Operators simulated for small changes to a plan, and nodes of a solver's tree, at most: far less than `plan` takes,
which has one layout to plan."""
_FEW = 4
"""Layouts whose plans are looked at to say how much is missing."""
TOO_LARGE = "parameters, gradients and optimizer states alone do not fit"
NO_PLAN = "no memory plan fits"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A layout with its best plan."""

    layout: Layout
    bound: float
    """Seconds that nothing on this layout is below."""
    found: Found

    @property
    def seconds(self) -> float:
        return self.found.simulated.seconds


@dataclass
class Outcome:
    """What a search has found."""

    planned: list[Planned] = field(default_factory=list)
    """The fastest first."""
    refused: Counter[str] = field(default_factory=Counter)
    """How many layouts do not fit, by reason."""
    bounded: int = 0
    """Layouts whose bound was found,"""
    refined: int = 0
    """those of which it was raised,"""
    left: float = math.inf
    """and the lowest of those that were not planned: seconds."""
    needs: dict[int, int] = field(default_factory=dict)
    """Of layouts that do not fit, by their numbers: bytes of a device that cannot be avoided, as far as is known."""

    @property
    def gap(self) -> float:
        """By what share of its time the best layout may be slower than one that was not planned."""
        best = self.planned[0].seconds
        return max(0.0, 1 - self.left / best)


class LayoutSearch:
    """The search for one model and cluster."""

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        *,
        allowed: Collection[str] = ALLOWED,
        reserve_bytes: int | None = None,
        work: int = WORK,
        estimate: Estimate = from_shape.problem,
    ):
        """reserve_bytes: of a device, not to be planned with; None: what its groups of ranks and libraries need.
        estimate: what there is to plan on a layout."""
        self.model, self.cluster, self.estimate = model, cluster, estimate
        self._swap, self._recompute = SWAP in allowed, RECOMPUTE in allowed
        self._reserve, self._work = reserve_bytes, work

    def problem(self, layout: Layout) -> Problem:
        """What is to be planned on one stage of each kind."""
        split = layout.split(self.model, self.cluster.devices)
        problem = self.estimate(layout.shape(self.model), split, self.cluster.machine_for(split))
        kept = self._reserve
        if kept is None:
            kept = reserve.of_device(problem.device_limit, split.groups).bytes
        problem = problem.with_limit(problem.device_limit - kept)
        if not self._swap:
            problem = problem.without_swap()
        return problem if self._recompute else _without_recompute(problem)

    def _planner(self, problem: Problem) -> Search:
        """Output gradients stay: to move them takes longer than another layout, and bounds are for plans without."""
        return Search(problem, swap=self._swap, work=self._work, nodes=TREE, output_gradients=False)

    def run(
        self,
        layouts: Sequence[Layout],
        *,
        seconds: float = math.inf,
        enough: int = 1,
    ) -> Outcome:
        """Plan layouts until no bound is below the best plans' times, or time is up.

        Args:
            layouts: those to choose from.
            seconds: after so many no further layout is looked at.
            enough: so many are to be the best; 1: only the fastest.
        """
        ends, outcome = time.monotonic() + seconds, Outcome()
        heap: list[tuple[float, int, bool]] = []
        for number, layout in enumerate(layouts):
            problem = self.problem(layout)
            held = _held(problem)
            if held > problem.device_limit:
                outcome.refused[TOO_LARGE] += 1
                outcome.needs[number] = held
            else:
                heap.append((closed_form.seconds(problem), number, False))
        outcome.bounded = len(layouts)
        heapq.heapify(heap)
        planned: list[Planned] = []
        times: list[float] = []
        while heap and (len(times) < enough or heap[0][0] < times[enough - 1]):
            if time.monotonic() >= ends:
                break
            lowest, number, refined = heapq.heappop(heap)
            layout = layouts[number]
            problem = self.problem(layout)
            if not refined:
                outcome.refined += 1
                raised = raised_bound(problem)
                if raised < math.inf:
                    heapq.heappush(heap, (max(raised, lowest), number, True))
                else:
                    outcome.refused[NO_PLAN] += 1
                    outcome.needs[number] = _held(problem)
                continue
            try:
                found = self._planner(problem).best()
            except InfeasibleError:
                outcome.refused[NO_PLAN] += 1
                outcome.needs[number] = _held(problem)
                continue
            planned.append(Planned(layout=layout, bound=lowest, found=found))
            bisect.insort(times, found.simulated.seconds)
        outcome.left = heap[0][0] if heap else math.inf
        outcome.planned = sorted(planned, key=lambda one: one.seconds)
        return outcome

    def least(self, layouts: Sequence[Layout], outcome: Outcome) -> tuple[Layout, InfeasibleError]:
        """Where none fits: the layout that needs least, as far as can be found, and what is missing there. Plans of
        the few that must hold least are searched."""
        first = sorted(outcome.needs, key=lambda number: (outcome.needs[number], number))[:_FEW]
        errors = []
        for number in first:
            try:
                self._planner(self.problem(layouts[number])).best()
            except InfeasibleError as error:
                errors.append((error.needed_bytes, number, error))
        _, number, missing = min(errors)
        return layouts[number], missing


def raised_bound(problem: Problem) -> float:
    """Seconds that no plan which fits is below; infinite where none does. The first stage, which holds the most
    micro-batches, the first of those with the most layers, and the last one, which has the head, are looked at."""
    layers = [sum(len(part.layers) for part in stage.parts) for stage in problem.stages]
    stages, line = len(problem.stages), problem.pipeline
    few = min(line.micro_batches, 2 * stages)  # that many are in flight
    short = problem.with_micro_batches(few)
    longest = way = 0.0
    for number, stage in enumerate(problem.stages):
        works = [closed_form.part_seconds(problem, part) for part in stage.parts]
        cycle = sum(works)
        if number in (0, layers.index(max(layers)), stages - 1):
            rules = (Rules(inputs_move=move) for move in (False, True))
            cycle = max(cycle, min(bound(short, number, problem.device_limit / GB, rule) for rule in rules))
        longest = max(longest, way + line.micro_batches * cycle)
        way += closed_form.way_seconds(problem, stage.parts[0], works[0])
    return longest + max(stage.step_seconds for stage in problem.stages)


def _held(problem: Problem) -> int:
    """What is there whatever a plan does."""
    return max(max(stage.fixed_bytes, stage.in_step_bytes) for stage in problem.stages)


def _without_recompute(problem: Problem) -> Problem:
    """The same where nothing may be recomputed."""
    classes = []
    for kind in problem.classes:
        groups = tuple(dataclasses.replace(group, recompute_seconds=None, needs=()) for group in kind.groups)
        classes.append(dataclasses.replace(kind, groups=groups))
    return dataclasses.replace(problem, classes=tuple(classes))

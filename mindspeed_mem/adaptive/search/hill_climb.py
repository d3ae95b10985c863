"""Improvement of a plan by small changes, judged by simulating the changed stage: this finds what no formula sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from mindspeed_mem.adaptive.problem.definition import Problem
from mindspeed_mem.adaptive.search.decisions import KEEP, NOTHING, RECOMPUTE, SWAP, StagePlan, host_bytes, is_valid

WORK = 100_000
"""Operators simulated at most: tiny problems are searched through, large ones get a few dozen changes."""

Judge = Callable[[StagePlan], tuple[float, int]]
"""Seconds and peak of a stage by itself."""


class Climb:
    """Hill climbing on stage ``number``; `work` is what is left of the work allowed."""

    def __init__(
        self, problem: Problem, number: int, inputs_move: bool, judge: Judge, distances: Sequence[int], work: int = WORK
    ):
        self.problem, self.number, self.inputs_move = problem, number, inputs_move
        self.judge, self.distances, self.work = judge, distances, work
        self.kinds = [[problem.class_of[n] for n in part.layers] for part in problem.stages[number].parts]
        operators = sum(len(kind.operators) for of_part in self.kinds for kind in of_part)
        self.price = max(1, operators * min(8, len(problem.passes[number])))

    def run(self, plan: StagePlan) -> StagePlan:
        """A plan that is at least as good, or comes nearer to the limit."""
        best, score = plan, self._score(plan)
        while self.work > 0:
            for other in self._near(best):
                if self.work <= 0:
                    return best
                self.work -= self.price
                if self._host_has_room(other) and (new := self._score(other)) < score:
                    best, score = other, new
                    break
            else:
                return best
        return best

    def _score(self, plan: StagePlan) -> tuple[int, float]:
        """First to fit the limit, then to be fast."""
        seconds, peak = self.judge(plan)
        return max(0, peak - self.problem.device_limit), round(seconds, 9)

    def _near(self, plan: StagePlan) -> Iterator[StagePlan]:
        """One, two and, where the work lasts so long, three changes; one and two at other distances as well."""
        singles = list(self._changes(plan))
        others = [distance for distance in self.distances if distance != plan.distance]
        yield from singles
        for distance in others:
            yield dataclasses.replace(plan, distance=distance)
        for single in singles:
            for distance in others:
                yield dataclasses.replace(single, distance=distance)
        for single in singles:
            for double in self._changes(single):
                yield double
                for distance in others:
                    yield dataclasses.replace(double, distance=distance)
        for single in singles:
            for double in self._changes(single):
                yield from self._changes(double)

    def _changes(self, plan: StagePlan) -> Iterator[StagePlan]:
        """Each group changed from one action to another, in the first and the last layer that has it."""
        for number, (part, kinds) in enumerate(zip(plan.parts, self.kinds, strict=True)):
            seen: set[tuple[str, int, str, str]] = set()
            layers = range(len(part))
            for layer in (*layers, *reversed(layers)):
                kind, text = kinds[layer], part[layer]
                end = layer == layers[-1]
                for place, old in enumerate(text):
                    for new in (KEEP, SWAP, RECOMPUTE):
                        mark = (kind.name, place, old, new)
                        if new == old or old == NOTHING or (mark in seen and not end):
                            continue
                        changed = text[:place] + new + text[place + 1 :]
                        if is_valid(kind, changed, self.inputs_move):
                            seen.add(mark)
                            one = (*part[:layer], changed, *part[layer + 1 :])
                            parts = (*plan.parts[:number], one, *plan.parts[number + 1 :])
                            yield dataclasses.replace(plan, parts=parts)

    def _host_has_room(self, plan: StagePlan) -> bool:
        limit = self.problem.host_limit
        return limit is None or host_bytes(self.problem, self.number, plan) <= limit

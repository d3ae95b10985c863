"""Improvement of a plan by small changes, judged by simulating what they change: this finds what no formula sees.

A formula says in which order they are tried: what a change recomputes more, what of the copies it may take out of the
waits, what it keeps more. Two changes that make room for each other are tried before all others, of which only small
problems have few enough to try them all.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mindspeed_mem.adaptive.problem.definition import GB, Problem
from mindspeed_mem.adaptive.search.decisions import KEEP, NOTHING, RECOMPUTE, SWAP, StagePlan, host_bytes, is_valid

WORK = 60_000
"""Operators simulated at most: tiny problems are searched through, large ones get a few dozen changes."""
_PAIRS = 100
"""Pairs tried of each plan, the most promising."""


class Judged(NamedTuple):
    """What a plan of a stage takes."""

    seconds: float
    peak: int
    """Bytes."""
    stall: float
    """Of these seconds, those in which computation waits for copies."""


Judge = Callable[[StagePlan], Judged]


class _Change(NamedTuple):
    """Another letter for one group in one layer, and what it is expected to do in each micro-batch."""

    part: int
    layer: int
    place: int
    letter: str
    seconds: float
    """More recomputation."""
    relief: float
    """Seconds of copies that are no more."""
    nbytes: int
    """More that is kept."""


class Climb:
    """Hill climbing on stage ``number``; `work` is what is left of the work allowed."""

    def __init__(
        self,
        problem: Problem,
        number: int,
        inputs_move: bool,
        judge: Judge,
        distances: Sequence[int],
        work: int = WORK,
        *,
        rounds: int,
        price: int | None = None,
    ):
        """rounds: micro-batches in what the judge plays; price: operators it simulates for one plan, of all stages."""
        self.problem, self.number, self.inputs_move = problem, number, inputs_move
        self.judge, self.distances, self.work, self._rounds = judge, distances, work, rounds
        self.kinds = [[problem.class_of[n] for n in part.layers] for part in problem.stages[number].parts]
        operators = sum(len(kind.operators) for of_part in self.kinds for kind in of_part)
        self.price = price or max(1, operators * min(8, len(problem.passes[number])))
        self._held = [max(of_part) for of_part in zip(*problem.in_flight[number], strict=True)]

    def run(self, plan: StagePlan, deep: bool = True) -> StagePlan:
        """A plan that is at least as good, or comes nearer to the limit; unless `deep` one that is quickly found."""
        best, score = plan, self._score(plan)
        while self.work > 0:
            for other in self._near(best, deep):
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
        judged = self.judge(plan)
        return max(0, judged.peak - self.problem.device_limit), round(judged.seconds, 9)

    def _near(self, plan: StagePlan, deep: bool) -> Iterator[StagePlan]:
        """What promises most, other distances, all single changes, and, if `deep`, all of two and three."""
        singles = list(self._changes(plan))
        judged, seen = self.judge(plan), {plan}
        others = [distance for distance in self.distances if distance != plan.distance]
        for changes in self._promising(judged, singles):
            if (other := self._changed(plan, changes)) is not None and other not in seen:
                seen.add(other)
                yield other
        for other in self._all(plan, singles, others, deep):
            if other not in seen:
                seen.add(other)
                yield other

    def _promising(self, judged: Judged, singles: Sequence[_Change]) -> Iterator[tuple[_Change, ...]]:
        """One and two changes that should gain time and fit; beyond the limit what makes room at least cost."""
        room = self.problem.device_limit - judged.peak
        stall = judged.stall / self._rounds

        def gain(changes: Sequence[_Change]) -> float:
            return sum(one.seconds for one in changes) - min(stall, sum(one.relief for one in changes))

        if room < 0:
            helpful = [one for one in singles if one.nbytes < 0]
            by_cost = sorted(helpful, key=lambda one: gain((one,)) / min(-one.nbytes, -room))
            yield from ((one,) for one in by_cost)
            return
        yield from ((one,) for one in sorted(singles, key=lambda one: one.nbytes - room) if gain((one,)) < 0)
        cheap = [one for one in singles if one.nbytes > 0 and one.seconds - one.relief < 0]
        small = [one for one in singles if one.nbytes < 0]
        pairs = [
            (earned, (one, other))
            for one, other in itertools.product(cheap, small)
            if one.nbytes + other.nbytes <= room and (earned := gain((one, other))) < 0
        ]
        yield from (pair for _, pair in sorted(pairs)[:_PAIRS])

    def _all(
        self, plan: StagePlan, singles: Sequence[_Change], others: Sequence[int], deep: bool
    ) -> Iterator[StagePlan]:
        for distance in others:
            yield dataclasses.replace(plan, distance=distance)
        near = [one for change in singles if (one := self._changed(plan, (change,))) is not None]
        yield from near
        for single in near:
            for distance in others:
                yield dataclasses.replace(single, distance=distance)
        if not deep:
            return
        for single in near:
            for change in self._changes(single):
                double = self._changed(single, (change,))
                assert double is not None
                yield double
                for distance in others:
                    yield dataclasses.replace(double, distance=distance)
        for single in near:
            for second in self._changes(single):
                double = self._changed(single, (second,))
                assert double is not None
                for third in self._changes(double):
                    triple = self._changed(double, (third,))
                    assert triple is not None
                    yield triple

    def _changes(self, plan: StagePlan) -> Iterator[_Change]:
        """Each group changed from one action to another, in the first and the last layer that has it; on its own where
        that is allowed, or else to go with another change."""
        link = self.problem.link
        for number, (part, kinds) in enumerate(zip(plan.parts, self.kinds, strict=True)):
            seen: set[tuple[str, int, str, str]] = set()
            layers = range(len(part))
            for layer in (*layers, *reversed(layers)):
                kind, text = kinds[layer], part[layer]
                end = layer == layers[-1]
                for place, old in enumerate(text):
                    group = kind.groups[place]
                    for new in (KEEP, SWAP, RECOMPUTE):
                        mark = (kind.name, place, old, new)
                        if new == old or old == NOTHING or (mark in seen and not end):
                            continue
                        changed = text[:place] + new + text[place + 1 :]
                        if not is_valid(kind, changed, self.inputs_move):
                            continue
                        seen.add(mark)
                        kept = {KEEP: group.bytes, SWAP: 0, RECOMPUTE: group.recompute_keeps}
                        again = {RECOMPUTE: group.recompute_seconds or 0.0}
                        copies = {SWAP: group.bytes / GB * (1 / link.out + 1 / link.back)}
                        yield _Change(
                            number,
                            layer,
                            place,
                            new,
                            again.get(new, 0.0) - again.get(old, 0.0),
                            copies.get(old, 0.0) - copies.get(new, 0.0) * link.blocking,
                            (kept[new] - kept[old]) * self._held[number],
                        )

    def _changed(self, plan: StagePlan, changes: Sequence[_Change]) -> StagePlan | None:
        """The plan with these changes; None where they do not go together."""
        parts = [list(part) for part in plan.parts]
        for one in changes:
            text = parts[one.part][one.layer]
            parts[one.part][one.layer] = text[: one.place] + one.letter + text[one.place + 1 :]
        for one in changes:
            if not is_valid(self.kinds[one.part][one.layer], parts[one.part][one.layer], self.inputs_move):
                return None
        return dataclasses.replace(plan, parts=tuple(map(tuple, parts)))

    def _host_has_room(self, plan: StagePlan) -> bool:
        limit = self.problem.host_limit
        return limit is None or host_bytes(self.problem, self.number, plan) <= limit

"""The fallback without scipy: the same answers as program.py, found greedily stage by stage.

From keep-all, one layer of one group at a time: recompute what is cheap for its bytes, swap while the copies hide
behind compute, recompute the rest by price, then swap at the price of waiting. Where memory is tight this misses
plans that the program finds; "cheap, swap, dear" is the best of the simple orders. Over a link that blocks a swap has a
price like any recomputation, and all are taken by price.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mindspeed_mem.adaptive.closed_form import (
    Rules,
    all_kept,
    cycle_seconds,
    host_gb,
    is_allowed,
    stage_gb,
)
from mindspeed_mem.adaptive.layout import Counts, Key, key
from mindspeed_mem.adaptive.problem import GB, Problem, blocks

_CHEAP = 3e-3
"""Seconds per GB: norms and activation functions are below, matrix products far above."""

Move = tuple[Key, int, str]


def solve(problem: Problem, stage: int, budget: float, rules: Rules, *, overflow: bool = False) -> Counts | None:
    """As `program.solve`; what it finds need not be the best."""
    counts = {name: row for name, row in all_kept(problem).items() if name[0] == stage}
    _Stage(problem, counts, stage, budget, rules).fit()
    if stage_gb(problem, counts, stage, rules) > budget and not overflow:
        return None
    return counts


class _Stage:
    def __init__(self, problem: Problem, counts: dict, stage: int, budget: float, rules: Rules):
        self.problem, self.counts, self.stage, self.budget, self.rules = problem, counts, stage, budget, rules
        self.blocks = [block for block in blocks(problem) if block.stage == stage]

    def fit(self) -> None:
        if self.problem.link.blocking:
            for move, _ in self._by_price():
                self._repeat(move)
        for move, price in self._recomputations():
            if price <= _CHEAP:
                self._repeat(move)
        for move in self._swaps():
            self._repeat(move, hidden=True)
        for move, price in self._recomputations():
            if price > _CHEAP:
                self._repeat(move)
        for move in self._swaps():
            self._repeat(move)
        self._take_back()

    def _repeat(self, move: Move, hidden: bool = False) -> None:
        """Make a move in as many layers as needed and allowed; hidden: only while it costs no time."""
        while stage_gb(self.problem, self.counts, self.stage, self.rules) > self.budget:
            before = cycle_seconds(self.problem, self.counts, self.stage)
            if not self._change(move, 1):
                return
            if hidden and cycle_seconds(self.problem, self.counts, self.stage) > before * (1 + 1e-9):
                self._change(move, -1)
                return

    def _change(self, move: Move, by: int) -> bool:
        block, place, action = move
        old = self.counts[block]
        new = dataclasses.replace(old[place], **{action: getattr(old[place], action) + by})
        self.counts[block] = (*old[:place], new, *old[place + 1 :])
        limit = self.problem.host_limit
        if is_allowed(self.problem, self.counts, self.stage, self.rules) and (
            limit is None or host_gb(self.problem, self.counts, self.stage) <= limit / GB
        ):
            return True
        self.counts[block] = old
        return False

    def _take_back(self) -> None:
        """Undo what turned out not to be needed, the dearest first."""
        moves = self._by_price() if self.problem.link.blocking else self._recomputations()
        for move, _ in reversed(moves):
            while self._change(move, -1):
                if stage_gb(self.problem, self.counts, self.stage, self.rules) > self.budget:
                    self._change(move, 1)
                    break

    def _by_price(self) -> list[tuple[Move, float]]:
        """Recomputations and swaps, each with its seconds per GB where no copy is hidden."""
        link = self.problem.link
        swaps = [(move, 1 / link.out + 1 / link.back) for move in self._swaps()]
        return sorted([*self._recomputations(), *swaps], key=lambda one: one[1])

    def _recomputations(self) -> list[tuple[Move, float]]:
        """With their seconds per GB, the cheapest first."""
        found = []
        for block in self.blocks:
            for place, group in enumerate(block.kind.groups):
                freed = (group.bytes - group.recompute_keeps) / GB
                if group.recompute_seconds is not None and freed > 0:
                    found.append(((key(block), place, "recompute"), group.recompute_seconds / freed))
        return sorted(found, key=lambda one: one[1])

    def _swaps(self) -> Iterator[Move]:
        """First of what is dear to recompute."""
        prices = {move[:2]: price for move, price in self._recomputations()}
        moves = [(key(block), place) for block in self.blocks for place in range(len(block.kind.groups))]
        for block, place in sorted(moves, key=lambda one: -prices.get(one, float("inf"))):
            yield block, place, "swap"

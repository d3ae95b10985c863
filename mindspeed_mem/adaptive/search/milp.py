"""The integer program over counts, solved by HiGHS through scipy.

For a stage p with w micro-batches in flight, groups i of a bytes each, n layers of which s swap and r recompute:

    memory   static + temporary + w (outside + sum a (n - s - r) + keeps r) + sum a (s + r) / n + ahead sum a s / n
             (and what waits for gradients of weights, where these are passes of their own)
    forward  F + wait,  wait >= sum a s / out - F      (a forward ends when its copies out have)
    backward B + sum r again + wait,  wait >= sum a s / back - B - sum r again
             (over a link that blocks both waits are all of the copies, without - F or - B - sum r again; what the
             engine itself takes is in again for each of r, and in F and B, half in each, for each of s)

The last terms of memory stand for the layer at work and the copies under way. Simulation is the judge: these figures
leave out when in a pass the link is busy, and what is under way when the most is held.

A variable is in how many layers of a block a group is swapped or recomputed, not what one layer does: some 50 variables
for each stage, where one binary for each layer, group and action runs into its time limit. GB and seconds: with bytes
HiGHS returned plans that were 14 % too large.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mindspeed_mem.adaptive.problem.definition import GB, Block, Problem
from mindspeed_mem.adaptive.search.decisions import Count, Counts, key
from mindspeed_mem.output import silent

GAP = 3e-3
NODES = 1000
"""Of the search tree at most: unlike a limit in seconds it leads to the same plan on any machine, however busy."""
_PER_GB = 1e-6
"""Seconds that a swapped GB costs: of equal plans the one that moves less."""
_OVERFLOW = 1e3
"""Seconds that a GB beyond the limit costs, where that is allowed to find out how much is needed."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a plan may look like, beyond the limits."""

    inputs_move: bool = False
    """See `Plan.inputs_move`."""
    guard: int = 1
    """Layers at the end of a part that swap nothing where each backward follows its forward at once."""
    ahead: float = 2.0
    """What a swapped group holds besides, in layers: on the way out and back."""
    idle: float = 0.0
    """Seconds of each pass in which the link cannot be busy: what a plan's simulation waits for copies all the same."""
    at_work: bool = True
    """Whether the layer at work and the copies under way count."""
    recompute: bool = True


class Solved(NamedTuple):
    """The counts of one stage."""

    counts: Counts
    seconds: float
    """A forward and a backward of each part, by the program."""
    gap: float
    """By what share of the cycle they may be slower than the best counts, as far as HiGHS has proven."""

    @property
    def stopped(self) -> bool:
        """Whether the solver came to its limit of nodes before the gap was small."""
        return self.gap > GAP


class Program:
    """A mixed integer program by names."""

    def __init__(self) -> None:
        self.index: dict[tuple, int] = {}
        self._low: list[float] = []
        self._high: list[float] = []
        self._whole: list[int] = []
        self._price: list[float] = []
        self._rows: list[tuple[dict[tuple, float], float]] = []

    def variable(
        self, name: tuple, high: float = math.inf, whole: bool = False, price: float = 0.0, low: float = 0.0
    ) -> tuple:
        self.index[name] = len(self.index)
        self._low.append(low)
        self._high.append(high)
        self._whole.append(int(whole))
        self._price.append(price)
        return name

    def at_most(self, terms: dict[tuple, float], high: float) -> None:
        """The sum of variables times numbers is at most `high`."""
        self._rows.append((terms, high))

    def solve(self, gap: float, nodes: int, whole: bool = True) -> tuple[dict[tuple, float], float, float] | None:
        """The value of each variable, the price of all and the gap that is proven, or None if there is no solution (or
        none was found in so many nodes). Without `whole` any fraction will do."""
        import numpy
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csc_array

        columns: list[list[tuple[int, float]]] = [[] for _ in self.index]  # as HiGHS has them
        for row, (terms, _) in enumerate(self._rows):
            for name, value in terms.items():
                columns[self.index[name]].append((row, value))
        rows, data = numpy.array(list(itertools.chain.from_iterable(columns))).reshape(-1, 2).T
        starts = list(itertools.accumulate(map(len, columns), initial=0))
        matrix = csc_array((data, rows.astype(numpy.int32), starts), shape=(len(self._rows), len(columns)))
        with silent():
            result = milp(
                numpy.array(self._price),
                constraints=LinearConstraint(matrix, -numpy.inf, [high for _, high in self._rows]),
                integrality=self._whole if whole else None,
                bounds=Bounds(self._low, self._high),
                options={"node_limit": nodes, "mip_rel_gap": gap} if whole else None,
            )
        if result.x is None:
            return None
        return dict(zip(self.index, result.x.tolist(), strict=True)), float(result.fun), float(result.mip_gap or 0.0)


def solve(
    problem: Problem,
    stage: int,
    budget: float,
    rules: Rules,
    *,
    overflow: bool = False,
    gap: float = GAP,
    nodes: int = NODES,
) -> Solved | None:
    """The counts of one stage with the shortest cycle within these GB, or None if there are none.

    Layers stay on their stages, so the stages share nothing but the step time, which grows with every cycle: each
    stage's shortest cycle is the best for all. (Stages that wait for others anyway gain nothing by it, nor lose.)

    overflow: the budget may be exceeded, at a price above all others: what is found needs as little as possible.
    """
    program, mine = _program(problem, stage, budget, rules, overflow)
    solution = program.solve(gap, nodes)
    if solution is None:
        return None
    values, seconds, proven = solution
    return Solved({key(block): _counts(values, block) for block in mine}, seconds, proven)


def bound(problem: Problem, stage: int, budget: float, rules: Rules) -> float:
    """Seconds that no plan that keeps these rules and the budget of GB is below in a forward and a backward of each
    part: those of fractions of layers, when nothing but what is kept for backward takes memory."""
    program, _ = _program(problem, stage, budget, loose(rules), False)
    solution = program.solve(0.0, NODES, whole=False)
    return math.inf if solution is None else solution[1]


def loose(rules: Rules) -> Rules:
    """What of the rules a bound keeps."""
    return dataclasses.replace(rules, guard=0, at_work=False, ahead=0.0)


def _program(problem: Problem, stage: int, budget: float, rules: Rules, overflow: bool) -> tuple[Program, list[Block]]:
    """The program of a stage, and the blocks it counts."""
    program = Program()
    over = program.variable(("over",), high=math.inf if overflow else 0.0, price=_OVERFLOW)
    ahead = program.variable(("ahead",))
    for part in range(problem.virtual_stages):
        program.variable(("out", part), price=1.0)  # the wait for copies, in seconds
        program.variable(("back", part), price=1.0)
    mine = [block for block in problem.blocks if block.stage == stage]
    for block in mine:
        _block(program, problem, block, rules)
    _stage(program, problem, stage, mine, budget, rules.idle, {ahead: 1.0, over: -1.0})
    return program, mine


def most_swapped(problem: Problem, block: Block, name: str, rules: Rules) -> int:
    """In how many layers of the block this group may be swapped at most."""
    group = block.kind.groups[block.kind.group_index[name]]
    if not group.swappable:
        return 0
    movable = block.movable(group)
    part = problem.stages[block.stage].parts[block.part]
    end = len(part.layers) - (rules.guard if at_once(problem, block.stage, block.part) else 0)
    return sum(layer < end for layer in movable)


def at_once(problem: Problem, stage: int, part: int) -> bool:
    """Whether a backward of this part follows its forward with nothing in between."""
    return part in problem.turning[stage]


def _counts(values: dict[tuple, float], block: Block) -> tuple[Count, ...]:
    names = [(*key(block), group.name) for group in block.kind.groups]
    of_both = [(("s", *name), ("r", *name)) for name in names]
    return tuple(Count(round(values[s]), round(values[r])) for s, r in of_both)


def _block(program: Program, problem: Problem, block: Block, rules: Rules) -> None:
    """The variables and rules of one block."""
    name, layers = key(block), {group.name: len(block.movable(group)) for group in block.kind.groups}
    transient: dict[tuple, float] = {("ahead",): -1.0}
    for group in block.kind.groups:
        most = layers[group.name]
        swap = most_swapped(problem, block, group.name, rules)
        again = most if group.recompute_seconds is not None and rules.recompute else 0
        moves = _PER_GB * group.bytes / GB + group.moved_seconds(problem.host)
        s = program.variable(("s", *name, group.name), swap, True, moves)
        r = program.variable(("r", *name, group.name), again, True, group.again_seconds(problem.host))
        program.at_most({s: 1, r: 1}, most)
        share = group.bytes / GB / max(1, most)
        transient |= {s: (1 + rules.ahead) * share, r: share}
    if rules.at_work:
        program.at_most(transient, 0)
    for group in block.kind.groups:
        r, s = ("r", *name, group.name), ("s", *name, group.name)
        for other in group.needs:
            s_other, r_other = ("s", *name, other), ("r", *name, other)
            if not rules.inputs_move:
                # One layer more where the first has no such group: any fraction does, as the counts are whole.
                shift = 1 / layers[group.name] if layers[other] < layers[group.name] else 0
                program.at_most({r: 1, s_other: 1 + shift}, layers[group.name])
            elif layers[group.name]:  # where anything is recomputed: no more layers keep the other than keep this
                some = program.variable(("x", *name, group.name, other), 1, True)
                program.at_most({r: 1, some: -layers[group.name]}, 0)
                most = layers[other]
                program.at_most({s_other: -1, r_other: -1, s: 1, r: 1, some: most}, layers[group.name])


def _stage(
    program: Program,
    problem: Problem,
    number: int,
    mine: Sequence[Block],
    budget: float,
    idle: float,
    beside: dict[tuple, float],
) -> None:
    """The rows that join the blocks of a stage: what of the copies is waited for, and what is held has room."""
    stage, link = problem.stages[number], problem.link
    kept: list[tuple[float, dict[tuple, float]]] = []
    moved: list[dict[tuple, float]] = []
    later: list[dict[tuple, float]] = []
    gradients = [problem.gradients_on_host(number, place) for place in range(len(stage.parts))]
    for place, part in enumerate(stage.parts):
        forward = part.before.forward_seconds + part.after.forward_seconds
        backward = part.before.backward_seconds + part.after.backward_seconds
        held = (part.before.bytes + part.after.bytes) / GB
        terms: dict[tuple, float] = {}
        swapped: dict[tuple, float] = {}
        waits_on_host: dict[tuple, float] = {}
        engine: dict[tuple, float] = {}
        again: dict[tuple, float] = {}
        for block in (one for one in mine if one.part == place):
            forward += block.kind.forward_seconds * len(block.layers)
            backward += block.kind.backward_seconds * len(block.layers)
            for group in block.kind.groups:
                size, s, r = group.bytes / GB, ("s", *key(block), group.name), ("r", *key(block), group.name)
                held += size * len(block.movable(group))
                terms |= {s: -size, r: group.recompute_keeps / GB - size}
                swapped[s] = size
                engine[s] = group.moved_seconds(problem.host) / 2
                if on_host := problem.on_host(group):
                    waits_on_host[s] = on_host / GB
                again[r] = -link.back * group.again_seconds(problem.host)
        # What every plan takes, so that the gap is one of the cycle and not of what is added to it.
        alone = gradients[place] / GB  # waited for, without a window
        copies = alone * (1 / link.out + (1 / link.back if link.blocking else 0.0)) if alone else 0.0
        program.variable(("compute", place), forward + backward + copies, price=1.0, low=forward + backward + copies)
        if link.blocking:  # nothing hides behind compute
            forward, backward, again, engine = 0.0, 0.0, {}, {}
        else:
            forward, backward = max(0.0, forward - idle), max(0.0, backward - idle)
        speeds = (link.out, link.back)
        out, back = ({s: size - speed * engine.get(s, 0.0) for s, size in swapped.items()} for speed in speeds)
        program.at_most(out | {("out", place): -link.out}, link.out * forward)
        program.at_most(back | again | {("back", place): -link.back}, link.back * backward)
        kept.append((held, terms))
        moved.append(swapped)
        later.append(waits_on_host)
    there = stage.fixed_bytes / GB
    waiting = [problem.waiting(number, part) for part in range(len(stage.parts))]
    for counts, waits in problem.held[number]:
        rows = [(name, n * value) for n, (_, terms) in zip(counts, kept, strict=True) for name, value in terms.items()]
        held = sum(n * size for n, (size, _) in zip(counts, kept, strict=True))
        held += sum(n * size / GB for n, size in zip(waits, waiting, strict=True))
        rows += [(s, -n * size) for n, terms in zip(waits, later, strict=True) if n for s, size in terms.items()]
        program.at_most(_summed(rows) | beside, budget - there - held)
        if problem.host_limit is not None:
            both = (*zip(counts, moved, strict=True), *zip(waits, later, strict=True))
            gone = [(name, n * size) for n, terms in both for name, size in terms.items()]
            always = sum(n * size for n, size in zip(waits, gradients, strict=True))
            program.at_most(_summed(gone), (problem.host_limit - always) / GB)


def _summed(terms: Sequence[tuple[tuple, float]]) -> dict[tuple, float]:
    found: dict[tuple, float] = {}
    for name, value in terms:
        found[name] = found.get(name, 0.0) + value
    return found

"""The integer program of `auto`: one layout for each call and parameter, and which modules run again in backward.

    x[class, option]       1: taken. Calls of repeated layers are one class: they share their variables.
    y[edge, given, wanted] what is brought from one layout to another between a maker and a reader; follows from x.
    h[...]                 what is kept for backward in that layout; r[module]  1: it runs again instead.

Costs in microseconds, memory in parts of what one device would hold. No time limit: the same problem has the same plan.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate

from mindspeed_mem.parallel.calls import Call, Calls, Value
from mindspeed_mem.parallel.options import Asker, Option, Placed, layouts, moving, parts

_GAP = 5e-3


@dataclass
class Class:
    """Calls that do the same in repeated layers, or a tensor of each."""

    key: tuple
    path: str
    """Of the modules, * for the repeated part."""
    member: Call | Value
    options: list[Option]
    count: int = 1

    @property
    def call(self) -> Call | None:
        return self.member if isinstance(self.member, Call) else None


@dataclass
class Edge:
    """A reader's input and its maker, None for what the model returns."""

    maker: tuple
    place: int
    reader: tuple
    number: int
    value: Value
    count: int = 1


@dataclass
class Solution:
    chosen: dict[tuple, Option]
    again: list[str]
    """Paths of modules that are run again."""
    seconds: float
    memory: float
    """Bytes."""
    costs: dict[tuple, dict[str, float]] = field(default_factory=dict)
    """Seconds by class, of each member."""
    summed: set[tuple] = field(default_factory=set)
    """Makers (and which output) whose readers leave sums as gradients."""


def pattern(model: nn.Module, path: str) -> str:
    """`path` with * for each number of a module that has modules of its own: a repeated layer."""
    found, module = [], model
    for part in path.split(".") if path else []:
        module = getattr(module, part)
        found.append("*" if part.isdigit() and next(module.children(), None) is not None else part)
    return ".".join(found)


class Search:
    """All that is known of a model before a limit is given."""

    def __init__(self, model: nn.Module, calls: Calls, asker: Asker, links: list, optimizer_bytes: float) -> None:
        self.sizes, self.links, self.optimizer_bytes = asker.sizes, links, optimizer_bytes
        self.classes: dict[tuple, Class] = {}
        self.edges: dict[tuple, Edge] = {}
        self.of: dict[int, tuple] = {}
        """The class of each call and tensor, by id."""
        self.whole: Placed = (Replicate(),) * len(self.sizes)
        for value in calls.tensors:
            self._add_tensor(model, value, asker)
        for number, call in enumerate(calls.calls):
            self._add_call(model, number, call, asker)
        for number, value in enumerate(calls.results):
            key = ("result", number)
            self.classes[key] = Class(key, "", value, [Option((self.whole,), (), 0.0, 0.0)])
            self._add_edge(value, key, 0)
        inside = Counter(one.path for one in self.classes.values() if one.call is not None)
        prefixes = {path.rsplit(".", n)[0] for path in inside for n in range(path.count(".") + 1)} - {""}
        self.modules = sorted(m for m in prefixes if sum(n for p, n in inside.items() if _within(p, m)) > 1)
        """Those that may run again, as patterns."""
        values = [value for call in calls.calls for value in call.outputs]
        self.unit = sum(one.bytes + one.like.numel() * optimizer_bytes for one in calls.tensors + values)
        self.instances = {m: sum(pattern(model, name) == m for name, _ in model.named_modules()) for m in self.modules}

    def _add_tensor(self, model: nn.Module, value: Value, asker: Asker) -> None:
        key: tuple = ("input", value.name)
        path = ""
        if value.kind != "input":
            owner, _, leaf = value.name.rpartition(".")
            path = pattern(model, owner)
            key = (value.kind, path, leaf, tuple(value.like.shape))
        self.of[id(value)] = key
        if key in self.classes:
            self.classes[key].count += 1
            return
        ways = [layouts(value.like.shape, n, False) if value.kind != "buffer" else [Replicate()] for n in self.sizes]
        even = [one for one in itertools.product(*ways) if asker.is_even(value.like.shape, one)]
        self.classes[key] = Class(key, path, value, [Option((), (one,), 0.0, 0.0) for one in even])

    def _add_call(self, model: nn.Module, number: int, call: Call, asker: Asker) -> None:
        path = pattern(model, call.path)
        shapes = tuple((tuple(one.like.shape), one.kind) for one in call.inputs)
        own = call.name.partition(":")[2] or number  # one that a plan cannot name is like no other
        key = ("call", path, own, shapes)
        self.of[id(call)] = key
        if key in self.classes:
            self.classes[key].count += 1
        else:
            self.classes[key] = Class(key, path, call, asker.options(call))
        for place, value in enumerate(call.inputs):
            self._add_edge(value, key, place)

    def _add_edge(self, value: Value, reader: tuple, number: int) -> None:
        if value.call is not None:
            maker = self.of[id(value.call)]
        elif id(value) in self.of:
            maker = self.of[id(value)]
        else:
            maker = ("constant",)
            self.classes.setdefault(maker, Class(maker, "", value, [Option((), (self.whole,), 0.0, 0.0)]))
        edge = (maker, value.place, reader, number)
        if edge in self.edges:
            self.edges[edge].count += 1
        else:
            self.edges[edge] = Edge(*edge, value)

    # ---- the program

    def solve(
        self, limit: float | None, allowed: Callable[[Class, Option], bool], least: bool = False
    ) -> Solution | None:
        """The fastest within `limit` bytes, or that with the least memory; None if nothing fits."""
        program = _Program()
        again = {m: program.variable(0.0, whole=True) for m in self.modules}
        x: dict[tuple, list[int]] = {}
        for key, one in self.classes.items():
            cost = [one.count * 3 * option.seconds * 1e6 for option in one.options]
            x[key] = [program.variable(c, whole=True) for c in cost]
            program.row(dict.fromkeys(x[key], 1.0), 1, 1)
            for v, option in zip(x[key], one.options, strict=True):
                if not allowed(one, option):
                    program.high[v] = 0
        memory: dict[int, float] = {}
        held: dict[str, dict[int, float]] = {m: defaultdict(float) for m in self.modules}
        summing: dict[tuple, int] = {}
        flows = {edge: self._flows(program, one, x, summing) for edge, one in self.edges.items()}
        for key, one in self.classes.items():
            value = one.member
            if isinstance(value, Value) and value.kind in ("parameter", "buffer"):
                grad = value.like.requires_grad
                size = value.bytes * (2 if grad else 1) + value.like.numel() * self.optimizer_bytes * grad
                for v, option in zip(x[key], one.options, strict=True):
                    memory[v] = one.count * size / parts(option.outs[0], self.sizes) / self.unit
        self._kept(program, x, flows, again, memory, held)
        self._rerun(program, x, flows, again)
        transient = program.variable(0.0, high=math.inf)
        for m, terms in held.items():
            most = sum(terms.values())
            program.row({**terms, transient: -1.0, again[m]: most}, -math.inf, most)
        memory[transient] = 1.0
        if limit is not None:
            program.row(memory, -math.inf, limit / self.unit)
        for m, other in itertools.combinations(self.modules, 2):
            if _within(other, m) or _within(m, other):
                program.row({again[m]: 1.0, again[other]: 1.0}, -math.inf, 1)
        values = program.solve(memory if least else None)
        if values is None:
            return None
        seconds = sum(c * v for c, v in zip(program.cost, values, strict=True)) / 1e6
        for v in itertools.chain(again.values(), *x.values()):  # what is held is only bounded from below
            program.low[v] = program.high[v] = round(values[v])
        values = program.solve(memory) or values
        chosen = {
            key: one.options[max(range(len(x[key])), key=lambda n: values[x[key][n]])]
            for key, one in self.classes.items()
        }
        found = Solution(
            chosen,
            [m for m in self.modules if values[again[m]] > 0.5],
            seconds,
            sum(size * values[v] for v, size in memory.items()) * self.unit,
        )
        for key, v in summing.items():
            if values[v] > 0.5:
                found.summed.add(key[:2])
        for key in self.classes:
            found.costs[key] = {"compute": 3 * chosen[key].seconds, "communication": 0.0}
        for edge, pairs in flows.items():
            for v, both in pairs.moves.items():
                found.costs[edge[2]]["communication"] += values[v] * sum(both) / self.classes[edge[2]].count
        return found

    def _flows(self, program: _Program, edge: Edge, x: Mapping[tuple, list[int]], summing: dict) -> _Flows:
        maker, reader = self.classes[edge.maker], self.classes[edge.reader]
        given: dict[Placed, list[int]] = defaultdict(list)
        wanted: dict[tuple, list[int]] = defaultdict(list)
        for v, option in zip(x[edge.maker], maker.options, strict=True):
            given[option.outs[edge.place]].append(v)
        for v, option in zip(x[edge.reader], reader.options, strict=True):
            wanted[option.ins[edge.number], _summed(option, edge.number)].append(v)
        flows = _Flows()
        grad = edge.value.like.requires_grad
        for p in given:
            for q in wanted:
                seconds = moving(edge.value.bytes, p, q[0], q[1], grad, self.sizes, self.links)
                if seconds is not None:
                    back = seconds[1]
                    if p == q[0]:  # gradients of all readers in this layout are added, and then reduced once
                        seconds = (seconds[0], 0.0)
                    v = program.variable(edge.count * sum(seconds) * 1e6)
                    if p == q[0] and back:
                        key = (edge.maker, edge.place, *q)
                        if key not in summing:
                            summing[key] = program.variable(maker.count * back * 1e6)
                        program.row({summing[key]: 1.0, v: -1.0}, 0)
                    flows.of[p, q] = v
                    flows.moves[v] = (edge.count * seconds[0], edge.count * seconds[1])
        rows: dict[tuple, dict[int, float]] = {("from", p): dict.fromkeys(xs, -1.0) for p, xs in given.items()}
        rows |= {("to", q): dict.fromkeys(xs, -1.0) for q, xs in wanted.items()}
        for (p, q), v in flows.of.items():
            rows["from", p][v] = rows["to", q][v] = 1.0
        for terms in rows.values():
            program.row(terms, 0, 0)
        return flows

    def _kept(
        self,
        program: _Program,
        x: Mapping[tuple, list[int]],
        flows: Mapping[tuple, _Flows],
        again: Mapping[str, int],
        memory: dict[int, float],
        held: Mapping[str, dict[int, float]],
    ) -> None:
        """What backward needs: once for all readers in the maker's layout, and once for each that had it moved."""
        shared: dict[tuple, int] = {}

        def keep(key: tuple, source: dict[int, float], reader: Class, size: float, count: int) -> None:
            """At least the sum of `source`, unless its reader is run again."""
            if size <= 0:
                return
            if key not in shared:
                shared[key] = program.variable(0.0)
                memory[shared[key]] = count * size / self.unit
            around = [m for m in self.modules if _within(reader.path, m)] if reader.call is not None else []
            program.row({shared[key]: 1.0, **{v: -n for v, n in source.items()}, **{again[m]: 1.0 for m in around}}, 0)
            for m in around:
                for v in source:
                    held[m][v] += max(1, count // max(1, self.instances[m])) * size / self.unit

        for edge, found in flows.items():
            one, reader = self.edges[edge], self.classes[edge[2]]
            maker = self.classes[edge[0]]
            if reader.call is not None and one.number in reader.call.keeps_inputs:
                by_layout: dict[tuple, dict[int, float]] = defaultdict(dict)
                for (p, (q, _)), v in found.of.items():
                    if p == q and one.value.kind in ("parameter", "buffer"):
                        continue
                    by_layout[(edge[:2] if p == q else edge, q)][v] = 1.0
                for key, source in by_layout.items():
                    size = one.value.bytes / parts(key[1], self.sizes)
                    keep(key, source, reader, size, maker.count if key[0] == edge[:2] else one.count)
            for m in self.modules:  # what a module that is run again begins with
                outside = reader.call is not None and _within(reader.path, m) and not _within(maker.path, m)
                if outside and one.value.kind in ("made", "input"):
                    for v, option in zip(x[edge[0]], maker.options, strict=True):
                        p = option.outs[one.place]
                        begun = (edge[:2], p)
                        if begun not in shared:
                            shared[begun] = program.variable(0.0)
                            memory[shared[begun]] = maker.count * one.value.bytes / parts(p, self.sizes) / self.unit
                        program.row({shared[begun]: 1.0, v: -1.0, again[m]: -1.0}, -1)
        for key, taken in self.classes.items():
            if taken.call is None:
                continue
            for v, option in zip(x[key], taken.options, strict=True):
                keep((key, "own", v), {v: 1.0}, taken, option.kept, taken.count)
            for place in taken.call.keeps_outputs:
                by: dict[Placed, dict[int, float]] = defaultdict(dict)
                for v, option in zip(x[key], taken.options, strict=True):
                    by[option.outs[place]][v] = 1.0
                for p, source in by.items():
                    size = taken.call.outputs[place].bytes / parts(p, self.sizes)
                    keep(((key, place), p), source, taken, size, taken.count)

    def _rerun(self, program: _Program, x: Mapping, flows: Mapping[tuple, _Flows], again: Mapping[str, int]) -> None:
        """What a module that is run again costs: its forward, redistributions included."""
        for m in self.modules:
            terms: dict[int, float] = {}
            most = 0.0
            for key, one in self.classes.items():
                if one.call is not None and _within(one.path, m):
                    terms |= {
                        v: one.count * option.seconds * 1e6 for v, option in zip(x[key], one.options, strict=True)
                    }
                    most += one.count * max(option.seconds for option in one.options) * 1e6
            for edge, found in flows.items():
                reader = self.classes[edge[2]]
                if reader.call is not None and _within(reader.path, m):
                    costs = {v: seconds[0] * 1e6 for v, seconds in found.moves.items()}
                    terms |= costs
                    most += max(costs.values(), default=0.0)
            cost = program.variable(1.0, high=math.inf)
            program.row({**terms, cost: -1.0, again[m]: most}, -math.inf, most)


def _summed(option: Option, number: int) -> tuple[bool, ...]:
    """By axis, whether the gradient of an input is a sum: it is whole there, and met with parts.

    What is whole and added to a sum of products of parts, a bias, has a whole one.
    """
    others = [placed for place, placed in enumerate(option.ins) if place != number]
    found = []
    for axis, one in enumerate(option.ins[number]):
        ins, outs = [placed[axis] for placed in others], [placed[axis] for placed in option.outs]
        is_sum = all(out.is_partial() for out in outs) and not any(other.is_partial() for other in ins)
        split = any(not other.is_replicate() for other in ins + outs)
        found.append(one.is_replicate() and split and not is_sum)
    return tuple(found)


def _within(path: str, module: str) -> bool:
    return path == module or path.startswith(module + ".")


@dataclass
class _Flows:
    of: dict[tuple, int] = field(default_factory=dict)
    moves: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Seconds forward and backward."""


class _Program:
    def __init__(self) -> None:
        self.cost: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self._whole: list[int] = []
        self._rows: list[tuple[dict[int, float], float, float]] = []

    def variable(self, cost: float, whole: bool = False, high: float = 1.0) -> int:
        self.cost.append(cost)
        self.low.append(0.0)
        self.high.append(high)
        self._whole.append(int(whole))
        return len(self.cost) - 1

    def row(self, terms: Mapping[int, float], low: float, high: float = math.inf) -> None:
        self._rows.append((dict(terms), low, high))

    def solve(self, instead: Mapping[int, float] | None) -> list[float] | None:
        """The values with the least cost, or with the least of these terms instead."""
        import numpy
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        cost = self.cost if instead is None else [instead.get(v, 0.0) for v in range(len(self.cost))]
        entries = list(self._entries())
        rows, columns, data = (numpy.array(one) for one in zip(*entries, strict=True))
        matrix = coo_array((data, (rows, columns)), shape=(len(self._rows), len(self.cost))).tocsr()
        result: Any = milp(
            numpy.array(cost),
            constraints=LinearConstraint(matrix, [low for _, low, _ in self._rows], [high for *_, high in self._rows]),
            integrality=self._whole,
            bounds=Bounds(self.low, self.high),
            options={"mip_rel_gap": _GAP},
        )
        return None if result.x is None else [float(one) for one in result.x]

    def _entries(self) -> Iterator[tuple[int, int, float]]:
        for number, (terms, _, _) in enumerate(self._rows):
            for v, value in terms.items():
                yield number, v, value

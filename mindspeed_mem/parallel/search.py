"""The integer program of `auto`: one layout for each call and parameter, and which modules run again in backward.

    x[class, option]       1: taken. Calls of repeated layers are one class: they share their variables.
    y[edge, given, wanted] what is brought from one layout to another between a maker and a reader; follows from x.
    h[...]                 what is kept for backward in that layout; r[module]  1: it runs again instead.

Costs in microseconds, memory in parts of what one device would hold. No time limit, and no gap but that of the solver's
arithmetic: the same problem has the same plan.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.tensor import Replicate

from mindspeed_mem.output import silent
from mindspeed_mem.parallel.calls import Call, Calls, Value
from mindspeed_mem.parallel.given import Given
from mindspeed_mem.parallel.options import Asker, Link, Option, Placed, layouts, moving, parts
from mindspeed_mem.parallel.strategy import StrategyError

SOLVER = {"mip_rel_gap": 1e-6}
"""Options of HiGHS."""
_ROUGHLY = 5e-3
"""Of the least memory that is needed, which is only told."""


@dataclass
class Class:
    """Calls that do the same in repeated layers, or a tensor of each."""

    key: tuple
    path: str
    """Of the modules, * for the repeated part."""
    member: Call | Value
    options: list[Option]
    count: int = 1
    names: list[str] = field(default_factory=list)
    """Of all members, as of `member`."""
    pending: Counter[tuple] = field(default_factory=Counter)
    """What is made before it and read after it, by maker and place: their gradients wait while its backward runs."""

    @property
    def call(self) -> Call | None:
        return self.member if isinstance(self.member, Call) else None


@dataclass
class Edge:
    """A reader's input and its maker."""

    maker: tuple
    place: int
    reader: tuple
    number: int
    value: Value
    read: Counter[int] = field(default_factory=Counter)
    """By the id of each tensor of the maker's class, how often."""
    shares: list[tuple] = field(default_factory=list)
    """A key for tensors that the same edges read, which share what is moved; the last of it: how many they are."""

    @property
    def count(self) -> int:
        return self.read.total()


@dataclass
class Charge:
    """Bringing a tensor from one layout to another, or its gradient back, for all readers that share it."""

    variable: int
    seconds: float
    backward: bool
    edge: Edge
    """Of the first reader."""
    count: int
    """How many tensors."""
    before: Placed
    after: Placed
    summed: tuple[bool, ...]
    readers: list[tuple] = field(default_factory=list)


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
    sent: list[float] = field(default_factory=list)
    """Bytes of a rank, by mesh axis."""
    summed: set[tuple] = field(default_factory=set)
    """Makers (and which output) whose readers leave sums as gradients."""
    gap: float = 0.0
    """How much less, as a part of `seconds`, another solution may take: what the solver has not ruled out."""


class Search:
    """All that is known of a model before a limit is given."""

    def __init__(self, calls: Calls, asker: Asker, links: list[Link], optimizer_bytes: float, given: Given) -> None:
        self.sizes, self.links, self.optimizer_bytes, self.given = asker.sizes, links, optimizer_bytes, given
        self.classes: dict[tuple, Class] = {}
        self.edges: dict[tuple, Edge] = {}
        self.of: dict[int, tuple[tuple, int]] = {}
        """The class of each tensor's maker and its place there, by id."""
        self.whole: Placed = (Replicate(),) * len(self.sizes)
        for value in calls.tensors:
            self._add_tensor(value, asker)
        keys = [self._add_call(number, call, asker) for number, call in enumerate(calls.calls)]
        for number, value in enumerate(calls.results):
            key = ("result", number)
            wanted = given.results.get(number, self.whole)
            self.classes[key] = Class(key, "", value, [Option((wanted,), (), 0.0, 0.0)])
            self._add_edge(value, key, 0)
        self._note_pending(calls, keys)
        self._note_shares()
        self._sharing = Counter(
            one for edge in self.edges.values() for one in {*edge.shares, *self._moves_of(edge, moved=True)}
        )
        inside = Counter(one.path for one in self.classes.values() if one.call is not None)
        prefixes = {path.rsplit(".", n)[0] for path in inside for n in range(path.count(".") + 1)} - {""}
        several = {m for m in prefixes if sum(n for p, n in inside.items() if _within(p, m)) > 1}
        self.modules = sorted(several | given.again)
        """Those that may run again, as patterns."""
        values = [value for call in calls.calls for value in call.outputs]
        self.unit = sum(one.bytes + one.like.numel() * optimizer_bytes for one in calls.tensors + values)

    def _add_tensor(self, value: Value, asker: Asker) -> None:
        key: tuple = ("input", value.name)
        path = ""
        if value.kind != "input":
            owner, _, leaf = value.name.rpartition(".")
            path = self.given.pattern(owner)
            key = (value.kind, path, leaf, tuple(value.like.shape))
        self.of[id(value)] = key, 0
        if key in self.classes:
            self.classes[key].count += 1
            self.classes[key].names.append(value.name)
            return
        ways = [layouts(value.like.shape, n, False) if value.kind != "buffer" else [Replicate()] for n in self.sizes]
        even = [one for one in itertools.product(*ways) if asker.is_even(value.like.shape, one)]
        wanted = self.given.tensors.get(value.name)
        found = [Option((), (one,), 0.0, 0.0) for one in ([wanted] if wanted is not None else even)]
        self.classes[key] = Class(key, path, value, found, names=[value.name])

    def _add_call(self, number: int, call: Call, asker: Asker) -> tuple:
        path = self.given.pattern(call.path)
        shapes = tuple((tuple(one.like.shape), one.kind) for one in call.inputs)
        own = call.name.partition(":")[2] or number  # one that a plan cannot name is like no other
        key = ("call", path, own, shapes)
        wanted, made = self.given.inputs.get(call.name, ()), self.given.outputs.get(call.name, ())
        if key in self.classes:
            self.classes[key].count += 1
            self.classes[key].names.append(call.name)
        else:
            options = asker.options(call)
            fit = [one for one in options if all(w is None or w == p for w, p in zip(wanted, one.ins, strict=False))]
            if not fit:
                raise StrategyError(
                    f"{call.name!r}: with the given in_strategy it would have to redistribute by itself, which auto "
                    "does not plan; give another, or leave it out"
                )
            self.classes[key] = Class(key, path, call, fit, names=[call.name])
        for place, value in enumerate(call.inputs):
            self._add_edge(value, key, place)
        for place, value in enumerate(call.outputs):
            self.of[id(value)] = key, place
        for place, (value, target) in enumerate(zip(call.outputs, made, strict=False)):
            if target is not None:  # readers get it from there
                between = ("out", key, place)
                self.classes.setdefault(
                    between, Class(between, path, value, [Option((target,), (target,), 0.0, 0.0)], 0)
                )
                self.classes[between].count += 1
                self._add_edge(value, between, 0)
                self.of[id(value)] = between, 0
        return key

    def _add_edge(self, value: Value, reader: tuple, number: int) -> None:
        if id(value) not in self.of:
            self.of[id(value)] = ("constant",), 0
            self.classes.setdefault(
                ("constant",), Class(("constant",), "", value, [Option((), (self.whole,), 0.0, 0.0)])
            )
        maker, place = self.of[id(value)]
        edge = (maker, place, reader, number)
        self.edges.setdefault(edge, Edge(*edge, value)).read[id(value)] += 1

    def _note_shares(self) -> None:
        readers: dict[tuple, list[tuple]] = defaultdict(list)
        for key, edge in self.edges.items():
            for one in edge.read:
                readers[edge.maker, edge.place, one].append(key)
        alike = Counter((*one[:2], tuple(keys)) for one, keys in readers.items())
        for number, ((maker, place, keys), count) in enumerate(alike.items()):
            for key in keys:
                self.edges[key].shares.append((maker, place, number, count))

    def _note_pending(self, calls: Calls, keys: list[tuple]) -> None:
        made = {id(value): number for number, call in enumerate(calls.calls) for value in call.outputs}
        last: dict[int, int] = {id(value): len(keys) for value in calls.results}
        for number, call in enumerate(calls.calls):
            for value in call.inputs:
                last[id(value)] = max(number, last.get(id(value), 0))
        waiting: list[Counter[tuple]] = [Counter() for _ in keys]
        for one, begun in made.items():
            for number in range(begun + 1, last.get(one, 0)):
                waiting[number][self.of[one]] += 1
        for key, found in zip(keys, waiting, strict=True):
            self.classes[key].pending |= found

    # ---- the program

    def solve(self, limit: float | None, least: bool = False) -> Solution | None:
        """The fastest within `limit` bytes, or that with the least memory; None if nothing fits.

        Raises StrategyError if the solver ends without an answer.
        """
        program = _Program()
        again = {m: program.variable(0.0, whole=True) for m in self.modules}
        for m in self.given.again:
            program.low[again[m]] = 1
        x: dict[tuple, list[int]] = {}
        for key, one in self.classes.items():
            cost = [one.count * 3 * option.seconds * 1e6 for option in one.options]
            x[key] = [program.variable(c, whole=True) for c in cost]
            program.row(dict.fromkeys(x[key], 1.0), 1, 1)
        self._tie(program, x)
        memory: dict[int, float] = {}
        held: dict[str, dict[int, float]] = {m: defaultdict(float) for m in self.modules}
        charges: dict[tuple, Charge] = {}
        flows = {key: self._flows(program, edge, x, charges) for key, edge in self.edges.items()}
        for key, one in self.classes.items():
            value = one.member
            if isinstance(value, Value) and value.kind in ("parameter", "buffer"):
                grad = value.like.requires_grad
                size = value.bytes * (2 if grad else 1) + value.like.numel() * self.optimizer_bytes * grad
                for v, option in zip(x[key], one.options, strict=True):
                    memory[v] = one.count * size / parts(option.outs[0], self.sizes) / self.unit
        self._kept(program, x, flows, again, memory, held)
        self._working(program, x, flows, memory)
        self._rerun(program, x, charges, again)
        transient = program.variable(0.0, high=math.inf)
        for m, terms in held.items():
            most = sum(terms.values())
            program.row({**terms, transient: -1.0, again[m]: most}, -math.inf, most)
        memory[transient] = 1.0
        if limit is not None:
            program.row(memory, -math.inf, limit / self.unit)
        for m, other in itertools.combinations(self.modules, 2):
            if (_within(other, m) or _within(m, other)) and not {m, other} <= self.given.again:
                program.row({again[m]: 1.0, again[other]: 1.0}, -math.inf, 1)
        values = program.solve(memory if least else None)
        if values is None:
            return None
        gap = program.gap
        for v in itertools.chain(again.values(), *x.values()):  # what is held is only bounded from below
            program.low[v] = program.high[v] = round(values[v])
        held_values = program.solve(memory) or values
        chosen = {
            key: one.options[max(range(len(x[key])), key=lambda n: values[x[key][n]])]
            for key, one in self.classes.items()
        }
        found = Solution(
            chosen,
            [m for m in self.modules if values[again[m]] > 0.5],
            sum(c * v for c, v in zip(program.cost, values, strict=True)) / 1e6,
            sum(size * held_values[v] for v, size in memory.items()) * self.unit,
            sent=[0.0] * len(self.sizes),
            gap=gap,
        )
        for key in self.classes:
            found.costs[key] = {"compute": 3 * chosen[key].seconds, "communication": 0.0}
        for charge in charges.values():
            if values[charge.variable] > 0.5:
                self._charged(charge, found)
        return found

    def _tie(self, program: _Program, x: Mapping[tuple, list[int]]) -> None:
        """A module that is called with tensors of several kinds has one row: its calls take the same layouts."""
        named: dict[str, tuple] = {}
        for key, one in self.classes.items():
            for name in one.names if one.call is not None and one.call.name else ():
                other = named.setdefault(name, key)
                if other == key:
                    continue
                mine, its = (
                    {option.ins: v for v, option in zip(x[k], self.classes[k].options, strict=True)}
                    for k in (key, other)
                )
                for ins in mine.keys() | its.keys():
                    program.row({of[ins]: sign for of, sign in ((mine, 1.0), (its, -1.0)) if ins in of}, 0, 0)

    def _charged(self, one: Charge, found: Solution) -> None:
        """Note what is sent."""
        if one.backward and one.before == one.after:
            found.summed.add((one.edge.maker, one.edge.place))
        first = self.classes[one.edge.reader]
        found.costs[first.key]["communication"] += one.count * one.seconds / first.count
        times = one.count * (
            1 + any(_within(self._path(k), m) for k in one.readers for m in found.again if not one.backward)
        )
        for axis in range(len(self.sizes)):
            per_byte = [dict.fromkeys(link, (0.0, float(axis == n))) for n, link in enumerate(self.links)]
            both = moving(one.edge.value.bytes, one.before, one.after, one.summed, True, self.sizes, per_byte)
            found.sent[axis] += times * (both or (0.0, 0.0))[one.backward]

    def _path(self, reader: tuple) -> str:
        """Of the modules of a call; what the model returns is outside of all."""
        return self.classes[reader].path if reader[0] != "result" else " "

    def _moves_of(self, edge: Edge, moved: bool) -> list[tuple]:
        """A key for what readers share, and last how many such tensors there are; a parameter moves for each reader."""
        if moved and edge.value.kind in ("parameter", "buffer"):
            return [(edge.maker, edge.place, edge.reader, edge.number, edge.count)]
        return edge.shares

    def _flows(
        self, program: _Program, edge: Edge, x: Mapping[tuple, list[int]], charges: dict[tuple, Charge]
    ) -> dict[tuple, int]:
        maker, reader = self.classes[edge.maker], self.classes[edge.reader]
        given: dict[Placed, list[int]] = defaultdict(list)
        wanted: dict[tuple, list[int]] = defaultdict(list)
        for v, option in zip(x[edge.maker], maker.options, strict=True):
            given[option.outs[edge.place]].append(v)
        for v, option in zip(x[edge.reader], reader.options, strict=True):
            wanted[option.ins[edge.number], _summed(option, edge.number)].append(v)
        flows: dict[tuple, int] = {}
        least: dict[int, dict[int, float]] = defaultdict(dict)
        grad = edge.value.like.requires_grad
        for p in given:
            for after, summed in wanted:
                seconds = moving(edge.value.bytes, p, after, summed, grad, self.sizes, self.links)
                if seconds is None:
                    continue
                v = flows[p, (after, summed)] = program.variable(0.0)
                for backward, one in enumerate(seconds):
                    # Gradients of all readers in one layout are added, and then reduced once.
                    for shared in self._moves_of(edge, p != after) if one else ():
                        alone, count = self._sharing[shared] < 2, shared[-1]
                        key = (shared, backward, p, after, summed if backward or alone else None)
                        if key not in charges:
                            variable = v if alone else program.variable(0.0)
                            program.cost[variable] += count * one * 1e6
                            charges[key] = Charge(variable, one, bool(backward), edge, count, p, after, summed)
                        charges[key].readers.append(edge.reader)
                        if not alone:
                            least[charges[key].variable][v] = -1.0
        for variable, terms in least.items():
            program.row({variable: 1.0, **terms}, 0)
        rows: dict[tuple, dict[int, float]] = {("from", p): dict.fromkeys(xs, -1.0) for p, xs in given.items()}
        rows |= {("to", q): dict.fromkeys(xs, -1.0) for q, xs in wanted.items()}
        for (p, q), v in flows.items():
            rows["from", p][v] = rows["to", q][v] = 1.0
        for terms in rows.values():
            program.row(terms, 0, 0)
        return flows

    def _kept(
        self,
        program: _Program,
        x: Mapping[tuple, list[int]],
        flows: Mapping[tuple, Mapping[tuple, int]],
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
            around = [m for m in self.modules if _within(self._path(reader.key), m)]
            program.row({shared[key]: 1.0, **{v: -n for v, n in source.items()}, **{again[m]: 1.0 for m in around}}, 0)
            for m in around:
                for v in source:
                    held[m][v] += max(1, count // max(1, self.given.instances[m])) * size / self.unit

        for edge, found in flows.items():
            one, reader = self.edges[edge], self.classes[edge[2]]
            maker = self.classes[edge[0]]
            if reader.key[0] == "result" or reader.call is not None and one.number in reader.call.keeps_inputs:
                by_layout: dict[tuple, dict[int, float]] = defaultdict(dict)
                for (p, (q, _)), v in found.items():
                    if p == q and one.value.kind in ("parameter", "buffer"):
                        continue
                    for key in [edge[:2]] if p == q else self._moves_of(one, moved=True):
                        by_layout[key, q][v] = 1.0
                for key, source in by_layout.items():
                    size = one.value.bytes / parts(key[1], self.sizes)
                    keep(key, source, reader, size, maker.count if key[0] == edge[:2] else key[0][-1])
            for m in self.modules:  # what a module that is run again begins with
                outside = one.value.kind == "input" or one.value.kind == "made" and not _within(maker.path, m)
                if outside and _within(self._path(reader.key), m):
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

    def _working(
        self,
        program: _Program,
        x: Mapping[tuple, list[int]],
        flows: Mapping[tuple, Mapping[tuple, int]],
        memory: dict[int, float],
    ) -> None:
        """What lives for a moment while the call that needs most runs backward: gradients, and copies moved for it."""
        working = program.variable(0.0, high=math.inf)
        memory[working] = 1.0
        terms: dict[tuple, dict[int, float]] = {key: defaultdict(float) for key in self.classes}
        for key, one in self.classes.items():
            if one.call is None:
                continue
            for v, option in zip(x[key], one.options, strict=True):
                for value, placed in zip(one.call.inputs + one.call.outputs, option.ins + option.outs, strict=True):
                    terms[key][v] += value.bytes * value.like.requires_grad / parts(placed, self.sizes)
            for (maker, place), count in one.pending.items():
                source = self.classes[maker]
                value = source.member.outputs[place] if isinstance(source.member, Call) else source.member
                for v, option in zip(x[maker], source.options, strict=True):
                    terms[key][v] += count * value.bytes / parts(option.outs[place], self.sizes)
        for edge, found in flows.items():
            reader = self.classes[edge[2]]
            keeps = reader.call is not None and self.edges[edge].number in reader.call.keeps_inputs
            value = self.edges[edge].value
            for (p, (q, _)), v in found.items():
                moved = value.bytes * value.like.requires_grad / parts(p, self.sizes) * (p != q)
                copied = value.bytes / parts(q, self.sizes) * (reader.key[0] == "result" or p != q and not keeps)
                terms[edge[2]][v] += moved + copied
        for sizes in terms.values():
            if sizes:
                program.row({working: 1.0, **{v: -size / self.unit for v, size in sizes.items()}}, 0)

    def _rerun(self, program: _Program, x: Mapping, charges: Mapping[tuple, Charge], again: Mapping[str, int]) -> None:
        """What a module that is run again costs: its forward, redistributions included."""
        for m in self.modules:
            terms: dict[int, float] = defaultdict(float)
            most: dict[Any, float] = defaultdict(float)
            for key, one in self.classes.items():
                if one.call is not None and _within(one.path, m):
                    for v, option in zip(x[key], one.options, strict=True):
                        terms[v] = one.count * option.seconds * 1e6
                        most[key] = max(most[key], terms[v])
            for (shared, *_), charge in charges.items():
                inside = [reader for reader in charge.readers if _within(self._path(reader), m)]
                if inside and not charge.backward:
                    seconds = charge.count * charge.seconds * 1e6
                    terms[charge.variable] += seconds
                    for reader in inside:  # each wants it in one layout
                        most[shared, reader] = max(most[shared, reader], seconds)
            cost, all_of_it = program.variable(1.0, high=math.inf), sum(most.values())
            program.row({**terms, cost: -1.0, again[m]: all_of_it}, -math.inf, all_of_it)


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
    return path == module or path.startswith(module + ".") or (module == "" and path != " ")


class _Program:
    def __init__(self) -> None:
        self.cost: list[float] = []
        self.gap = 0.0
        """Of what was solved last."""
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
        """The values with the least cost, or with the least of these terms instead; None if there are none."""
        import numpy
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        cost = self.cost if instead is None else [instead.get(v, 0.0) for v in range(len(self.cost))]
        entries = list(self._entries())
        rows, columns, data = (numpy.array(one) for one in zip(*entries, strict=True))
        matrix = coo_array((data, (rows, columns)), shape=(len(self._rows), len(self.cost))).tocsr()
        with silent():
            result: Any = milp(
                numpy.array(cost),
                constraints=LinearConstraint(
                    matrix, [low for _, low, _ in self._rows], [high for *_, high in self._rows]
                ),
                integrality=self._whole,
                bounds=Bounds(self.low, self.high),
                options={**SOLVER, **({} if instead is None else {"mip_rel_gap": _ROUGHLY})},
            )
        if result.status == 2:
            return None
        if result.status != 0:  # with or without some solution: which one would depend on the machine
            why = {1: "it reached its limit of time or work"}.get(result.status, "it met numerical trouble")
            raise StrategyError(
                f"the solver found no answer: {why} ({result.message}); that says nothing of whether a plan fits. Give "
                "rows for more operators, or figures of the machine that are less far apart"
            )
        self.gap = float(result.mip_gap)
        return [float(one) for one in result.x]

    def _entries(self) -> Iterator[tuple[int, int, float]]:
        for number, (terms, _, _) in enumerate(self._rows):
            for v, value in terms.items():
                yield number, v, value

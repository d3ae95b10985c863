"""What the user's rows fix of a model, for `auto` to search the rest."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mindspeed_mem.parallel.calls import Call, Calls, Ends, Value
from mindspeed_mem.parallel.options import Placed
from mindspeed_mem.parallel.plan import Plan, Row, Strategies
from mindspeed_mem.parallel.semi_auto import check_names, laid_out
from mindspeed_mem.parallel.strategy import StrategyError, placements


class Given:
    """The rows of a plan, of this model.

    Raises StrategyError with all that names nothing, does not fit, or cannot be planned around.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, calls: Calls, plan: Plan) -> None:
        self.tensors: dict[str, Placed] = {}
        """Of parameters, buffers and the model's inputs, by their names."""
        self.inputs: dict[str, list[Placed | None]] = {}
        """What a call's tensors are brought to, by the call's name."""
        self.outputs: dict[str, list[Placed | None]] = {}
        """What is made of what it returns."""
        self.results: dict[int, Placed] = {}
        """Of what the model returns."""
        problems: list[str] = []
        self._mesh, self._problems = mesh, problems
        modules = dict(model.named_modules())
        rows = plan.by_path(list(modules), problems)
        check_names(rows, mesh, problems)
        split = laid_out(model, mesh, rows, problems)
        named = [*model.named_parameters(), *model.named_buffers()]
        self.tensors |= {name: split[id(one)][1] for name, one in named if id(one) in split}
        self._apart = _apart(modules, rows, self.tensors)
        self._leaves = {name for name, module in modules.items() if next(module.children(), None) is None}
        self.members: dict[str, list[str]] = defaultdict(list)
        """Of each pattern, the modules' paths."""
        for name in modules:
            self.members[self.pattern(name)].append(name)
        self.again = {self.pattern(path) for path, row in rows.items() if row.recompute}
        """Patterns of modules that run again."""
        self.instances = {path: len(found) for path, found in self.members.items()}
        if not problems:  # else their shapes do not matter yet
            self._read(rows, calls)
        if problems:
            raise StrategyError(problems)

    def pattern(self, path: str) -> str:
        """`path` with * for each number of a module that has modules of its own: a repeated layer, treated as most."""
        found, walked = [], []
        for part in path.split(".") if path else []:
            walked.append(part)
            name = ".".join(walked)
            found.append("*" if part.isdigit() and name not in self._leaves and name not in self._apart else part)
        return ".".join(found)

    def names(self, pattern: str) -> list[str]:
        """How rows name the modules of a pattern: by it, if no layer is apart."""
        return self.members[pattern] if self._apart and "*" in pattern else [pattern]

    def _read(self, rows: Mapping[str, Row], calls: Calls) -> None:
        used: set[str] = set()
        for call in calls.calls:
            key = next((one for one in (call.name, call.name.rpartition(".")[0]) if one and one in rows), None)
            if key is None:
                continue
            used.add(key)
            row = rows[key]
            if row.in_strategy is not None:
                self.inputs[call.name] = self._placed(row.in_strategy, call.inputs, f"{key!r}, in_strategy")
            if row.out_strategy is not None:
                self.outputs[call.name] = self._placed(row.out_strategy, call.outputs, f"{key!r}, out_strategy")
        for path in rows:
            module, colon, operator = path.partition(":")
            if colon and path not in used:
                there = ", ".join(_operators(calls.calls, module)) or "none"
                self._problems.append(f"{path!r}: {module or 'the model'} calls no {operator}; it calls {there}")
        for ends in calls.modules:
            if ends.path and ends.path in rows:
                self._read_module(rows[ends.path], ends, calls.calls[ends.first : ends.last])
        own = rows.get("", Row())
        if own.in_strategy is not None:
            values = [one for one in calls.tensors if one.kind == "input"]
            placed = self._placed(own.in_strategy, values, "'', in_strategy")
            self.tensors |= {one.name: p for one, p in zip(values, placed, strict=False) if p is not None}
        if own.out_strategy is not None:
            placed = self._placed(own.out_strategy, calls.results, "'', out_strategy")
            self.results = {number: p for number, p in enumerate(placed) if p is not None}

    def _read_module(self, row: Row, ends: Ends, inside: Sequence[Call]) -> None:
        """As of the operators inside that read what it gets, and that make what it returns."""
        if row.in_strategy is not None:
            placed = self._placed(row.in_strategy, ends.inputs, f"{ends.path!r}, in_strategy")
            for value, one in zip(ends.inputs, placed, strict=False):
                for call in inside if one is not None else ():
                    for place in (place for place, read in enumerate(call.inputs) if read is value):
                        self._note(self.inputs, call, len(call.inputs), place, one, f"{ends.path!r}, in_strategy")
        if row.out_strategy is not None:
            placed = self._placed(row.out_strategy, ends.outputs, f"{ends.path!r}, out_strategy")
            for value, one in zip(ends.outputs, placed, strict=False):
                if one is None:
                    continue
                what = f"{ends.path!r}, out_strategy"
                if value.call is None or value.call not in inside:
                    self._problems.append(f"{what}: it returns what it gets; give the strategy to what makes that")
                    continue
                self._note(self.outputs, value.call, len(value.call.outputs), value.place, one, what)

    def _note(
        self, to: dict[str, list[Placed | None]], call: Call, count: int, place: int, placed: Placed | None, what: str
    ) -> None:
        if not call.name:
            self._problems.append(f"{what}: at its end is {call.function}, which no row can name")
            return
        known = to[call.name] = to.get(call.name) or [None] * count
        if known[place] not in (None, placed):
            self._problems.append(f"{what}: another row says otherwise of {call.name!r}")
        known[place] = placed

    def _placed(self, given: Strategies, values: Sequence[Value], what: str) -> list[Placed | None]:
        if isinstance(given, Mapping):
            self._problems.append(f"{what}: auto takes strategies in order, not by name")
            return []
        strategies = given or ()
        if len(strategies) != len(values):
            self._problems.append(f"{what}: {len(strategies)} strategies for {len(values)} tensors; give one for each")
            return []
        return [
            None if one is None else placements(one, self._mesh, value.like.shape, f"{what} {number}", self._problems)
            for number, (one, value) in enumerate(zip(strategies, values, strict=True))
        ]


def _operators(calls: Sequence[Call], module: str) -> list[str]:
    found = [one.name.partition(":")[2] for one in calls if one.path == module and one.name]
    return sorted(set(found), key=found.index)


def _apart(modules: Mapping[str, nn.Module], rows: Mapping[str, Row], tensors: Mapping[str, Placed]) -> set[str]:
    """The layers of which the rows say something else than of most of their kind, by path."""
    said = {path: repr(replace(row, parameter_plan={}, cost=None)) for path, row in rows.items()}
    said = {path: text for path, text in said.items() if text != repr(Row())}
    said |= {name: repr(placed) for name, placed in tensors.items()}
    found: set[str] = set()
    for path, module in modules.items():
        layers = [name for name, one in module.named_children() if name.isdigit() and next(one.children(), None)]
        full = [f"{path}.{name}" if path else name for name in layers]
        of = {
            one: repr(sorted((key[len(one) :], text) for key, text in said.items() if _below(key, one))) for one in full
        }
        usual = Counter(of.values()).most_common(1)
        found |= {one for one in full if of[one] != usual[0][0]}
    return found


def _below(path: str, layer: str) -> bool:
    return path == layer or path.startswith((layer + ".", layer + ":"))

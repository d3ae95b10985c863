"""What operators of one forward read and make, and what running them again would free and cost.

A module or function that runs again starts from what it was given, and stops once the last storage that backward needs
of it is there; inline code runs only the operations on which such storages depend. The rules are those of
module_rerun.py and tape.py. Plain data: storages are numbers in the order in which they were first seen.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from mindspeed_mem.activation.observe.observed_ops import OUTSIDE, Node, Run, Step


class Again(NamedTuple):
    """A second run."""

    dropped: set[int]
    """What it makes again for backward."""
    taken: set[int]
    """What it starts from."""
    flops: int


class _Operator(NamedTuple):
    node: Node
    runs: list[Run]
    inline: list[int]
    """Its steps, where it is no module or function."""
    fused: list[Run]


@dataclass
class Forward:
    """One forward, as it was seen."""

    steps: list[Step] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    born: list[int] = field(default_factory=lambda: [0])
    """For each storage the step that made it, or that saw it first."""
    bytes: dict[int, int] = field(default_factory=dict)
    elsewhere: set[int] = field(default_factory=set)
    """Held by others anyway: masks, tables, what a stage received."""
    managed: set[int] = field(default_factory=set)
    """Emptied or written over by others."""
    saved: dict[int, int] = field(default_factory=dict)
    """At which step each storage was saved first."""
    owner: dict[int, Node] = field(default_factory=dict)
    """Who produced each storage that was saved."""

    def keep_only(self, keys: Collection[int]) -> None:
        """Of what was saved, backward needs only these."""
        self.saved = {key: step for key, step in sorted(self.saved.items()) if key in keys}

    def _saved_of(self, run: Run) -> list[tuple[int, int]]:
        """What was made in a run and saved, with the step at which it was saved first; numbers follow births."""
        first, end = (bisect_left(self.born, at, lo=1) for at in (run.begin, run.end))
        if end - first < len(self.saved):
            return [(key, self.saved[key]) for key in range(first, end) if key in self.saved]
        return [(key, saved) for key, saved in self.saved.items() if first <= key < end]

    def choices(self) -> list[dict[str, Any]]:
        """For each operator that ran, in the order in which they started: ``layer``, ``op``, bytes that recomputing
        it ``frees`` (below zero where its inputs take more), ``flops`` of its second run, and those of its
        ``forward``."""
        found = []
        for one in self._operators():
            again = self._second_run(one)
            taken = {key for key in again.taken if key not in self.saved and key not in self.elsewhere}
            frees = sum(self.bytes[key] for key in again.dropped) - sum(self.bytes[key] for key in taken)
            layer, op = one.node
            found.append(
                {"layer": layer, "op": op, "frees": frees, "flops": again.flops, "forward": self._flops_of(one)}
            )
        return found

    def dataflow(self, named: Mapping[int, Collection[str]]) -> dict[str, Any]:
        """Plain data. ``named``: the operators of each layer that a memory plan can name.

        ``operators``, in the order in which they started: ``layer``, ``op``, ``inline`` (no module or function),
        ``named`` (a memory plan can name it),
        ``reads`` (the storages that its second run starts from, and holds until then), ``makes`` (those that this can
        make again: for backward, or for operators after it), ``flops`` of its forward and, operators inside it
        included, of a second run that ends with what backward needs (``again``; None: it cannot run again).
        ``storages``: ``id``, ``layer`` and ``op`` that produced it (layer -1: came from outside), ``bytes``, whether
        backward needs it (``saved``) and whether others hold it anyway (``elsewhere``).
        """
        users = self._users()
        operators, listed = [], set(self.saved)
        for one in self._operators():
            reads, makes = self._module_flow(one) if one.runs else self._inline_flow(one, users)
            operators.append(
                {
                    "layer": one.node[0],
                    "op": one.node[1],
                    "inline": not one.runs,
                    "named": one.node[1] in named.get(one.node[0], ()),
                    "reads": sorted(reads),
                    "makes": sorted(makes - reads),
                    "flops": self._flops_of(one),
                    "again": self._second_run(one).flops if self._repeatable(one, reads) else None,
                }
            )
            listed |= reads | makes
        return {"operators": operators, "storages": [self._storage(key) for key in sorted(listed)]}

    # ---- operators
    def _operators(self) -> Iterator[_Operator]:
        """In the order in which they started."""
        found: dict[Node, _Operator] = {}
        starts: dict[Node, int] = {}
        for run in self.runs:
            one = found.setdefault(run.node, _Operator(run.node, [], [], []))
            (one.fused if run.fused else one.runs).append(run)
            starts.setdefault(run.node, run.begin)
        for index, step in enumerate(self.steps):
            if step.node is None:
                continue
            one = found.setdefault(step.node, _Operator(step.node, [], [], []))
            if not one.runs:
                one.inline.append(index)
                starts[step.node] = min(starts.get(step.node, index), index)
        return (found[node] for node in sorted(starts, key=starts.__getitem__))

    def _flops_of(self, one: _Operator) -> int:
        if one.runs:
            return sum(step.flops for run in one.runs for step in self.steps[run.begin : run.end])
        return sum(self.steps[index].flops for index in one.inline)

    def _second_run(self, one: _Operator) -> Again:
        if one.runs:
            return self._run_again(one.runs)
        return self._taped(one, self.saved.keys() - self._returned_by_layers())

    def _run_again(self, runs: list[Run]) -> Again:
        """What a `ModuleRerun` of each of these runs does."""
        dropped, taken, flops = set(), set(), 0
        stays = self._returned_by_layers()
        begins = [run.begin for run in self.runs] if runs else []
        for run in runs:
            if self._changes_its_input(run):
                continue  # it cannot start from there again
            last = 0
            for key, saved in self._saved_of(run):
                if key in stays:
                    continue
                if saved < run.end or key in run.outputs:
                    dropped.add(key)
                    if saved < run.end:  # what an operator inside takes is there before it runs
                        within = islice(self.runs, bisect_right(begins, run.begin), bisect_left(begins, saved))
                        saved = next((other.begin for other in within if key in other.inputs), saved)
                    last = max(last, min(saved, run.end))
            if last:
                taken |= run.inputs
                flops += sum(step.flops for step in self.steps[run.begin : last])
        return Again(dropped, taken, flops)

    def _taped(self, one: _Operator, asked: Collection[int]) -> Again:
        """The same for a `Tape` of inline code that is to make what is ``asked`` for, as far as it is made there;
        functions in it that are one step are runs of their own."""
        mine, steps = set(one.inline), [self.steps[index] for index in one.inline]
        dropped, taken, flops = self._run_again(one.fused)
        taken = {key for key in taken if not self._in_any(one.fused, key)}
        made = {key for step in steps for key in step.writes if self.born[key] in mine} - taken
        wanted = made & set(asked)
        needed = set(wanted)
        for step in reversed(steps):
            if step.writes & needed:
                needed |= step.reads | step.writes
                flops += step.flops
        of_fused = {key for key in needed if self._in_any(one.fused, key)}
        return Again(dropped | wanted, taken | (needed - made - of_fused), flops)

    def _returned_by_layers(self) -> set[int]:
        """What a layer returns stays, whatever in it runs again."""
        return {key for run in self.runs if not run.node[1] for key in run.outputs}

    def _in_any(self, runs: list[Run], key: int) -> bool:
        return any(run.begin <= self.born[key] < run.end for run in runs)

    def _changes_its_input(self, run: Run) -> bool:
        return any(step.writes & run.inputs for step in self.steps[run.begin : run.end])

    # ---- data flow
    def _users(self) -> dict[int, set[Node]]:
        """Who reads each storage, is given it, or hands it on to what comes after."""
        users: dict[int, set[Node]] = {}
        for step in self.steps:
            if step.node is None:
                continue
            for key in step.reads:
                users.setdefault(key, set()).add(step.node)
        for run in self.runs:
            for key in run.inputs | run.outputs:
                users.setdefault(key, set()).add(run.node)
        return users

    def _module_flow(self, one: _Operator) -> tuple[set[int], set[int]]:
        reads, makes = set(), set()
        for run in one.runs:
            reads |= run.inputs
            inside = {key for key, saved in self._saved_of(run) if saved < run.end}
            outputs = {key for key in run.outputs if run.begin <= self.born[key]}
            makes |= inside | outputs
        return reads, makes - self._returned_by_layers()

    def _inline_flow(self, one: _Operator, users: dict[int, set[Node]]) -> tuple[set[int], set[int]]:
        """A tape is ready to make all that outlives it, and each function in it holds what it was given."""
        written = {key for index in one.inline for key in self.steps[index].writes}
        outlives = {key for key in written if key in self.saved or users.get(key, set()) - {one.node}}
        given = {key for run in one.fused for key in run.inputs if not self._in_any(one.fused, key)}
        again = self._taped(one, outlives - given)
        outputs = {key for run in one.fused for key in run.outputs if run.begin <= self.born[key]}
        return again.taken | given, again.dropped | outputs

    def _repeatable(self, one: _Operator, reads: set[int]) -> bool:
        """Whether the engine takes it: what starts from memory that others manage, or changes what it was given, or
        (inline) communicates, it leaves alone."""
        steps = [self.steps[index] for index in one.inline]
        mine = set(one.inline)
        return not (
            reads & self.managed
            or any(map(self._changes_its_input, one.runs))
            or any(step.collective for step in steps)
            or any(self.born[key] not in mine for step in steps for key in step.writes)
        )

    def _storage(self, key: int) -> dict[str, Any]:
        layer, op = self._producer(key)
        return {
            "id": key,
            "layer": layer,
            "op": op,
            "bytes": self.bytes[key],
            "saved": key in self.saved,
            "elsewhere": key in self.elsewhere or self._is_constant(key),
        }

    def _producer(self, key: int) -> Node:
        if key in self.owner:
            return self.owner[key]
        step = self.steps[self.born[key]]
        if step.node is not None and key in step.writes:
            return step.node
        fused = [run.node for run in self.runs if run.fused and self._in_any([run], key)]
        return fused[-1] if fused else OUTSIDE

    def _is_constant(self, key: int) -> bool:
        """Whether it was there before, and no layer was given it: what a module holds itself."""
        if key in self.saved or self._producer(key) != OUTSIDE:
            return False
        return not any(key in run.inputs for run in self.runs if not run.node[1])

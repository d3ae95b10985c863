"""The groups of one observed layer: what its operators keep, put together so that a plan can decide about each.

What one operator produced is one group: a memory plan names operators. Experts are alike, so what they produce is one
group for all of them. Naming an operator that contains others takes these along. So an operator whose own code does
most of its work, or produces most of what is kept in it, makes one group with all in it (an attention written out); of
another one (an attention around its linears) what its own code keeps stays on the device, as does what is kept by
operators that have no name of their own in a plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_mem.adaptive.problem.part_view import KeptStorage, PartView
from mindspeed_mem.adaptive.problem.recompute_sets import RecomputeSets, SecondRun
from mindspeed_mem.plan.operators import INPUT, within


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A group of one layer, before layers that are alike are put together."""

    name: str
    bytes: int
    operators: tuple[str, ...]
    used_by: tuple[str, ...]
    again: tuple[tuple[str, float], ...] | None = None
    """What a memory plan names to recompute it, in forward order, with the share of its forward that runs again; None:
    it cannot be recomputed."""
    keeps: int = 0
    needs: tuple[str, ...] = ()
    swappable: bool = True
    tensors: int = 1
    from_previous: bool = False
    leaves: tuple[tuple[str, int], ...] = ()
    weight_bytes: int = 0
    """Of `bytes`, what gradients of weights that are put off wait for."""
    weights_only: bool = False
    """Nothing else needs these."""


def alike(name: str) -> str:
    """One name for all members of a list, as experts are."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _waiting(storages: list[KeptStorage]) -> dict[str, Any]:
    waiting = [one for one in storages if one.for_weights]
    alone = bool(waiting) and all(one.for_weights == "alone" for one in waiting)
    return {"weight_bytes": sum(one.bytes for one in waiting), "weights_only": alone}


class Grouping:
    """The groups of one layer."""

    def __init__(self, view: PartView, layer: int):
        self.view, self.layer = view, layer
        self.names = view.names(layer)
        kept = view.own(layer)
        passed_on = view.passed_on(layer).keys() - kept.keys()
        self.seen = view.operators(layer)
        containers = {op for op in kept if any(within(other, op) for other in kept)}
        merged = {op for op in containers if self._is_named(op) and self._is_one(op, kept)}
        self.fixed = {op for op in kept if (op in containers and op not in merged) or not self._is_named(op)}
        self.groups: dict[str, list[KeptStorage]] = {}
        self.operators: dict[str, list[str]] = {}
        self.inner: dict[str, set[str]] = {}
        for op in sorted(kept, key=lambda op: min(one.id for one in kept[op])):
            outer = min((one for one in merged if within(op, one)), key=len, default=op)
            name = alike(outer)
            self.groups.setdefault(name, []).extend(kept[op])
            if outer not in self.operators.setdefault(name, []):
                self.operators[name].append(outer)
            self.inner.setdefault(name, set()).add(op)
        producers = {op for some in self.operators.values() for op in some} | passed_on
        self.runs = RecomputeSets(view, layer, self.names, producers, self.fixed | passed_on)

    def _is_named(self, op: str) -> bool:
        return op in self.seen and self.seen[op].named

    def _is_one(self, op: str, kept: Mapping[str, list[KeptStorage]]) -> bool:
        """Whether an operator is one with all in it: see above."""
        inside = {name: one for name, one in self.seen.items() if within(name, op)}
        tops = [one for name, one in inside.items() if not any(within(name, other) for other in inside)]
        sizes = {name: sum(one.bytes for one in some) for name, some in kept.items() if name == op or within(name, op)}
        return 2 * sum(one.flops for one in tops) < self.seen[op].flops or 2 * sizes[op] >= sum(sizes.values())

    def drafts(self) -> list[Draft]:
        """Each after those that it needs."""
        runs, found = self._united(), []
        group_of = {one.id: name for name, some in self.groups.items() for one in some if not self._is_fixed(name)}
        for name, op, storages in self._received():
            group_of |= {one.id: name for one in storages}
            found.append(
                Draft(
                    name=name,
                    bytes=sum(one.bytes for one in storages),
                    operators=() if op is None else (op,),
                    used_by=self._users(storages),
                    leaves=self._leaves(storages),
                    **_waiting(storages),
                    swappable=op is None or self._leaves_alone(op),
                    tensors=len(storages),
                    from_previous=True,
                )
            )
        for name in sorted(self.groups, key=lambda name: min(one.id for one in self.groups[name])):
            found.append(self._draft(name, runs[name], group_of, [draft.name for draft in found]))
        return found

    def _united(self) -> dict[str, SecondRun | None]:
        """The second run of each group, once groups are put together of which one would be made from what another
        makes and nobody keeps."""
        while True:
            runs = {
                name: None if self._is_fixed(name) else self.runs.of(operators)
                for name, operators in self.operators.items()
            }
            pairs = (
                (name, other)
                for name, run in runs.items()
                for op, nbytes in (run.conflicts if run is not None else {}).items()
                for other, operators in self.operators.items()
                if op in operators and other != name and 2 * nbytes > sum(one.bytes for one in self.groups[name])
            )
            pair = next(pairs, None)
            if pair is None:
                return runs
            name, other = pair
            both = f"{other} + {name}"
            self.groups[both] = self.groups.pop(other) + self.groups.pop(name)
            self.operators[both] = self.operators.pop(other) + self.operators.pop(name)
            self.inner[both] = self.inner.pop(other) | self.inner.pop(name)

    def _is_fixed(self, name: str) -> bool:
        return any(op in self.fixed for op in self.operators[name])

    def _draft(self, name: str, run: SecondRun | None, group_of: Mapping[int, str], there: list[str]) -> Draft:
        storages = self.groups[name]
        again, keeps = None, 0
        needs: tuple[str, ...] = ()
        if run is not None:
            wanted = {group_of[key] for key in run.reads if group_of.get(key, name) != name}
            if wanted <= set(there):
                again = run.shares
                keeps = run.held + sum(one.bytes for one in storages if one.id not in run.makes)
                needs = tuple(other for other in there if other in wanted)
        return Draft(
            name=name or "layer",
            bytes=sum(one.bytes for one in storages),
            operators=self._in_order(self.inner[name] | set(self.operators[name])),
            used_by=self._users(storages),
            leaves=self._leaves(storages),
            **_waiting(storages),
            again=again,
            keeps=keeps,
            needs=needs,
            swappable=not self._is_fixed(name),
            tensors=len(storages),
        )

    def _received(self) -> list[tuple[str, str | None, list[KeptStorage]]]:
        """What the layer before produced: name of the group, its producer, storages; the layer's input first."""
        view, layer = self.view, self.layer
        inputs = view.inputs(layer)
        if layer == view.layers[0]:  # who would have produced it is seen in other layers
            kept = [view.storages[key] for key in inputs if view.storages[key].saved_in(layer)]
            return [(INPUT, None, kept)] if kept else []
        received = view.received(layer).items()
        ordered = sorted(received, key=lambda item: not any(one.id in inputs for one in item[1]))
        names = [INPUT, *(f"{op} of the layer before" for op, _ in ordered[1:])]
        return [(name, op, some) for name, (op, some) in zip(names, ordered, strict=False)]

    def _leaves_alone(self, op: str) -> bool:
        """Whether naming this operator of the layer before names nothing else."""
        before = self.view.layers[self.view.layers.index(self.layer) - 1]
        one = self.view.operators(before).get(op)
        inside = any(within(other, op) for other in self.view.kept_of(before))
        return one is not None and one.named and not inside and op not in self.view.own(before)

    def _users(self, storages: list[KeptStorage]) -> tuple[str, ...]:
        users = {op for one in storages for layer, op in one.savers if layer == self.layer}
        return self._in_order(users)

    def _leaves(self, storages: list[KeptStorage]) -> tuple[tuple[str, int], ...]:
        """The users but the first that are the first of some of these, with how many bytes those have; not of what
        gradients of weights wait for."""
        sizes: dict[str, int] = {}
        for one in storages:
            mine = self._users([one])
            if mine:
                sizes[mine[0]] = sizes.get(mine[0], 0) + one.bytes * (not one.for_weights)
        first, *later = self._in_order(sizes) or ("",)
        return tuple((name, sizes[name]) for name in later if sizes[name])

    def _in_order(self, names: Collection[str]) -> tuple[str, ...]:
        return tuple(name for name in self.names if name in names)

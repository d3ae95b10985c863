"""Layers that are alike, put together as classes.

Alike are layers with the same operators and the same groups of the same bytes, made again from the same. What an expert
layer keeps depends on how tokens are routed, which is another way in the next micro-batch: such layers are one class
with the most bytes seen in any of them. Seconds are medians over the layers of a class.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import median

from mindspeed_mem.adaptive.problem.definition import Group, LayerClass, PlannedOperator
from mindspeed_mem.adaptive.problem.groups import Draft, Grouping, alike
from mindspeed_mem.adaptive.problem.part_view import PartView
from mindspeed_mem.plan.layers import in_words
from mindspeed_mem.plan.operators import EXPERTS, within

_BYTES = ("forward_temporary_bytes", "backward_temporary_bytes", "weight_bytes")
_ROUTED = {one.name for one in EXPERTS}


class LayerClasses:
    """The classes of all layers of the model."""

    def __init__(self, views: Iterable[PartView]):
        self._views: dict[int, PartView] = {}
        self._drafts: dict[int, list[Draft]] = {}
        first: list[int] = []
        for view in views:
            for layer in view.layers:
                self._views[layer], self._drafts[layer] = view, Grouping(view, layer).drafts()
            first += view.layers[:1]
        alike_but_input: dict[Hashable, Hashable] = {}  # what layers are with their input, by what they are without
        members: dict[Hashable, list[int]] = {}
        for layer in sorted(self._views, key=lambda layer: (layer in first, layer)):
            loose = self._key(layer, with_input=False)
            exact = self._key(layer, with_input=True)
            if layer in first:  # nothing is decided about its input: it goes with any that are like it otherwise
                exact = alike_but_input.get(loose, exact)
            members.setdefault(exact, []).append(layer)
            alike_but_input.setdefault(loose, exact)
        self.name_of: dict[int, str] = {}
        made = []
        for layers in sorted(map(sorted, members.values())):
            name = in_words(layers)
            self.name_of |= dict.fromkeys(layers, name)
            made.append(self._class(name, layers, first))
        self.made: tuple[LayerClass, ...] = tuple(made)

    def _key(self, layer: int, with_input: bool) -> Hashable:
        """Equal for layers that are alike."""
        names = self._views[layer].names(layer)
        routed = _routed(names)
        return names, tuple(_mark(draft, routed, with_input) for draft in self._drafts[layer])

    def _class(self, name: str, layers: Sequence[int], first: Sequence[int]) -> LayerClass:
        names = self._views[layers[0]].names(layers[0])
        ways = ("forward", "backward", "weight")
        forward, backward, weight = (self._each(layers, f"{way}_seconds") for way in ways)
        most = {which: self._each(layers, which, max) for which in _BYTES}
        groups = []
        for place in range(len(self._drafts[layers[0]])):
            some = [self._drafts[layer][place] for layer in layers]
            if some[0].from_previous:  # the first layer of a part does not know who made it, and that alone
                some = [one for one, layer in zip(some, layers, strict=True) if layer not in first] or some
            groups.append(_group(some, names, forward, most["forward_temporary_bytes"]))
        views = [(self._views[layer], layer) for layer in layers]
        given = max(sum(view.storages[key].bytes for key in view.inputs(layer)) for view, layer in views)
        return LayerClass(
            name=name,
            operators=tuple(
                PlannedOperator(
                    name=op,
                    forward_seconds=forward[op],
                    backward_seconds=backward[op],
                    weight_seconds=weight[op],
                    gradient_bytes=int(most["weight_bytes"][op]),
                    **{which: int(of[op]) for which, of in most.items()},
                )
                for op in names
            ),
            groups=tuple(groups),
            input_bytes=given,
        )

    def _each(self, layers: Sequence[int], which: str, pick: Callable = median) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for layer in layers:
            for one in self._views[layer].profile.operators:
                if one.layer == layer:
                    found.setdefault(one.op, []).append(getattr(one, which))
        names = self._views[layers[0]].names(layers[0])
        return {name: pick(found[name]) if name in found else 0.0 for name in names}


def _mark(draft: Draft, routed: Callable[[str], bool], with_input: bool) -> Hashable:
    any_input = draft.from_previous and not with_input
    return (
        draft.name,
        None if any_input or any(map(routed, draft.operators)) else (draft.bytes, draft.keeps),
        None if any_input else tuple(dict.fromkeys(map(alike, draft.operators))),
        frozenset(map(alike, draft.used_by)),
        draft.again is not None and tuple(dict.fromkeys(alike(name) for name, _ in draft.again)),
        draft.needs,
        None if any_input else draft.swappable,
        draft.from_previous,
    )


def _routed(names: Sequence[str]) -> Callable[[str], bool]:
    """Tells operators in which sizes depend on how tokens are routed: all of the module around router and experts."""
    parts = [(name.split("."), name) for name in names]
    around = {
        ".".join(path[: next(place for place, part in enumerate(path) if part in _ROUTED)])
        for path, _ in parts
        if _ROUTED & set(path)
    }
    return lambda name: any(one and (name == one or within(name, one)) for one in around)


def _group(
    some: Sequence[Draft], names: tuple[str, ...], forward: dict[str, float], temporary: dict[str, float]
) -> Group:
    """One group of a class from those of its layers; `forward` and `temporary`: seconds and bytes of each operator."""
    first, size, keeps = some[0], max(one.bytes for one in some), max(one.keeps for one in some)
    shares = {name: share for one in reversed(some) for name, share in one.again or ()}
    operators = _union(names, (one.operators for one in some)) if not first.from_previous else first.operators
    again = tuple(name for name in names if name in shares)
    seconds = None
    runs = {op: [name for name in names if name == op or (op and within(name, op))] for op in shares}
    if first.again is not None and keeps < size:
        seconds = sum(share * sum(forward[name] for name in runs[op]) for op, share in shares.items())
    most = max((int(temporary[name]) for inside in runs.values() for name in inside), default=0)
    return Group(
        name=first.name,
        bytes=size,
        operators=operators or names[-1:],
        used_by=_union(names, (one.used_by for one in some)),
        recompute_seconds=seconds,
        recompute_keeps=keeps if seconds is not None else 0,
        recompute_temporary_bytes=most if seconds is not None else 0,
        recompute_operators=again if seconds is not None and again != operators else (),
        needs=first.needs if seconds is not None else (),
        leaves=_leaves(some, names),
        swappable=first.swappable,
        tensors=max(one.tensors for one in some),
        weight_bytes=max(one.weight_bytes for one in some),
        weights_only=any(one.weight_bytes for one in some)
        and all(one.weights_only or not one.weight_bytes for one in some),
        from_previous=first.from_previous,
    )


def _leaves(some: Sequence[Draft], names: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """The least that leaves early in any of these."""
    found = [dict(one.leaves) for one in some]
    first = min(map(names.index, _union(names, (one.used_by for one in some))), default=0)
    least = {name: min(one.get(name, 0) for one in found) for name in names[first + 1 :]}
    return tuple((name, size) for name, size in least.items() if size)


def _union(names: Sequence[str], some: Iterable[Iterable[str]]) -> tuple[str, ...]:
    wanted = {name for one in some for name in one}
    return tuple(name for name in names if name in wanted)

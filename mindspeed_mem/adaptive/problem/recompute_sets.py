"""Which operators have to run again to make what one operator or a few keep for backward, and what that takes.

The engine holds all that a recomputed operator is given until it has run again: nothing, where backward keeps that
anyway or another recomputed operator makes it; otherwise the operator that made it runs again, too, where that takes
less than holding it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from mindspeed_mem.adaptive.problem.part_view import KeptStorage, PartView
from mindspeed_mem.plan.operators import within


@dataclass(frozen=True, kw_only=True)
class SecondRun:
    """What recomputing some operators takes."""

    shares: tuple[tuple[str, float], ...]
    """The operators in forward order, each with the share of its forward that runs again: it stops early."""
    reads: frozenset[int]
    """The storages that backward keeps and this starts from."""
    makes: frozenset[int]
    held: int
    """Bytes that are kept for this alone."""
    conflicts: dict[str, int] = field(default_factory=dict)
    """Of these, bytes that other operators with groups of their own made."""


class RecomputeSets:
    """Second runs in one layer.

    Args:
        names: the layer's operators in forward order.
        producers: those with something to decide about; they are recomputed by their own groups alone.
        fixed: those that cannot be named without others.
    """

    def __init__(
        self, view: PartView, layer: int, names: Collection[str], producers: Collection[str], fixed: Collection[str]
    ):
        self._storages, self._operators = view.storages, view.operators(layer)
        self._layer, self._inputs = layer, view.inputs(layer)
        self._place = {name: place for place, name in enumerate(names)}
        self._producers, self._fixed = set(producers), set(fixed)

    def of(self, operators: Collection[str]) -> SecondRun | None:
        """Recompute these, which keep something. None: one of them cannot run again."""
        if any(name not in self._operators or self._operators[name].again is None for name in operators):
            return None
        chosen, held = set(operators), set()
        for name in operators:
            for key in self._operators[name].reads:
                others, kept = self._obtain(key, frozenset(operators))
                chosen |= others
                held |= kept
        chosen = {name for name in chosen if not any(other and within(name, other) for other in chosen)}
        makes = {key for name in chosen for key in self._operators[name].makes}
        reads = {key for name in chosen for key in self._operators[name].reads} - makes
        held -= makes
        conflicts: Counter[str] = Counter()
        for key in held:
            for maker in self._makers(key):
                if maker in self._producers and maker not in self._fixed:
                    conflicts[maker] += self._storages[key].bytes
                    break
        return SecondRun(
            shares=tuple((name, self._share(name, chosen)) for name in sorted(chosen, key=self._place.__getitem__)),
            reads=frozenset(key for key in reads if self._is_kept(self._storages[key])),
            makes=frozenset(makes),
            held=sum(self._storages[key].bytes for key in held),
            conflicts=dict(conflicts),
        )

    def _obtain(self, key: int, running: frozenset[str]) -> tuple[set[str], set[int]]:
        """How a storage that a second run starts from is there: operators to run as well, storages to hold."""
        made = any(key in self._operators[name].makes for name in running)
        if made or self._is_kept(self._storages[key]):
            return set(), set()
        maker = next(iter(self._makers(key)), None)
        if maker is None or not self._may_join(maker, running):
            return set(), {key}
        operators, held = {maker}, set()
        for other in self._operators[maker].reads:
            more, kept = self._obtain(other, running | {maker})
            operators |= more
            held |= kept
        fewer = sum(self._storages[one].bytes for one in held) < self._storages[key].bytes
        return (operators, held) if fewer else (set(), {key})

    def _is_kept(self, one: KeptStorage) -> bool:
        """Whether it is there in backward without this. A layer's input is taken to be a layer's before."""
        if one.id in self._inputs:
            return one.saved_in(self._layer)
        return one.saved or one.elsewhere

    def _makers(self, key: int) -> list[str]:
        """Who can make a storage again, innermost first."""
        found = [name for name, one in self._operators.items() if name and key in one.makes and one.again is not None]
        return sorted(found, key=lambda name: -name.count("."))

    def _may_join(self, maker: str, running: Collection[str]) -> bool:
        """Whether naming it recomputes nothing that is decided about elsewhere, nor what runs again anyway."""
        if any(maker == one or within(one, maker) for one in self._producers | {*running}):
            return False
        return not any(one and within(maker, one) for one in (self._producers - self._fixed) | {*running})

    def _share(self, name: str, chosen: Collection[str]) -> float:
        """Without what comes after the last storage that is wanted; by FLOPs, where it has any."""
        one = self._operators[name]
        asked = {key for other in chosen if other != name for key in self._operators[other].reads}
        if (
            one.again is None
            or not one.flops
            or any(key in asked and not self._storages[key].saved for key in one.makes)
        ):
            return 1.0
        return one.again / one.flops

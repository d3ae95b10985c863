"""What one layer does in the passes of its part under its letters, wherever it stands: the same in many plans.

Operators of a layer count from 1; 0 and below are those of the layer before, from its last one back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from mindspeed_mem.activation.observe.rank_profile import HostCost, Outside
from mindspeed_mem.adaptive.problem.definition import (
    GB,
    Group,
    LayerClass,
    Link,
    PlannedOperator,
    Problem,
    gradient_on_host,
    on_host,
)
from mindspeed_mem.adaptive.search.decisions import NOTHING, RECOMPUTE, SWAP

TICK = 2.0**36


def exact(seconds: float) -> float:
    """Rounded to whole ticks of 15 ps, of which sums and differences are exact in any order, up to a day."""
    return round(seconds * TICK) / TICK


class Copy(NamedTuple):
    """A group of one layer that is swapped."""

    nbytes: int
    out_seconds: float
    back_seconds: float
    back_bytes: int
    """Those that come back for the backward."""
    early: int
    """Operators of the pass before its backward that are left when its copy back starts; 0: not so early."""


class Setting(NamedTuple):
    """What decides besides the letters."""

    link: Link
    splits: bool
    apart: bool
    gradients_move: bool
    """Those of outputs, while those of weights wait for them."""
    temporary: int
    """`Stage.operator_temporary_bytes`."""
    host: HostCost

    @property
    def slows(self) -> float:
        """See `Link`; over one that blocks, computation stands still instead."""
        return 0.0 if self.link.blocking else self.link.slows

    def spare(self, temporary: int) -> int:
        """How much of the stage's temporaries is not there while this much is."""
        return max(0, self.temporary - temporary)


def setting(problem: Problem, temporary: int) -> Setting:
    line = problem.pipeline
    return Setting(
        problem.link, line.splits, line.apart, problem.output_gradients and line.apart, temporary, problem.host
    )


class Move(NamedTuple):
    """A swapped group."""

    copy: Copy
    produced: int
    saved: int
    """The operator that saves it first, if that comes later."""
    last: int
    """The last one that uses it,"""
    needed: int
    """and the one before whose backward it must be there."""
    later: int
    """Bytes that come back for the gradient of its weight."""


@dataclass
class Direction:
    """One direction of layers: seconds and memory by operator."""

    seconds: list[float] = field(default_factory=list)
    take: list[int] = field(default_factory=list)
    """Bytes that an operator takes when it starts."""
    give: list[int] = field(default_factory=list)
    """Bytes free once it has run."""
    spare: list[int] = field(default_factory=list)
    """Bytes of the stage's temporaries that are not there while it runs."""

    def extend(self, other: Direction) -> None:
        self.seconds += other.seconds
        self.take += other.take
        self.give += other.give
        self.spare += other.spare


class LayerScript:
    """One layer. What its groups take in the layer before, and what moves, is for the part to place."""

    def __init__(self, kind: LayerClass, previous: LayerClass | None, letters: str, given: Setting):
        self._given, count = given, len(kind.operators)
        self.forward = Direction([one.forward_seconds for one in kind.operators], [0] * count, [0] * count)
        self.backward = Direction([one.backward_seconds for one in kind.operators], [0] * count, [0] * count)
        self.forward.spare = [given.spare(one.forward_temporary_bytes) for one in kind.operators]
        self.backward.spare = [given.spare(one.backward_temporary_bytes) for one in kind.operators]
        self.weights = [0.0] * count
        """Seconds of the gradients of weights that are put off."""
        self.weight_spare = [given.spare(one.backward_temporary_bytes) * given.splits for one in kind.operators]
        self.weight_seconds = kind.weight_seconds
        self.waiting = sum(one.weight_bytes for one in kind.operators)
        """Bytes that wait for gradients of weights."""
        self.gradients: list[tuple[int, int]] = []
        """Of outputs, that are on the host until then: operator, bytes."""
        self.moves: list[Move] = []
        self.before: list[tuple[int, int]] = []
        """Operators of the layer before, with bytes that they take."""
        for number, operator in enumerate(kind.operators if given.splits else (), 1):
            self._put_off(number, operator)
        for life in _lives(kind, previous, letters, given.splits):
            self._add(life)

    def _put_off(self, number: int, operator: PlannedOperator) -> None:
        place, backward, given = number - 1, self.backward, self._given
        backward.seconds[place] -= operator.weight_seconds
        backward.take[place] += operator.weight_bytes
        self.weights[place] = operator.weight_seconds
        if nbytes := gradient_on_host(operator, given.gradients_move):
            self.gradients.append((number, nbytes))
            if given.slows:
                backward.seconds[place] += given.slows * (nbytes / GB) / given.link.out
                self.weights[place] += given.slows * (nbytes / GB) / given.link.back

    def _add(self, life: _Life) -> None:
        forward, backward, group, given = self.forward, self.backward, life.group, self._given
        later = on_host(group, given.apart) if life.letter == SWAP else 0
        self.waiting += group.weight_bytes * given.splits - later
        if life.produced > 0:
            forward.take[life.produced - 1] += group.bytes
        else:
            self.before.append((life.produced, group.bytes))
        for number, size in life.leaves:
            backward.give[number - 1] += size
        if life.letter == RECOMPUTE:
            less, needed = group.bytes - group.recompute_keeps, life.needed - 1
            forward.give[max(life.last_use, life.produced) - 1] += less
            backward.take[needed] += less
            backward.seconds[needed] += group.again_seconds(given.host)
            backward.spare[needed] = min(backward.spare[needed], given.spare(group.recompute_temporary_bytes))
        elif life.letter == SWAP:
            self._move(life, later)

    def _move(self, life: _Life, later: int) -> None:
        link, slows, nbytes = self._given.link, self._given.slows, life.group.bytes
        back, seconds = nbytes - later, nbytes / GB
        saved = max(life.produced, life.first_use)
        copy = Copy(nbytes, exact(seconds / link.out), exact(back / GB / link.back), back, 0)
        self.moves.append(Move(copy, life.produced, saved, life.last_use, life.needed, later))
        host = life.group.moved_seconds(self._given.host) / 2
        self.forward.seconds[saved - 1] += host
        self.backward.seconds[life.needed - 1] += host
        if slows:
            self.forward.seconds[saved - 1] += slows * seconds / link.out
            self.backward.seconds[life.needed - 1] += slows * back / GB / link.back
        if slows and later:
            self.weights[life.last_use - 1] += slows * later / GB / link.back


_of_layer = lru_cache(maxsize=4096)(LayerScript)


def of_layers(kinds: Sequence[LayerClass], letters: Sequence[str], given: Setting) -> list[LayerScript]:
    """Of layers in a row. Most are like others in it, so that few are looked up among all that were written."""
    found: dict[tuple[str, str, str], LayerScript] = {}
    layers, previous = [], None
    for kind, text in zip(kinds, letters, strict=True):
        key = kind.name, "" if previous is None else previous.name, text
        if key not in found:
            found[key] = _of_layer(kind, previous, text, given)
        layers.append(found[key])
        previous = kind
    return layers


class Row:
    """The layers of a part in a row, by operator of the part; the first place and the last are outside of layers."""

    def __init__(self, first: Outside, last: Outside, layers: Sequence[LayerScript], given: Setting):
        """first, last: what runs before and after these."""
        self.bases = list(accumulate((len(layer.weights) for layer in layers), initial=0))
        self.forward, self.backward = (Direction([0.0], [0], [0], [0]) for _ in range(2))
        self.weights, self.weight_spare = [first.weight_seconds], [given.spare(first.backward_temporary_bytes)]
        self.weight_seconds = first.weight_seconds + last.weight_seconds
        self.waiting = first.weight_bytes + last.weight_bytes
        self.gradients: list[tuple[int, int]] = []
        """Of outputs of layers' operators, see `LayerScript`."""
        for base, layer in zip(self.bases, layers, strict=False):
            self.forward.extend(layer.forward)
            self.backward.extend(layer.backward)
            self.weights += layer.weights
            self.weight_spare += layer.weight_spare
            self.weight_seconds += layer.weight_seconds
            self.waiting += layer.waiting
            self.gradients += [(base + number, nbytes) for number, nbytes in layer.gradients]
            for number, nbytes in layer.before:
                self.forward.take[base + number] += nbytes
        for one in (self.forward, self.backward):
            one.extend(Direction([0.0], [0], [0], [0]))
        self.weights.append(last.weight_seconds)
        self.weight_spare.append(given.spare(last.backward_temporary_bytes))
        if nbytes := gradient_on_host(last, given.gradients_move):
            self.gradients.append((self.bases[-1] + 1, nbytes))
            if slows := given.slows:
                self.backward.seconds[-1] += slows * (nbytes / GB) / given.link.out
                self.weights[-1] += slows * (nbytes / GB) / given.link.back
        for number, nbytes in self.gradients:
            self.backward.give[number] += nbytes
            self.waiting -= nbytes


def produced(group: Group, kind: LayerClass, previous: LayerClass | None) -> int:
    """The operator that makes the last of a group."""
    maker, first = kind, 1
    if previous is not None and group.from_previous:
        maker, first = previous, 1 - len(previous.operators)
    # Nothing: a first layer, of a class whose others come after a layer of another kind, which makes it.
    return first + max((maker.index[name] for name in group.operators if name in maker.index), default=-1)


def leaving(group: Group, kind: LayerClass, splits: bool) -> list[tuple[str, int]]:
    """The operators with whose backward bytes of a group leave, and how many; `splits`: a split backward holds what
    gradients of weights are made from, which leaves with these."""
    first = min(group.used_by, key=kind.index.__getitem__)
    others = sum(size for _, size in group.leaves) + group.weight_bytes * splits
    return [(first, group.bytes - others), *group.leaves]


class _Life(NamedTuple):
    """One group of one layer, by numbers of operators."""

    letter: str
    group: Group
    produced: int
    first_use: int
    last_use: int
    needed: int
    leaves: tuple[tuple[int, int], ...]
    """Operators with the bytes that leave once their backward has been."""


def _lives(kind: LayerClass, previous: LayerClass | None, letters: str, splits: bool) -> list[_Life]:
    """When each group of a layer is made and needed, in forward order.

    A group that a second run starts from is needed when that runs, which may be before its own users' backward.
    """
    uses = {group.name: [kind.index[name] + 1 for name in group.used_by] for group in kind.groups}
    needed = {name: max(places) for name, places in uses.items()}
    for group, letter in reversed(list(zip(kind.groups, letters, strict=True))):
        for name in group.needs if letter == RECOMPUTE else ():
            needed[name] = max(needed[name], needed[group.name])
    found = []
    for group, letter in zip(kind.groups, letters, strict=True):
        if letter == NOTHING:
            continue
        leaves = tuple((kind.index[name] + 1, size) for name, size in leaving(group, kind, splits))
        of_group = uses[group.name]
        made = produced(group, kind, previous)
        found.append(_Life(letter, group, made, min(of_group), max(of_group), needed[group.name], leaves))
    return found

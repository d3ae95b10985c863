"""What happens in the passes of a part of a stage under many plans: `pass_script.PartScripts` for all of them at once.

Plans of one distance have the same events at the same places; which of them there are is a row of zeros and ones over
the plans ("lanes").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from mindspeed_mem.activation.observe.rank_profile import Outside
from mindspeed_mem.adaptive.problem.definition import GB, Group, LayerClass, Problem
from mindspeed_mem.adaptive.search.decisions import KEEP, NOTHING, RECOMPUTE, SWAP
from mindspeed_mem.adaptive.search.layer_script import TICK, Row, exact, of_layers, produced, setting
from mindspeed_mem.adaptive.search.pass_script import AHEAD, BACK, OUT, RELEASE, WAIT

if TYPE_CHECKING:
    import numpy

    Array: TypeAlias = "numpy.ndarray[Any, Any]"


@dataclass
class _Copies:
    """Copies at one place in all plans that have them."""

    has: Array
    """(lanes) of float64, 1 or 0."""
    out: float
    saved: int
    due: int
    returns: list[Return] = field(default_factory=list)


class Return(NamedTuple):
    """A copy back, in the plans that need it at the same place."""

    number: int
    """Of the copy, in the order of layers and groups."""
    has: Array
    nbytes: int
    back: float
    start: int
    """The operator before whose backward it starts; 0: in the pass before."""
    early: int
    needed: int


class Event(NamedTuple):
    """What happens at a moment in a pass; a number for each lane in the arrays."""

    what: int
    copy: int
    moment: int
    """Row of `Passes.moments`."""
    seconds: Any
    """Of the copy, 0 where there is none; None where none starts."""
    has: Any
    """1 where there is one."""


class Passes(NamedTuple):
    """One kind of pass."""

    events: list[Event]
    moments: Array
    """(places, lanes): seconds of compute until each place."""
    whole: Array
    highest: Array
    net: Array
    copied: Array
    """Seconds of all copies that start in it."""


class _Layers(NamedTuple):
    """Layers of which the same is to be decided."""

    kind: LayerClass
    previous: LayerClass | None
    nothing: tuple[bool, ...]
    """By place of the group: there is nothing to decide."""
    numbers: list[int]
    """In the part."""
    bases: Array
    """Operators before each."""
    letters: Array
    """(layers, places, lanes)"""


class _Decision(NamedTuple):
    """A group of such layers; operators as places after those before the layer, from 1 on."""

    group: Group
    produced: int
    first_use: int
    last_use: int


class ManyScripts:
    """One part of a stage under all plans."""

    def __init__(self, problem: Problem, number: int, place: int, letters: Array, distance: int):
        import numpy

        self.part = part = problem.stages[number].parts[place]
        self.lanes = len(letters)
        kinds = [problem.class_of[name] for name in part.layers]
        self._temporary = temporary = problem.stages[number].operator_temporary_bytes
        self._given = given = setting(problem, temporary)
        # What is taken whatever the letters are is as if all were kept.
        kept = _kept(letters[0], kinds)
        self._row = row = Row(part.before, part.after, of_layers(kinds, kept, given), given)
        self.count = row.bases[-1]
        self._tail = int(part.after != Outside())
        shape = (self.count + 2, self.lanes)

        def by_lane(of_row: Sequence[float], each: bool = True) -> Array:
            column = numpy.array(of_row)[:, None]
            return numpy.repeat(column, self.lanes, axis=1) if each else column

        self._forward_seconds = by_lane(row.forward.seconds, bool(problem.link.slows or problem.host.moved_seconds))
        self._backward_seconds = by_lane(row.backward.seconds)
        self._take, self._regive = by_lane(row.forward.take, False), by_lane(row.backward.give, False)
        self._forward_spare = by_lane(row.forward.spare, False)
        self._backward_spare = by_lane(row.backward.spare, bool(temporary))
        self._give, self._retake = numpy.zeros(shape, numpy.int64), by_lane(row.backward.take)
        self._problem, self._link, self._distance = problem, problem.link, distance
        self._waiting: Array = numpy.full(self.lanes, row.waiting)
        self._weights = by_lane(row.weights)
        rows = _by_kind(kinds, row.bases, letters)
        made = sorted((one for layers in rows for one in self._decided(layers)), key=lambda one: one[:2])
        self._copies = [copy for _, _, copy, _ in made]
        for number, copy in enumerate(self._copies):
            copy.returns = [one._replace(number=number) for one in copy.returns]
        ones = numpy.ones(self.lanes)
        self._later = [(*gradient, ones) for gradient in row.gradients]
        """(operator, bytes, lanes): see `PartScripts`."""
        self._later += [entry for *_, entry in made if entry is not None]
        late = [one for copy in self._copies for one in copy.returns if one.early]
        self.early = sorted(late, key=lambda one: (-one.early, -one.number))
        """The copies back that may start in the pass before, the first of them first."""
        self._cache: dict[tuple[bool, int | None, bool], Passes] = {}

    def _decided(self, layers: _Layers) -> Iterator[tuple[int, int, _Copies, tuple[int, int, Array] | None]]:
        """What the letters of these layers are about: the copies of each layer, by it and the place of the group, with
        what comes back later."""
        kind, previous = layers.kind, layers.previous
        swapped, again = layers.letters == ord(SWAP), layers.letters == ord(RECOMPUTE)
        some_swapped, some_again = swapped.any(axis=(0, 2)).tolist(), again.any(axis=(0, 2)).tolist()
        needed = _needed(kind, again, some_again)
        for place, of in enumerate(_decisions(kind, previous)):
            if some_again[place]:
                self._recomputed(of, layers, again[:, place], needed[place])
            if some_swapped[place]:
                for layer, copy, later in self._swapped(of, layers, swapped[:, place], needed[place]):
                    yield layer, place, copy, later

    def _recomputed(self, of: _Decision, layers: _Layers, again: Array, needed: int | Array) -> None:
        """again: (layers, lanes)."""
        import numpy

        group, bases = of.group, layers.bases
        less = group.bytes - group.recompute_keeps
        self._give[bases + max(of.last_use, of.produced)] += again * less
        for one, there in _cases(needed, again):
            rows = bases + 1 + one
            self._retake[rows] += there * less
            self._backward_seconds[rows] += there * group.again_seconds(self._given.host)
            if self._temporary:
                before = self._backward_spare[rows]
                spare = self._given.spare(group.recompute_temporary_bytes)
                self._backward_spare[rows] = numpy.minimum(before, numpy.where(there, spare, before))

    def _swapped(
        self, of: _Decision, layers: _Layers, swapped: Array, needed: int | Array
    ) -> Iterator[tuple[int, _Copies, tuple[int, int, Array] | None]]:
        """The copies of each layer in which some plan has one, with what comes back later; swapped: (layers, lanes)."""
        group, bases = of.group, layers.bases
        saved = bases + max(of.produced, of.first_use)
        last = bases + of.last_use
        later = self._problem.on_host(group)
        back_bytes = group.bytes - later
        slows = 0.0 if self._link.blocking else self._link.slows
        if later:
            self._waiting = self._waiting - swapped.sum(axis=0) * later
            self._weights[last] += swapped * (slows * later / GB / self._link.back)
        seconds, seconds_back = group.bytes / GB, back_bytes / GB
        out, back = exact(seconds / self._link.out), exact(seconds_back / self._link.back)
        host = group.moved_seconds(self._given.host) / 2
        cases = _cases(needed, swapped)
        if host:
            self._forward_seconds[saved] += swapped * host
            for one, there in cases:
                self._backward_seconds[bases + 1 + one] += there * host
        if slows:
            self._forward_seconds[saved] += swapped * (slows * seconds / self._link.out)
        for one, there in cases if slows else ():
            self._backward_seconds[bases + 1 + one] += there * (slows * seconds_back / self._link.back)
        has = swapped.astype(float)
        sizes, back_sizes = swapped * group.bytes, [there * back_bytes for _, there in cases]
        returning = [there.astype(float) for _, there in cases]
        some = [set(there.any(axis=1).nonzero()[0].tolist()) for _, there in cases]
        for row, layer in enumerate(layers.numbers):
            if not swapped[row].any():
                continue
            due = max(int(bases[row]) + of.produced + self._distance, int(saved[row]))
            if due > self.count:
                due = self.count if due == self.count + self._tail else self.count + 1
            self._give[due] += sizes[row]
            copy = _Copies(has[row], out, int(saved[row]), due)
            for case, (one, _) in enumerate(cases):
                if row not in some[case]:
                    continue
                place = int(bases[row]) + 1 + one
                start = place + self._distance
                early = max(0, start - self.count - self._tail)
                start = 0 if early else min(start, self.count)
                if start:
                    self._retake[start] += back_sizes[case][row]
                copy.returns.append(Return(0, returning[case][row], back_bytes, back, start, early, place))
            yield layer, copy, (int(last[row]), later, has[row]) if later else None

    def passes(self, forward: bool, ahead: int | None, parts: Sequence[ManyScripts], fetched: bool) -> Passes:
        """See `PartScripts.script`; ahead: the part whose backward follows."""
        if ahead is not None and not parts[ahead].early:
            ahead = None
        fetched = fetched or not self.early
        key = forward, ahead, fetched
        if key not in self._cache:
            early = [] if ahead is None else parts[ahead].early
            self._cache[key] = self._of_forward(early) if forward else self._of_backward(early, fetched)
        return self._cache[key]

    @cached_property
    def _weighted(self) -> list[int]:
        return [number for number in range(self.count + 1, -1, -1) if self._weights[number].any()]

    @cached_property
    def weights(self) -> Passes:
        """See `PartScripts.weights`."""
        import numpy

        numbers = self._weighted
        places = {number: place for place, number in enumerate(numbers)}
        moments = numpy.zeros((len(numbers) + 1, self.lanes))
        if numbers:
            moments[1:] = numpy.stack([self._weights[number] for number in numbers]).cumsum(axis=0)
        sizes = numpy.zeros((len(numbers) + 1, self.lanes), numpy.int64)
        steps: list[tuple[int, int, int, int, Any, Any]] = []
        for copy, (number, nbytes, has) in enumerate(self._later):
            place, seconds = places[number], exact(nbytes / GB / self._link.back)
            steps.append((place - 1, BACK, nbytes, copy, has * seconds, has))
            steps.append((place, WAIT, nbytes, copy, None, None))
            sizes[place] += has.astype("int64") * nbytes
        if not numbers:
            none = sizes[0]
            return Passes([], moments, moments[-1], none, none - self._waiting, numpy.zeros(self.lanes))
        spares = [self._row.weight_spare[number] for number in numbers]
        spare = numpy.array([spares[0], *spares, spares[-1]])[:, None]
        return _passes(steps, moments, sizes[0], sizes[1:], sizes[:-1], spare, self._waiting)

    def _of_forward(self, ahead: Sequence[Return]) -> Passes:
        import numpy

        before, after, count = self.part.before, self.part.after, self.count
        seconds = self._forward_seconds.copy()
        seconds[0], seconds[count + 1] = before.forward_seconds, after.forward_seconds
        steps: list[tuple[int, int, int, int, Any, Any]] = []
        for number, copy in enumerate(self._copies):
            steps.append((copy.saved, OUT, number, number, copy.has * copy.out, copy.has))
            steps.append((copy.due, RELEASE, number, number, None, None))
        take = self._take.copy()
        take[count + 1] += after.bytes
        if ahead:
            take = numpy.repeat(take, self.lanes, axis=1)
        for rank, one in enumerate(ahead):
            at = max(1, count + 1 - one.early)
            steps.append((at - 1, AHEAD, rank, rank, one.has * one.back, one.has))
            take[at] += self._bytes(one)
        start = numpy.full(self.lanes, before.bytes)
        spare = numpy.concatenate([self._forward_spare, self._forward_spare[-1:]])
        begin, loss = (self._given.spare(one.forward_temporary_bytes) for one in (before, after))
        spare[0], spare[-2:] = begin, loss
        return _passes(steps, seconds.cumsum(axis=0), start, take[1:], self._give[1:], spare)

    def _of_backward(self, ahead: Sequence[Return], fetched: bool) -> Passes:
        import numpy

        before, after, count = self.part.before, self.part.after, self.count
        loss, end = after.backward_seconds, before.backward_seconds
        of_loss = after.bytes
        of_start: int | Array = before.bytes
        if self._problem.pipeline.splits:
            loss, end = loss - after.weight_seconds, end - before.weight_seconds
            of_loss += dict(self._row.gradients).get(count + 1, 0) - after.weight_bytes
            of_start -= before.weight_bytes
        moments = numpy.empty((count + 2, self.lanes))
        moments[:-1] = self._backward_seconds[:0:-1]
        moments[0] += loss  # before the last operator
        numpy.cumsum(moments[:-1], axis=0, out=moments[:-1])
        moments[-1] = moments[-2] + end
        if self._problem.pipeline.splits and not self._problem.pipeline.apart:
            moments[-1] += self._row.weight_seconds
            of_start += self._waiting
        steps: list[tuple[int, int, int, int, Any, Any]] = []
        for copy in self._copies:
            for one in copy.returns:
                if one.start:
                    steps.append((count - one.start, BACK, -one.number, key_of(one), one.has * one.back, one.has))
                steps.append((count - one.needed, WAIT, -one.number, key_of(one), None, None))
        ones = numpy.ones(self.lanes)
        for number, nbytes in self._row.gradients:
            out = exact(nbytes / GB / self._link.out)
            steps.append((count + 1 - number, OUT, -number, number, ones * out, ones))
            steps.append((count + 1 - number, RELEASE, -number, number, None, None))
        take = numpy.concatenate([numpy.zeros((1, self.lanes), numpy.int64), self._retake[count:0:-1]])
        start = numpy.zeros(self.lanes, numpy.int64)
        if not fetched:
            for rank, one in enumerate(self.early):
                steps.append((-1, BACK, rank, key_of(one), one.has * one.back, one.has))
                start += self._bytes(one)
        for rank, one in enumerate(ahead):
            place = count - min(one.early, count)
            steps.append((place, AHEAD, rank, rank, one.has * one.back, one.has))
            take[min(place + 1, count)] += self._bytes(one)  # without layers there is only the loss
        give = numpy.concatenate([[[of_loss]], self._regive[count:0:-1]])
        loss_spare, last = (self._given.spare(one.backward_temporary_bytes) for one in (after, before))
        if self._problem.pipeline.splits and not self._problem.pipeline.apart:
            last = min([last, *(self._row.weight_spare[number] for number in self._weighted)])
        row = self._backward_spare[:1] * 0
        spare = numpy.concatenate([row + loss_spare, row + loss_spare, self._backward_spare[count:0:-1], row + last])
        return _passes(steps, moments, start, take, give, spare, of_start)

    def _bytes(self, one: Return) -> Array:
        return one.has.astype("int64") * one.nbytes


def key_of(one: Return) -> int:
    """Tells the returns of all copies apart."""
    return one.number << 32 | one.needed


def _by_kind(kinds: Sequence[LayerClass], bases: Sequence[int], letters: Array) -> list[_Layers]:
    """The layers of a part by what is to be decided; letters: (lanes, places)."""
    import numpy

    found: dict[tuple[LayerClass, LayerClass | None, tuple[bool, ...]], list[tuple[int, Array]]] = {}
    firsts = accumulate((len(kind.groups) for kind in kinds), initial=0)
    for layer, (kind, first) in enumerate(zip(kinds, firsts, strict=False)):
        mine = letters[:, first : first + len(kind.groups)].T
        nothing = tuple((mine[:, 0] == ord(NOTHING)).tolist())
        found.setdefault((kind, kinds[layer - 1] if layer else None, nothing), []).append((layer, mine))
    layers = []
    for key, of_key in found.items():
        numbers = [layer for layer, _ in of_key]
        its_bases = numpy.array([bases[number] for number in numbers])
        layers.append(_Layers(*key, numbers, its_bases, numpy.stack([mine for _, mine in of_key])))
    return layers


def _kept(row: Array, kinds: Sequence[LayerClass]) -> list[str]:
    """The letters of layers in which everything is kept, if these are letters of them."""
    text = row.tobytes().decode().replace(SWAP, KEEP).replace(RECOMPUTE, KEEP)
    firsts = accumulate((len(kind.groups) for kind in kinds), initial=0)
    return [text[first : first + len(kind.groups)] for first, kind in zip(firsts, kinds, strict=False)]


@lru_cache(maxsize=512)
def _decisions(kind: LayerClass, previous: LayerClass | None) -> list[_Decision]:
    """The groups of a layer."""
    found = []
    for group in kind.groups:
        uses = [kind.index[name] + 1 for name in group.used_by]
        found.append(_Decision(group, produced(group, kind, previous), min(uses), max(uses)))
    return found


def _needed(kind: LayerClass, again: Array, some: Sequence[bool]) -> list[int | Array]:
    """Before the backward of which operator each group must be there: a place, or one for each layer and plan.

    some: by group, whether any is made again.
    """
    import numpy

    needed: list[int | Array] = [max(kind.index[name] for name in group.used_by) for group in kind.groups]
    for place in reversed(range(len(kind.groups))):
        mine = again[:, place]
        for name in kind.groups[place].needs if some[place] else ():
            other, own = kind.group_index[name], needed[place]
            needed[other] = numpy.maximum(needed[other], numpy.where(mine, own, 0))
    return needed


def _cases(needed: int | Array, those: Array) -> list[tuple[int, Array]]:
    """By where it is needed: those of `those` in which it is there."""
    import numpy

    if isinstance(needed, int):
        return [(needed, those)]
    return [(int(one), those & (needed == one)) for one in numpy.unique(needed[those])]


def _passes(
    steps: list[tuple],
    moments: Array,
    at_start: Array,
    take: Array,
    give: Array,
    spare: Array,
    at_end: int | Array = 0,
) -> Passes:
    """Memory is taken and given operator by operator. In place, as these arrays are large: `moments` is changed."""
    import numpy

    moments *= TICK
    numpy.rint(moments, out=moments)
    moments /= TICK
    events = []
    copied = numpy.zeros(len(at_start))
    for place, what, _, copy, seconds, has in sorted(steps, key=lambda one: one[:4]):
        events.append(Event(what, copy, place, seconds, has))
        if seconds is not None:
            copied += seconds
    held = numpy.empty((len(take), len(at_start)), numpy.int64)  # by each once it has taken, before it gives
    held[0] = take[0] + at_start
    numpy.subtract(take[1:], give[:-1], out=held[1:])
    numpy.cumsum(held, axis=0, out=held)
    net = held[-1] - give[-1] - at_end
    held -= spare[1:-1]
    highest = numpy.maximum(at_start - spare[0], held.max(axis=0))
    highest = numpy.maximum(highest, net + at_end - spare[-1])
    return Passes(events, moments, moments[-1], highest, net, copied)

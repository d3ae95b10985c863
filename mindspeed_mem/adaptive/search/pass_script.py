"""What happens in one pass of a stage, in the order of its operators: compute, copies, waits, memory.

This is what the engine does with a plan in each micro-batch. Operators of a part count from 1 in forward order. A
swapped group that operator n produced, whose backward is needed last by operator u, with distance k: its copy out
starts when the first operator that saves it has run; its memory is released after operator n + k, or at the end of the
forward, and compute waits for the copy there; its copy back starts before the backward of operator u + k, which may be
in the pass before, and compute waits for it before the backward of u. Recomputation runs before that backward.

So memory depends only on the order, not on how long anything takes: allocations and releases are in compute's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, islice
from operator import sub
from typing import NamedTuple

from mindspeed_mem.activation.observe.rank_profile import Outside
from mindspeed_mem.adaptive.problem.definition import GB, Group, LayerClass, Link, Part, Problem
from mindspeed_mem.adaptive.search.decisions import NOTHING, RECOMPUTE, SWAP

OUT, RELEASE, BACK, AHEAD, WAIT = range(5)

TICK = 2.0**36


def exact(seconds: float) -> float:
    """Rounded to whole ticks of 15 ps, of which sums and differences are exact in any order, up to a day."""
    return round(seconds * TICK) / TICK


class Script(NamedTuple):
    """A pass in the order in which things happen."""

    steps: tuple[tuple[float, int, int], ...]
    """(seconds of compute before it, what happens, number of the copy)"""
    rest: float
    """Seconds of compute after the last step."""
    highest: int
    """The most bytes held during the pass, above those held at its start, less those of the stage's temporaries that
    are not there."""
    net: int
    """Bytes held at its end, above those at its start."""
    seconds: float
    """All compute, without waits."""

    @property
    def ahead(self) -> bool:
        """Whether copies of the next backward start in it."""
        return any(what == AHEAD for _, what, _ in self.steps)


class Copy(NamedTuple):
    """A group of one layer that is swapped."""

    nbytes: int
    out_seconds: float
    back_seconds: float
    back_bytes: int
    """Those that come back for the backward."""
    early: int
    """Operators of the pass before its backward that are left when its copy back starts; 0: not so early."""


class _Direction:
    """One direction of a part: seconds, copies and memory by operator number."""

    def __init__(self, count: int):
        self.seconds = [0.0] * (count + 2)
        self.take = [0] * (count + 2)
        """Bytes that an operator takes when it starts."""
        self.give = [0] * (count + 2)
        """Bytes free once it has run."""
        self.spare = [0] * (count + 2)
        """Bytes of the stage's temporaries that are not there while it runs."""
        self.steps: list[tuple[int, int, int]] = []
        """(operator, what happens there, copy)"""


class PartScripts:
    """The passes of one part under these actions and this distance."""

    def __init__(self, problem: Problem, part: Part, letters: Sequence[str], distance: int, temporary: int = 0):
        """temporary: `Stage.operator_temporary_bytes`."""
        self.part, self._temporary = part, temporary
        self.copies: list[Copy] = []
        self._starts: list[tuple[int, int]] = []  # of each copy back: before which operators, counted on, and for which
        self._on_host, gradient = problem.on_host, problem.gradient_on_host
        kinds = [problem.class_of[name] for name in part.layers]
        bases = list(accumulate((len(kind.operators) for kind in kinds), initial=0))
        self.count = count = bases[-1]
        self._link = problem.link
        self._tail = int(part.after != Outside())  # the final norm counts as an operator, too
        line = problem.pipeline
        self._splits, self._apart = line.splits, line.apart
        self._weight_seconds = part.before.weight_seconds + part.after.weight_seconds
        self._waiting = part.before.weight_bytes + part.after.weight_bytes
        self.later: list[tuple[int, int]] = []
        """(operator, bytes): what of groups comes back for the gradient of its weight,"""
        self.gradients: dict[int, tuple[int, int]] = {}
        """and of gradients of outputs: by operator the bytes, and the number of the copy out."""
        self._weights = [0.0] * (count + 2)
        self._weights[0], self._weights[-1] = part.before.weight_seconds, part.after.weight_seconds
        self._weight_spare = [0] * (count + 2)
        outside = (part.before, part.after)
        self._weight_spare[0], self._weight_spare[-1] = (self._spare(one.backward_temporary_bytes) for one in outside)
        self.weight_copies: list[Copy] = []
        self.weight_returns: list[int] = []
        """The copies out that these bring back, of gradients of outputs; -1: of a group."""
        self._forward, self._backward = _Direction(count), _Direction(count)
        for base, kind in zip(bases, kinds, strict=False):
            end = base + 1 + len(kind.operators)
            self._forward.seconds[base + 1 : end], self._backward.seconds[base + 1 : end] = _seconds(kind)
            for number, operator in enumerate(kind.operators if temporary else (), base + 1):
                self._forward.spare[number] = self._spare(operator.forward_temporary_bytes)
                self._backward.spare[number] = self._spare(operator.backward_temporary_bytes)
            for number, operator in enumerate(kind.operators if self._splits else (), base + 1):
                self._backward.seconds[number] -= operator.weight_seconds
                self._backward.take[number] += operator.weight_bytes
                self._weights[number] = operator.weight_seconds
                self._weight_spare[number] = self._spare(operator.backward_temporary_bytes)
                if nbytes := gradient(operator):
                    self._add_gradient(number, nbytes)
            self._weight_seconds += kind.weight_seconds
            self._waiting += sum(operator.weight_bytes for operator in kind.operators)
        if nbytes := gradient(part.after):
            self._add_gradient(count + 1, nbytes)
        for layer, (kind, text) in enumerate(zip(kinds, letters, strict=True)):
            previous = kinds[layer - 1] if layer else None
            for life in _lives(kind, previous, text, self._splits):
                base = bases[layer - 1] if life.group.from_previous else bases[layer]
                self._add(life, base + life.produced + 1, bases[layer] + 1, distance, problem.link)
                if life.letter == RECOMPUTE and temporary:
                    needed = bases[layer] + 1 + life.needed
                    again = self._spare(life.group.recompute_temporary_bytes)
                    self._backward.spare[needed] = min(self._backward.spare[needed], again)
        late = [number for number, copy in enumerate(self.copies) if copy.early]
        self.early = sorted(late, key=lambda number: (-self.copies[number].early, -number))
        """The copies back that may start in the pass before, the first of them first."""
        self._cache: dict[tuple, Script] = {}

    def _add(self, life: _Life, produced: int, base: int, distance: int, link: Link) -> None:
        forward, backward, nbytes = self._forward, self._backward, life.group.bytes
        first, last, needed = base + life.first_use, base + life.last_use, base + life.needed
        waits = life.group.weight_bytes * self._splits
        later = self._on_host(life.group) if life.letter == SWAP else 0
        self._waiting += waits - later
        forward.take[produced] += nbytes
        for place, size in life.leaves:
            backward.give[base + place] += size
        if life.letter == RECOMPUTE:
            forward.give[max(last, produced)] += nbytes - life.group.recompute_keeps
            backward.take[needed] += nbytes - life.group.recompute_keeps
            backward.seconds[needed] += life.group.recompute_seconds or 0.0
        if life.letter != SWAP:
            return
        number = len(self.copies)
        saved = max(produced, first)
        due = max(produced + distance, saved)
        if due > self.count:  # beyond the last operator: at once if that is the final norm, else once the loss is there
            due = self.count if due == self.count + self._tail else self.count + 1
        forward.steps += [(saved, OUT, number), (due, RELEASE, number)]
        forward.give[due] += nbytes
        start = needed + distance
        if later:
            self.later.append((last, later))
            if link.slows and not link.blocking:
                self._weights[last] += link.slows * later / GB / link.back
        back = nbytes - later
        seconds, early = nbytes / GB, max(0, start - self.count - self._tail)
        self.copies.append(Copy(nbytes, exact(seconds / link.out), exact(back / GB / link.back), back, early))
        self._starts.append((start, needed))
        if link.slows and not link.blocking:
            forward.seconds[saved] += link.slows * seconds / link.out
            backward.seconds[needed] += link.slows * back / GB / link.back
        if start <= self.count + self._tail:
            start = min(start, self.count)
            backward.steps.append((start, BACK, number))
            backward.take[start] += back
        backward.steps.append((needed, WAIT, number))

    def _add_gradient(self, number: int, nbytes: int) -> None:
        """That of the output of operator `number` leaves when its backward has used it, and computation waits for that,
        as far as the window is full."""
        copy, seconds, link = len(self.copies), nbytes / GB, self._link
        self.copies.append(Copy(nbytes, exact(seconds / link.out), 0.0, 0, 0))
        self._starts.append((0, 0))
        self._backward.steps += [(number - 1, OUT, copy), (number - 1, RELEASE, copy)]
        self._backward.give[number] += nbytes
        self._waiting -= nbytes
        self.gradients[number] = nbytes, copy
        if link.slows and not link.blocking:
            self._backward.seconds[number] += link.slows * seconds / link.out
            self._weights[number] += link.slows * seconds / link.back

    def _spare(self, temporary: int) -> int:
        """How much of the stage's temporaries is not there while this much is."""
        return max(0, self._temporary - temporary)

    def script(
        self,
        forward: bool,
        ahead: PartScripts | None,
        fetched: bool,
        idle: tuple[int, ...] = (),
        there: tuple[int, ...] = (),
    ) -> Script:
        """A pass.

        Args:
            forward: its direction.
            ahead: whose backward follows and lets its first copies start here.
            fetched: for a backward, its own first copies have started in the pass before.
            idle: the copies of ``ahead`` that start at its end besides.
            there: for a backward, its own copies that have started so.
        """
        if ahead is not None and not (ahead.early or idle):
            ahead = None
        fetched = fetched or not self.early  # so that what is the same is one script
        key = forward, None if ahead is None else id(ahead), fetched, idle, there
        if key not in self._cache:
            if ahead is not None and idle:
                script = _with_idle(self.script(forward, ahead, fetched, there=there), ahead, idle)
            else:
                script = self._write_forward(ahead) if forward else self._write_backward(ahead, fetched, there)
            self._cache[key] = script
        return self._cache[key]

    def fitting(self, room: int) -> tuple[int, ...]:
        """The copies back that there is room for where a pass has ended, of those that have not started in it, in the
        order in which they are needed."""
        found: list[int] = []
        for copy in self._wanted:
            room -= self.copies[copy].back_bytes
            if room < 0:
                break
            found.append(copy)
        return tuple(found)

    @cached_property
    def _wanted(self) -> list[int]:
        these = [number for number, copy in enumerate(self.copies) if not copy.early and copy.back_bytes]
        return sorted(these, key=lambda number: (*(-place for place in self._starts[number]), number))

    @cached_property
    def _weighted(self) -> list[int]:
        """The operators with gradients of weights that are put off, in the order in which these are computed. They hold
        no more for a short time than the whole backward of the operator."""
        return [number for number in range(self.count + 1, -1, -1) if self._weights[number]]

    @cached_property
    def weights(self) -> Script:
        """The gradients of weights of a pass, where they are a pass of their own."""
        numbers = self._weighted
        if not numbers:
            return Script((), 0.0, 0, -self._waiting, 0.0)
        begins = list(accumulate((self._weights[number] for number in numbers), initial=0.0))
        steps, sizes = [], [0] * (len(numbers) + 1)
        places = {number: place for place, number in enumerate(numbers)}
        returns = [(places[number], nbytes, -1) for number, nbytes in self.later]
        returns += [(places[number], *gradient) for number, gradient in self.gradients.items()]
        for copy, (place, nbytes, out) in enumerate(sorted(returns)):  # each starts when the gradient before is there
            self.weight_returns.append(out)
            self.weight_copies.append(Copy(nbytes, 0.0, exact(nbytes / GB / self._link.back), nbytes, 0))
            steps.append((place - 1, BACK, copy, copy, begins[max(0, place - 1)]))
            steps.append((place, WAIT, copy, copy, begins[place]))
            sizes[place] += nbytes
        spare = [self._weight_spare[number] for number in numbers]
        spare = [spare[0], *spare, spare[-1]]
        return _script(steps, begins[-1], sizes[0], sizes[1:], sizes[:-1], spare, self._waiting)

    def _write_forward(self, ahead: PartScripts | None) -> Script:
        """Time and memory run through the part's operators from 1 to count, and on to count + 1, the loss."""
        before, after, line = self.part.before, self.part.after, self._forward
        ends = list(accumulate(line.seconds[1 : self.count + 1], initial=before.forward_seconds))
        whole = ends[-1] + after.forward_seconds
        ends.append(whole)
        steps = [(number, what, copy, copy, ends[number]) for number, what, copy in line.steps]
        take = line.take.copy()
        take[self.count + 1] += after.bytes
        for rank, (copy, early, nbytes) in enumerate(_fetched(ahead)):
            number = max(1, self.count + 1 - early)
            steps.append((number - 1, AHEAD, rank, copy, ends[number - 1]))
            take[number] += nbytes
        start, loss = (self._spare(one.forward_temporary_bytes) for one in (before, after))
        spare = [start, *line.spare[1 : self.count + 1], loss, loss] if self._temporary else ()
        return _script(steps, whole, before.bytes, take[1:], line.give[1:], spare)

    def _write_backward(self, ahead: PartScripts | None, fetched: bool, there: tuple[int, ...]) -> Script:
        """From the loss down to operator 1; an event of an operator comes before its backward. Where gradients of
        weights are put off, but are no pass of their own, they come at its end."""
        before, after, line = self.part.before, self.part.after, self._backward
        loss, end = after.backward_seconds, before.backward_seconds
        if self._splits:
            loss, end = loss - after.weight_seconds, end - before.weight_seconds
        loss += line.seconds[self.count + 1]
        begins = list(accumulate(line.seconds[self.count : 0 : -1], initial=loss))
        whole = begins[-1] + end
        whole += self._weight_seconds if self._splits and not self._apart else 0.0
        steps = []
        take = line.take[self.count : 0 : -1]
        for number, what, copy in line.steps:
            place = self.count - number
            if what == BACK and copy in there:
                take[place] -= self.copies[copy].back_bytes
            else:
                steps.append((place, what, -copy, copy, begins[place]))
        give = line.give[self.count : 0 : -1]
        at_start = 0
        if not fetched:
            steps += [(-1, BACK, rank, copy, 0.0) for rank, copy in enumerate(self.early)]
            at_start = sum(self.copies[copy].back_bytes for copy in self.early)
        for rank, (copy, early, nbytes) in enumerate(_fetched(ahead)):
            place = self.count - min(early, self.count)
            steps.append((place, AHEAD, rank, copy, begins[place]))
            take[place] += nbytes
        of_loss, of_start = after.bytes, before.bytes
        loss, embedding = (self._spare(one.backward_temporary_bytes) for one in (after, before))
        spare = [loss, loss, *line.spare[self.count : 0 : -1], embedding] if self._temporary else []
        if self._splits:
            of_loss += self.gradients.get(self.count + 1, (0, 0))[0] - after.weight_bytes
            of_start -= before.weight_bytes
            if not self._apart:
                of_start += self._waiting
            if spare and not self._apart:
                spare[-1] = min([embedding, *(self._weight_spare[number] for number in self._weighted)])
        return _script(steps, whole, at_start, [0, *take], [of_loss, *give], spare, of_start)


def _with_idle(script: Script, ahead: PartScripts, idle: tuple[int, ...]) -> Script:
    """The same with these copies started at its end."""
    steps = [(0.0, AHEAD, copy) for copy in idle]
    steps[0] = (script.rest, AHEAD, idle[0])
    net = script.net + sum(ahead.copies[copy].back_bytes for copy in idle)
    return script._replace(steps=(*script.steps, *steps), rest=0.0, net=net)


def _fetched(ahead: PartScripts | None) -> list[tuple[int, int, int]]:
    """The copies that start in the pass before: number, operators left in it, bytes."""
    return [] if ahead is None else [(n, ahead.copies[n].early, ahead.copies[n].back_bytes) for n in ahead.early]


def _script(
    steps: list[tuple[int, int, int, int, float]],
    whole: float,
    at_start: int,
    take: Sequence[int],
    give: Sequence[int],
    spare: Sequence[int],
    at_end: int = 0,
) -> Script:
    """Events as (place, what, rank, copy, time); memory taken and given operator by operator, and what is not there of
    the temporaries at the start, at each of them and at the end, if anything."""
    gaps, since = [], 0.0
    whole = exact(whole)
    for _, what, _, copy, moment in sorted(steps):  # at one place: copies out, releases, copies back, waits
        moment = exact(moment)
        gaps.append((moment - since, what, copy))
        since = moment
    taken = accumulate(take, initial=at_start)
    given = accumulate(give, initial=0)
    held = [at_start, *map(sub, islice(taken, 1, None), given)]  # each once it has taken, before it gives
    net = at_start + sum(take) - sum(give) - at_end
    highest = max(*map(sub, held, spare), net + at_end - spare[-1]) if spare else max(*held, net + at_end)
    return Script(tuple(gaps), whole - since, highest, net, whole)


def leaving(group: Group, kind: LayerClass, splits: bool) -> list[tuple[str, int]]:
    """The operators with whose backward bytes of a group leave, and how many; `splits`: a split backward holds what
    gradients of weights are made from, which leaves with these."""
    first = min(group.used_by, key=kind.index.__getitem__)
    others = sum(size for _, size in group.leaves) + group.weight_bytes * splits
    return [(first, group.bytes - others), *group.leaves]


class _Life(NamedTuple):
    """One group of one layer, with places of operators in it, counted from 0."""

    letter: str
    group: Group
    produced: int
    first_use: int
    last_use: int
    needed: int
    leaves: tuple[tuple[int, int], ...]
    """Places with the bytes that leave there once backward has been."""


@lru_cache(maxsize=512)
def _seconds(kind: LayerClass) -> tuple[list[float], list[float]]:
    """Of the operators of a layer, forward and backward."""
    operators = kind.operators
    return [one.forward_seconds for one in operators], [one.backward_seconds for one in operators]


@lru_cache(maxsize=4096)
def _lives(kind: LayerClass, previous: LayerClass | None, letters: str, splits: bool) -> tuple[_Life, ...]:
    """When each group of a layer is made and needed, in forward order of places.

    A group that a second run starts from is needed when that runs, which may be before its own users' backward.
    """
    uses = {group.name: [kind.index[name] for name in group.used_by] for group in kind.groups}
    needed = {name: max(places) for name, places in uses.items()}
    for group, letter in reversed(list(zip(kind.groups, letters, strict=True))):
        for name in group.needs if letter == RECOMPUTE else ():
            needed[name] = max(needed[name], needed[group.name])
    found = []
    for group, letter in zip(kind.groups, letters, strict=True):
        if letter == NOTHING:
            continue
        maker = previous if previous is not None and group.from_previous else kind
        produced = max(maker.index[name] for name in group.operators if name in maker.index)
        first, last = min(uses[group.name]), max(uses[group.name])
        leaves = tuple((kind.index[name], size) for name, size in leaving(group, kind, splits))
        found.append(_Life(letter, group, produced, first, last, needed[group.name], leaves))
    return tuple(found)

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
from mindspeed_mem.adaptive.problem.definition import GB, LayerClass, Problem
from mindspeed_mem.adaptive.search.decisions import StagePlan
from mindspeed_mem.adaptive.search.layer_script import Copy, Move, Row, Setting, exact, of_layers, setting

OUT, RELEASE, BACK, AHEAD, WAIT = range(5)
_Step = tuple[int, int, int, int]
"""How many operators have run (-1: at the very start), what happens then, which of several that is, the copy."""


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


class _Part(NamedTuple):
    """A part, wherever it stands."""

    kinds: tuple[LayerClass, ...]
    """Of its layers."""
    before: Outside
    after: Outside


def scripts_of(problem: Problem, number: int, plan: StagePlan) -> tuple[PartScripts, ...]:
    """Those of each part of a stage: the same objects where a plan is played again, on as many micro-batches or others,
    or on a stage that is like this one."""
    stage, class_of = problem.stages[number], problem.class_of
    parts = tuple(_Part(tuple(class_of[name] for name in one.layers), one.before, one.after) for one in stage.parts)
    return _scripts_of(parts, plan.parts, plan.distance, setting(problem, stage.operator_temporary_bytes))


@lru_cache(maxsize=32)
def _scripts_of(
    parts: tuple[_Part, ...], letters: tuple[tuple[str, ...], ...], distance: int, given: Setting
) -> tuple[PartScripts, ...]:
    return tuple(PartScripts(part, texts, distance, given) for part, texts in zip(parts, letters, strict=True))


class PartScripts:
    """The passes of one part under these actions and this distance."""

    def __init__(self, part: _Part, letters: Sequence[str], distance: int, given: Setting):
        self.part = part
        self.copies: list[Copy] = []
        self._starts: list[tuple[int, int]] = []  # of each copy back: before which operators, counted on, and for which
        self._given = given
        self._tail = int(part.after != Outside())  # the final norm counts as an operator, too
        self.later: list[tuple[int, int]] = []
        """(operator, bytes): what of groups comes back for the gradient of its weight,"""
        self.gradients: dict[int, tuple[int, int]] = {}
        """and of gradients of outputs: by operator the bytes, and the number of the copy out."""
        self.weight_copies: list[Copy] = []
        self.weight_returns: list[int] = []
        """The copies out that these bring back, of gradients of outputs; -1: of a group."""
        self._forward_steps: list[_Step] = []
        self._backward_steps: list[_Step] = []
        layers = of_layers(part.kinds, letters, given)
        self._row = row = Row(part.before, part.after, layers, given)
        self.count = row.bases[-1]
        for number, nbytes in row.gradients:
            self._add_gradient(number, nbytes)
        for base, layer in zip(row.bases, layers, strict=False):
            for move in layer.moves:
                self._add(move, base, distance)
        late = [number for number, copy in enumerate(self.copies) if copy.early]
        self.early = sorted(late, key=lambda number: (-self.copies[number].early, -number))
        """The copies back that may start in the pass before, the first of them first."""
        self._cache: dict[tuple, Script] = {}

    def _add(self, move: Move, base: int, distance: int) -> None:
        number, count, copy = len(self.copies), self.count, move.copy
        saved, needed = base + move.saved, base + move.needed
        due = max(base + move.produced + distance, saved)
        if due > count:  # beyond the last operator: at once if that is the final norm, else once the loss is there
            due = count if due == count + self._tail else count + 1
        self._forward_steps += [(saved, OUT, number, number), (due, RELEASE, number, number)]
        self._row.forward.give[due] += copy.nbytes
        if move.later:
            self.later.append((base + move.last, move.later))
        start = needed + distance
        self._starts.append((start, needed))
        if start > count + self._tail:
            copy = copy._replace(early=start - count - self._tail)
        else:
            start = min(start, count)
            self._backward_steps.append((count - start, BACK, -number, number))
            self._row.backward.take[start] += copy.back_bytes
        self.copies.append(copy)
        self._backward_steps.append((count - needed, WAIT, -number, number))

    def _add_gradient(self, number: int, nbytes: int) -> None:
        """That of the output of operator `number` leaves when its backward has used it, and computation waits for that,
        as far as the window is full."""
        copy = len(self.copies)
        self.copies.append(Copy(nbytes, exact(nbytes / GB / self._given.link.out), 0.0, 0, 0))
        self._starts.append((0, 0))
        place = self.count - number + 1
        self._backward_steps += [(place, OUT, -copy, copy), (place, RELEASE, -copy, copy)]
        self.gradients[number] = nbytes, copy

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
        return [number for number in range(self.count + 1, -1, -1) if self._row.weights[number]]

    @cached_property
    def weights(self) -> Script:
        """The gradients of weights of a pass, where they are a pass of their own."""
        numbers = self._weighted
        if not numbers:
            return Script((), 0.0, 0, -self._row.waiting, 0.0)
        begins = list(accumulate((self._row.weights[number] for number in numbers), initial=0.0))
        steps, sizes = list[_Step](), [0] * (len(numbers) + 1)
        places = {number: place for place, number in enumerate(numbers)}
        returns = [(places[number], nbytes, -1) for number, nbytes in self.later]
        returns += [(places[number], *gradient) for number, gradient in self.gradients.items()]
        for copy, (place, nbytes, out) in enumerate(sorted(returns)):  # each starts when the gradient before is there
            self.weight_returns.append(out)
            self.weight_copies.append(Copy(nbytes, 0.0, exact(nbytes / GB / self._given.link.back), nbytes, 0))
            steps += [(place - 1, BACK, copy, copy), (place, WAIT, copy, copy)]
            sizes[place] += nbytes
        spare = [self._row.weight_spare[number] for number in numbers]
        spare = [spare[0], *spare, spare[-1]]
        return _script(steps, begins, sizes[0], sizes[1:], sizes[:-1], spare, self._row.waiting)

    @cached_property
    def _ends(self) -> list[float]:
        """Seconds of a forward until each operator has run, and the loss is there."""
        ends = list(accumulate(self._row.forward.seconds[1:-1], initial=self.part.before.forward_seconds))
        return [*ends, ends[-1] + self.part.after.forward_seconds]

    @cached_property
    def _begins(self) -> list[float]:
        """Seconds of a backward until that of each operator begins, from the last one back, and until the end."""
        before, after, seconds = self.part.before, self.part.after, self._row.backward.seconds
        loss, end = after.backward_seconds, before.backward_seconds
        if self._given.splits:
            loss, end = loss - after.weight_seconds, end - before.weight_seconds
        begins = list(accumulate(seconds[self.count : 0 : -1], initial=loss + seconds[self.count + 1]))
        whole = begins[-1] + end
        whole += self._row.weight_seconds if self._given.splits and not self._given.apart else 0.0
        return [*begins, whole]

    def _write_forward(self, ahead: PartScripts | None) -> Script:
        """Time and memory run through the part's operators from 1 to count, and on to count + 1, the loss."""
        before, after, line = self.part.before, self.part.after, self._row.forward
        steps = self._forward_steps.copy()
        take = line.take.copy()
        take[self.count + 1] += after.bytes
        for rank, (copy, early, nbytes) in enumerate(_fetched(ahead)):
            number = max(1, self.count + 1 - early)
            steps.append((number - 1, AHEAD, rank, copy))
            take[number] += nbytes
        start, loss = (self._given.spare(one.forward_temporary_bytes) for one in (before, after))
        spare = [start, *line.spare[1 : self.count + 1], loss, loss] if self._given.temporary else ()
        return _script(steps, self._ends, before.bytes, take[1:], line.give[1:], spare)

    def _write_backward(self, ahead: PartScripts | None, fetched: bool, there: tuple[int, ...]) -> Script:
        """From the loss down to operator 1; an event of an operator comes before its backward. Where gradients of
        weights are put off, but are no pass of their own, they come at its end."""
        before, after, line = self.part.before, self.part.after, self._row.backward
        steps = self._backward_steps.copy()
        take = [0, *line.take[self.count : 0 : -1]]
        for step in self._backward_steps if there else ():
            place, what, _, copy = step
            if what == BACK and copy in there:
                take[place + 1] -= self.copies[copy].back_bytes
                steps.remove(step)
        give = line.give[self.count : 0 : -1]
        at_start = 0
        if not fetched:
            steps += [(-1, BACK, rank, copy) for rank, copy in enumerate(self.early)]
            at_start = sum(self.copies[copy].back_bytes for copy in self.early)
        for rank, (copy, early, nbytes) in enumerate(_fetched(ahead)):
            place = self.count - min(early, self.count)
            steps.append((place, AHEAD, rank, copy))
            take[min(place + 1, self.count)] += nbytes  # without layers there is only the loss
        of_loss, of_start = after.bytes, before.bytes
        loss, embedding = (self._given.spare(one.backward_temporary_bytes) for one in (after, before))
        spare = [loss, loss, *line.spare[self.count : 0 : -1], embedding] if self._given.temporary else []
        if self._given.splits:
            of_loss += self.gradients.get(self.count + 1, (0, 0))[0] - after.weight_bytes
            of_start -= before.weight_bytes
            if not self._given.apart:
                of_start += self._row.waiting
            if spare and not self._given.apart:
                spare[-1] = min([embedding, *(self._row.weight_spare[number] for number in self._weighted)])
        return _script(steps, self._begins, at_start, take, [of_loss, *give], spare, of_start)


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
    steps: list[_Step],
    moments: Sequence[float],
    at_start: int,
    take: Sequence[int],
    give: Sequence[int],
    spare: Sequence[int],
    at_end: int = 0,
) -> Script:
    """Memory is taken and given operator by operator; and what is not there of the temporaries at the start, at each of
    them and at the end, if anything.

    moments: seconds until each place of `steps`, the last of which is the end of the pass.
    """
    gaps, since, last = [], 0.0, -1  # -1, the very start, has no moment of its own
    whole = exact(moments[-1])
    for place, what, _, copy in sorted(steps):  # at one place: copies out, releases, copies back, waits
        gap = 0.0
        if place != last:
            moment, last = exact(moments[place]), place
            gap, since = moment - since, moment
        gaps.append((gap, what, copy))
    taken = accumulate(take, initial=at_start)
    given = accumulate(give, initial=0)
    held = [at_start, *map(sub, islice(taken, 1, None), given)]  # each once it has taken, before it gives
    net = at_start + sum(take) - sum(give) - at_end
    highest = max(*map(sub, held, spare), net + at_end - spare[-1]) if spare else max(*held, net + at_end)
    return Script(tuple(gaps), whole - since, highest, net, whole)

"""Improvement of a stage's plan by small changes, all of which are played at once (many.py): this finds what no formula
sees.

A change gives one layer other letters: another one for one group, for a group and what it is made from, or those that
another layer has. Each change is played by itself. Two of them that make room for each other are found by the sums of
what each does alone, and played; and what improves most is put together, as far as there is room by these sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from mindspeed_mem.adaptive.problem.definition import LayerClass, Problem
from mindspeed_mem.adaptive.search.decisions import KEEP, NOTHING, RECOMPUTE, SWAP, StagePlan, is_valid
from mindspeed_mem.adaptive.search.many import letters_of, plan_of

if TYPE_CHECKING:
    from mindspeed_mem.adaptive.search.many import Array, Several

    Play = Callable[[Array, int], Several]
    # plays plans of one distance, given as rows of letters

WORK = 8_000_000
"""Operators played at most: tiny problems are searched through."""
_CHANGES = 400
"""Changes of a plan that are played, those of layers at the ends of a row of equal layers first."""
_PAIRS = 512
"""Pairs of changes of two layers that are played, the most promising,"""
_WITHIN = 128
"""and of one layer."""
_TOGETHER = 16
"""Layers whose changes are put together at most."""
_Score = tuple[int, float]
"""Bytes beyond the limit, then seconds."""


class _Played(NamedTuple):
    """What plans take, a number for each."""

    seconds: Array
    peaks: Array
    on_host: Array


class _Change(NamedTuple):
    """Other letters for one layer."""

    layer: int
    text: str


class _Layer(NamedTuple):
    """A layer of the stage."""

    part: int
    kind: LayerClass
    first: int
    """The place of its first letter in the row of all letters."""


class Descent:
    """Descent on stage ``number``; `work` is what is left of the work allowed."""

    def __init__(
        self,
        problem: Problem,
        number: int,
        inputs_move: bool,
        play: Play,
        distances: Sequence[int],
        work: int = WORK,
        *,
        price: int,
    ):
        """price: operators that are played for one plan."""
        import numpy

        self.problem, self.number, self.inputs_move = problem, number, inputs_move
        self.play, self.distances, self.work, self.price = play, distances, work, price
        self.layers: list[_Layer] = []
        self._ends: list[tuple[int, int]] = []  # of the letters of each part
        self._gradients = [problem.gradients_on_host(number, part) for part in range(problem.virtual_stages)]
        sizes: list[int] = []
        later: list[int] = []
        for part, of_part in enumerate(problem.stages[number].parts):
            start = len(sizes)
            for name in of_part.layers:
                kind = problem.class_of[name]
                self.layers.append(_Layer(part, kind, len(sizes)))
                sizes += [group.bytes for group in kind.groups]
                later += map(problem.on_host, kind.groups)
            self._ends.append((start, len(sizes)))
        self._sizes, self._later = numpy.array(sizes, numpy.int64), numpy.array(later, numpy.int64)

    def run(self, plan: StagePlan, deep: bool = True, within: bool = False) -> StagePlan:
        """A plan that is at least as good, or comes nearer to the limit; unless `deep` one that is quickly found.

        within: two changes of one layer are tried as well.
        """
        row, distance = letters_of([plan])[0], plan.distance
        self.work -= self.price  # it is played with the first changes to it
        while self.work > 0:
            found = self._step(row, distance, deep, within)
            if found is None:
                break
            _, row, distance = found
        return plan_of(self.problem, self.number, row, distance)

    def _step(self, row: Array, distance: int, deep: bool, within: bool) -> tuple[_Score, Array, int] | None:
        """The best that is near and better; None if nothing is."""
        import numpy

        changes = self._changes(row)
        if not changes:
            return None
        rows = self._changed(row, changes)
        singles = self._played(numpy.concatenate([row[None], rows]), distance)
        [score] = self._scores(_Played(*(one[:1] for one in singles)))
        best = self._best(score, rows, _Played(*(one[1:] for one in singles)), distance)
        sums = self._sums(row, rows, changes, singles, within)
        if len(sums):
            best = self._best(score if best is None else best[0], sums, self._played(sums, distance), distance) or best
        if best is None or not deep:
            for other in self._others(distance):
                if self.work <= 0:
                    break
                found = self._best(score, row[None], self._played(row[None], other), other)
                if found is not None and (best is None or found[0] < best[0]):
                    best = found
        if best is None and deep:
            for other in self._others(distance):
                best = self._best(score, rows, self._played(rows, other), other)
                if best is not None or self.work <= 0:
                    break
        return best

    def _others(self, distance: int) -> list[int]:
        near = {distance + step for step in (-2, -1, 1, 2)} if len(self.distances) > 1 else set()
        return sorted({one for one in near | set(self.distances) if one > 0} - {distance})

    def _sums(self, row: Array, rows: Array, changes: Sequence[_Change], played: _Played, within: bool) -> Array:
        """Rows with two changes, and with several, that promise most by the sums of what each of them does.

        rows, played: of each of the changes; played: of ``row`` before them. within: two of one layer as well.
        """
        import numpy

        more, nbytes, moved = (one[1:] - one[0] for one in played)
        room = self.problem.device_limit - int(played.peaks[0])
        host = self.problem.host_limit
        one, two = numpy.triu_indices(len(changes), 1)
        layers = numpy.array([change.layer for change in changes])
        differs = rows != row
        fine = layers[one] != layers[two]
        if within:
            as_numbers = differs.astype(numpy.float32)
            fine |= (as_numbers @ as_numbers.T)[one, two] == 0
        if host is not None:
            fine &= moved[one] + moved[two] <= max(0, host - int(played.on_host[0]))
        one, two = one[fine], two[fine]
        size, seconds = nbytes[one] + nbytes[two], more[one] + more[two]
        order = numpy.lexsort((seconds, numpy.maximum(size - room, 0)))
        found: list[Array] = []
        pairs: list[list[int]] = []
        left = [self._most(_PAIRS), self._most(_WITHIN) if within else 0]  # of two layers, of one
        for place in order:
            pair = [int(one[place]), int(two[place])]
            same = bool(layers[pair[0]] == layers[pair[1]])
            if not left[same]:
                continue
            both = numpy.where(differs[pair[0]], rows[pair[0]], rows[pair[1]])
            if same and not self._may_be(both, changes[pair[0]].layer):
                continue
            left[same] -= 1
            found.append(both)
            pairs.append(pair)
            if left == [0, 0]:
                break
        together, used, total, joined = row, set[int](), 0, 0
        for pair in pairs:  # the best of these, one after the other, as long as there is room
            mine = {changes[number].layer for number in pair}
            size = int(nbytes[pair].sum())
            if mine & used or more[pair].sum() >= 0 or total + size > room:
                continue
            total, used, joined = total + size, used | mine, joined + 1
            for number in pair:
                together = numpy.where(differs[number], rows[number], together)
            if joined > 1:
                found.append(together)
            if len(used) >= _TOGETHER:
                break
        return numpy.array(found).reshape(-1, len(row))

    def _may_be(self, row: Array, layer: int) -> bool:
        """Whether the letters of this layer can be carried out."""
        one = self.layers[layer]
        text = row[one.first : one.first + len(one.kind.groups)].tobytes().decode()
        return is_valid(one.kind, text, self.inputs_move)

    def _best(self, score: _Score, rows: Array, played: _Played, distance: int) -> tuple[_Score, Array, int] | None:
        """The best of these that is better than `score`; the first of equals."""
        scores = self._scores(played)
        place = min(range(len(scores)), key=lambda place: (scores[place], place), default=None)
        if place is None or scores[place] >= score:
            return None
        return scores[place], rows[place], distance

    def _scores(self, played: _Played) -> list[_Score]:
        limit, host = self.problem.device_limit, self.problem.host_limit
        rows = zip(*(one.tolist() for one in played), strict=True)
        return [
            (max(0, peak - limit) + (0 if host is None else max(0, moved - host)), round(seconds, 9))
            for seconds, peak, moved in rows
        ]

    def _played(self, rows: Array, distance: int) -> _Played:
        self.work -= self.price * len(rows)
        played = self.play(rows, distance)
        return _Played(played.seconds, played.peaks, self._on_host(rows))

    def _changed(self, row: Array, changes: Sequence[_Change]) -> Array:
        """A row for each of these."""
        import numpy

        rows = numpy.repeat(row[None], len(changes), axis=0)
        for mine, change in zip(rows, changes, strict=True):
            first = self.layers[change.layer].first
            mine[first : first + len(change.text)] = numpy.frombuffer(change.text.encode(), numpy.uint8)
        return rows

    def _changes(self, row: Array) -> list[_Change]:
        """The changes of all layers, of many only those at the ends of a row of equal layers and half-way."""
        whole = row.tobytes().decode()
        texts = [whole[one.first : one.first + len(one.kind.groups)] for one in self.layers]
        seen: dict[LayerClass, dict[str, None]] = {}
        for one, text in zip(self.layers, texts, strict=True):
            if NOTHING not in text:
                seen.setdefault(one.kind, {})[text] = None
        found: list[list[_Change]] = []
        for number, (one, text) in enumerate(zip(self.layers, texts, strict=True)):
            others = dict.fromkeys(_near(one.kind, text, self.inputs_move))
            if NOTHING not in text:
                others |= seen[one.kind]
            found.append([_Change(number, other) for other in others if other != text])
        if sum(map(len, found)) > _CHANGES:
            keep = _ends(self.layers, texts)
            found = [changes if number in keep else [] for number, changes in enumerate(found)]
        changes = list(itertools.chain.from_iterable(found))
        most = self._most(_CHANGES)
        return [changes[place * len(changes) // most] for place in range(most)] if len(changes) > most else changes

    def _most(self, most: int) -> int:
        """As many plans as may be played, or as there is work left for."""
        return max(1, min(most, self.work // self.price))

    def _on_host(self, rows: Array) -> Array:
        """The most bytes that each plan has on the host; 0 where the host has no limit."""
        import numpy

        if self.problem.host_limit is None:
            return numpy.zeros(len(rows), numpy.int64)
        swapped = rows == ord(SWAP)
        whole = (self._sizes, self._later)  # until the backward, and until gradients of weights
        parts = [swapped[:, first:end] @ sizes[first:end] for sizes in whole for first, end in self._ends]
        parts += self._gradients
        flights = [(*held, *waits, *waits) for held, waits in self.problem.whole[self.number].held]
        sums = [sum(n * size for n, size in zip(held, parts, strict=True)) for held in flights]
        return numpy.max(sums, axis=0)


def _ends(layers: Sequence[_Layer], texts: Sequence[str]) -> set[int]:
    """The first, the last and the middle layer of each row of equal ones."""
    found: set[int] = set()
    for _, row in itertools.groupby(range(len(layers)), key=lambda n: (layers[n].part, layers[n].kind.name, texts[n])):
        numbers = list(row)
        found |= {numbers[0], numbers[len(numbers) // 2], numbers[-1]}
    return found


@lru_cache(maxsize=4096)
def _near(kind: LayerClass, text: str, inputs_move: bool) -> tuple[str, ...]:
    """The letters of a layer with one changed, and with two where a group and one that it is made from change."""
    found = []

    def changed(old: str, place: int) -> Iterator[str]:
        for letter in (KEEP, SWAP, RECOMPUTE):
            if old[place] not in (letter, NOTHING):
                yield old[:place] + letter + old[place + 1 :]

    for place, group in enumerate(kind.groups):
        for one in changed(text, place):
            found.append(one)
            for name in group.needs:
                found += changed(one, kind.group_index[name])
    return tuple(one for one in dict.fromkeys(found) if is_valid(kind, one, inputs_move))

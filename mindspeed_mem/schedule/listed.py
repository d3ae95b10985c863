"""Orders found by simulation, with virtual stages under a tight cap or with a split backward: what can run runs, as
some simple rules say.

[Note: the rules] Time passes in whole units, a forward taking 1 and a backward 2, on equal stages. A stage that is free
takes a backward, or if the rule says so a forward, of the latest chunk that has one to run, and idles where nothing
can. A forward leaves room under the cap for the chunks after it, so that some micro-batch can always come to its end;
a rule may also bound how many micro-batches have begun on a stage. There is no best rule: all are tried and the
fastest order is taken, the first of equals. On every chunk micro-batches keep their order. Nothing but the sizes
decides, and only whole numbers are compared: all ranks find the same order.

[Note: a split backward] The backward takes 1, for the gradients of activations, and the gradients of weights another 1,
in a pass that any time after it will do: there it fills what would be idle time. What it needs is in flight until then.
A stage that has nothing else to run takes such a pass; a rule may also have it come before forwards. Of orders that are
equally fast the one whose stages hold least is taken. Parts in a V (placement.py) are played by the same rules: with as
much memory as 1F1B's first stage needs, stages wait for nothing but the first forward; with half of it they idle about
a sixth of the time (8 stages, 32 micro-batches), where zero bubble without virtual stages idles more than a third.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator, Mapping, Sequence

from mindspeed_mem.passes import BACKWARD, FORWARD, WEIGHT, Pass
from mindspeed_mem.schedule.placement import Placement

FORWARD_TIME, BACKWARD_TIME = 1, 2
_TIMES = {FORWARD: FORWARD_TIME, BACKWARD: BACKWARD_TIME}
_SPLIT_TIMES = {FORWARD: 1, BACKWARD: 1, WEIGHT: 1}
_BOUNDS = 12  # so many equal bounds are tried at most: more of them find little
_PASSES = 200_000  # and no more rules than come to so many passes, in well under ten seconds


@functools.lru_cache(maxsize=64)
def faster(stages: int, virtual_stages: int, micro_batches: int, cap: int, time: int) -> list[list[Pass]] | None:
    """The fastest order found that takes less than `time`, by these rules' own times; None: there is none.

    Args:
        cap: bounds how many passes of a stage are in flight.
    """
    best = None
    for bounds in _bounds(stages, virtual_stages, micro_batches, cap):
        for ways in ((BACKWARD, FORWARD), (FORWARD, BACKWARD)):
            found = _Play(Placement(stages, virtual_stages), micro_batches, cap, bounds, ways, _TIMES).run(time)
            if found is not None:
                time, best = found
    return best


@functools.lru_cache(maxsize=64)
def split(placement: Placement, micro_batches: int, cap: int) -> list[list[Pass]]:
    """The fastest order found with a split backward.

    Args:
        placement: where the parts lie.
        cap: bounds how many passes of a stage are in flight, from the forward until the gradients of weights.
    """
    stages = placement.stages
    passes = placement.parts * micro_batches * len(_SPLIT_TIMES)  # also the time of one after the other
    least = passes // stages + stages - 1  # the last stage waits for the first forward to reach it
    best: tuple[int, int, list[list[Pass]]] | None = None
    for bounds in _bounds(stages, placement.virtual_stages, micro_batches, cap):
        if best is not None and best[0] == least and passes > _PASSES:
            break  # too many to look for an order that holds less as well
        for ways in ((BACKWARD, FORWARD, WEIGHT), (FORWARD, BACKWARD, WEIGHT), (BACKWARD, WEIGHT, FORWARD)):
            play = _Play(placement, micro_batches, cap, bounds, ways, _SPLIT_TIMES)
            found = play.run((best[0] if best else passes) + 1)
            if found is not None and (best is None or (found[0], play.held) < best[:2]):
                best = found[0], play.held, found[1]
    assert best is not None  # a micro-batch can always come to its end
    return best[2]


def shortest(stages: int, virtual_stages: int, micro_batches: int) -> int:
    """A time below which no order is: the last stage waits for the first forward, the first for the last backward."""
    return (virtual_stages * micro_batches + stages - 1) * sum(_TIMES.values())


def _bounds(stages: int, virtual_stages: int, micro_batches: int, cap: int) -> Iterator[Sequence[int]]:
    """For each rule, how many micro-batches may have begun on each stage."""
    most = min(micro_batches, cap - virtual_stages + 1)  # what the room for later chunks leaves
    yield [most] * stages
    for slope in (1, 2):
        yield [max(1, slope * (stages - stage)) for stage in range(stages)]
    passes = len(_TIMES) * stages * virtual_stages * micro_batches
    step = -(-most // max(1, min(_BOUNDS, _PASSES // passes)))
    for bound in range(most - step, 0, -step):
        yield [bound] * stages


class _Play:
    """One simulation, with one rule."""

    def __init__(
        self,
        placement: Placement,
        micro_batches: int,
        cap: int,
        bounds: Sequence[int],
        ways: Sequence[str],
        times: Mapping[str, int],
    ) -> None:
        """``ways``: the kinds of passes, those before others that are taken before them; ``times``: what each takes."""
        self._placement, self._number, self._cap = placement, micro_batches, cap
        stages = placement.stages
        self._bounds, self._ways, self._times = bounds, ways, times
        self._frees = WEIGHT if WEIGHT in times else BACKWARD
        # For each part of the model and direction, when each of its passes ended; passes are taken in order.
        self._ended: dict[str, list[list[int]]] = {way: [[] for _ in range(placement.parts)] for way in times}
        self._held, self._free, self._most = [0] * stages, [0] * stages, [0] * stages
        self._orders: list[list[Pass]] = [[] for _ in range(stages)]

    @property
    def held(self) -> int:
        """The most passes that were in flight on each stage, in all."""
        return sum(self._most)

    def run(self, limit: int) -> tuple[int, list[list[Pass]]] | None:
        """The time and the order; None if that is no less than `limit`, or the rule comes to no end."""
        events = [(0, stage) for stage in range(self._placement.stages)]
        left = self._placement.stages * self._placement.virtual_stages * self._number * len(self._times)
        while events:
            now = events[0][0]
            touched = set()
            while events and events[0][0] == now:
                _, stage = heapq.heappop(events)
                touched |= {stage, (stage + 1) % self._placement.stages, (stage - 1) % self._placement.stages}
            for stage in touched:  # each looks at what ended by now, so their sequence does not matter
                choice = self._choice(stage, now) if self._free[stage] <= now else None
                if choice is not None:
                    end = self._take(stage, *choice, now)
                    if end >= limit:
                        return None
                    heapq.heappush(events, (end, stage))
                    left -= 1
        return None if left else (max(self._free), self._orders)

    def _choice(self, stage: int, now: int) -> tuple[str, int] | None:
        for way in self._ways:
            for chunk in range(self._placement.virtual_stages - 1, -1, -1):
                if self._can_run(way, stage, chunk, now):
                    return way, chunk
        return None

    def _can_run(self, way: str, stage: int, chunk: int, now: int) -> bool:
        part = self._placement.part(stage, chunk)
        forwards, backwards = self._ended[FORWARD], self._ended[BACKWARD]
        number = len(self._ended[way][part])
        if number == self._number:
            return False
        if way == BACKWARD:
            last = part == len(forwards) - 1
            return _by(forwards[part], number, now) and (last or _by(backwards[part + 1], number, now))
        if way == WEIGHT:
            return _by(backwards[part], number, now)
        if self._held[stage] + self._placement.virtual_stages - chunk > self._cap:
            return False
        if not chunk and number - len(backwards[part]) >= self._bounds[stage]:
            return False
        return part == 0 or _by(forwards[part - 1], number, now)

    def _take(self, stage: int, way: str, chunk: int, now: int) -> int:
        ended = self._ended[way][self._placement.part(stage, chunk)]
        self._orders[stage].append((way, len(ended), chunk))
        ended.append(now + self._times[way])
        self._free[stage] = ended[-1]
        self._held[stage] += (way == FORWARD) - (way == self._frees)  # a stage looks at it again when this has ended
        self._most[stage] = max(self._most[stage], self._held[stage])
        return ended[-1]


def _by(ended: list[int], number: int, now: int) -> bool:
    """Whether the pass of this micro-batch has ended."""
    return number < len(ended) and ended[number] <= now

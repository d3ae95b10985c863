"""How large chunks should be: ColossalAI's search for equal-size chunks, and ours for Megatron's buckets.

`search_chunk_size` repeats what ColossalAI's Gemini decides. Its waste is that of its own estimate, which leaves out
the largest parameters; what is really wasted can be many times as much, and the layout built says so.
`search_bucket_size` scores the buckets that are really built, which end where parameters end.

Both look at every candidate, but build a layout once for all neighbouring candidates that lead to the same one. All
numbers are elements.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from mindspeed_mem.zero.layout.cutting import (
    Cut,
    bucket_multiple,
    check,
    first_fit,
    reaching_target,
    refuse,
    round_up,
)

MOST_WASTE = 0.001
"""Share of what is held that padding may be, as long as there is a target with which it is less."""


@dataclass(frozen=True)
class ChunkSize:
    """An equal chunk size."""

    chunk_elements: int
    """Divisible by the world size."""
    reported_waste_elements: int
    """As ColossalAI counts it: padding if there were only the parameters that it scores, before rounding."""
    scored_elements: int
    """Of those parameters."""
    total_elements: int
    """Of all parameters."""

    @property
    def reported_waste_fraction(self) -> float:
        return self.reported_waste_elements / max(1, self.total_elements + self.reported_waste_elements)


@dataclass(frozen=True)
class BucketSize:
    """A target size of Megatron's buckets, and what is built with it."""

    target_elements: int
    """For DistributedDataParallelConfig's `bucket_size`."""
    waste_elements: int
    held_elements: int
    largest_elements: int
    count: int

    @property
    def waste_fraction(self) -> float:
        """Of what is held."""
        return self.waste_elements / max(1, self.held_elements)


def search_chunk_size(
    sizes: Sequence[int],
    world_size: int,
    *,
    range_elements: int,
    minimum_elements: int,
    step_elements: int,
    start_on_step: bool = True,
) -> ChunkSize:
    """The equal chunk size that ColossalAI 0.5.0 chooses (colossalai/zero/gemini/chunk/search_utils.py).

    sizes: elements of the parameters, in the order in which chunks are filled. Candidates are `range_elements` from
    the minimum, or the largest scored parameter if that is larger, in steps of `step_elements`, of which the first is
    a multiple. Parameters above the mean plus three standard deviations are not scored. The first candidate with the
    least padding wins and is rounded up to the world size. All parameters together below the minimum: one chunk.

    ColossalAI 0.1.10's search is ``start_on_step=False`` with a world size of 1 and a step of range / grids: it
    maximises the share that the scored parameters use of what they hold, which is the same as least padding.

    Raises ValueError with all that is wrong with the arguments.
    """
    _check(sizes, world_size, range_elements, minimum_elements, step_elements)
    total = sum(sizes)
    if total < minimum_elements:
        return ChunkSize(round_up(max(1, total), world_size), 0, total, total)
    limit = statistics.fmean(sizes) + 3 * statistics.pstdev(sizes)
    scored = [size for size in sizes if size <= limit]
    start = max(minimum_elements, 1, *scored)
    start = round_up(start, step_elements) if start_on_step else start
    candidates = range(start, start + range_elements + 1, step_elements)

    def cut(chunk: int) -> tuple[list[Cut], int | None]:
        spans = first_fit(scored, chunk, 1)
        return spans, min((one.filled + scored[one.stop] for one in spans[:-1]), default=None)

    held, chunk = min((sum(one.capacity for one in spans), size) for size, spans in _distinct(candidates, cut))
    return ChunkSize(round_up(chunk, world_size), held - sum(scored), sum(scored), total)


def search_bucket_size(
    sizes: Sequence[int],
    world_size: int,
    *,
    range_elements: int,
    minimum_elements: int,
    step_elements: int,
    alone: Collection[int] = (),
    most_waste: float = MOST_WASTE,
    high_bandwidth_padding: bool = False,
) -> BucketSize:
    """The target size of Megatron's buckets (`megatron_buckets`) whose largest bucket is smallest.

    sizes: elements of one buffer's parameters in the order of `parameters()`; alone: places in it of those that share
    no bucket. Candidates are `range_elements` from the minimum, in multiples of `step_elements`. Only those count whose
    buckets are padding for less than `most_waste`, or if there are none, those with the least. Of equals the one with
    fewest buckets is taken, then the one with least padding, then the smallest. All parameters together below the
    minimum: one bucket, save those alone.

    Raises ValueError with all that is wrong with the arguments.
    """
    outside = sorted(place for place in alone if place not in range(len(sizes)))
    wrong = [f"alone names places {outside}, of {len(sizes)} parameters"] * bool(outside)
    wrong += [] if most_waste > 0 else [f"most_waste is a number above 0, not {most_waste!r}"]
    _check(sizes, world_size, range_elements, minimum_elements, step_elements, wrong)
    backward = sizes[::-1]
    apart = {len(sizes) - 1 - place for place in alone}
    multiple = bucket_multiple(world_size, high_bandwidth_padding)
    start = round_up(max(1, minimum_elements), step_elements)
    candidates = range(start, start + range_elements + 1, step_elements)
    if sum(sizes) < minimum_elements:
        whole = reaching_target(backward, None, multiple, apart)
        never = max(minimum_elements, 1 + max(one.filled for one in whole))
        return _rated(never, whole, sum(sizes))

    def cut(target: int) -> tuple[list[Cut], int | None]:
        spans = reaching_target(backward, target, multiple, apart)
        reached = min((one.filled for one in spans if one.filled >= target), default=None)
        return spans, None if reached is None else reached + 1

    def preference(one: BucketSize) -> tuple:
        excess = one.waste_fraction if one.waste_fraction >= most_waste else 0.0
        return excess, one.largest_elements, one.count, one.waste_elements, one.target_elements

    return min((_rated(target, spans, sum(sizes)) for target, spans in _distinct(candidates, cut)), key=preference)


def _distinct(candidates: range, cut: Callable[[int], tuple[list[Cut], int | None]]) -> Iterator[tuple[int, list[Cut]]]:
    """The first of each run of candidates with the same cuts, and these. `cut` returns them and the next larger size
    that may lead to others, or None if no larger one does."""
    size = candidates.start
    while size in candidates:
        spans, changes_at = cut(size)
        yield size, spans
        if changes_at is None:
            return
        size = candidates.start + round_up(changes_at - candidates.start, candidates.step)


def _rated(target: int, spans: list[Cut], used: int) -> BucketSize:
    capacities = [one.capacity for one in spans]
    return BucketSize(target, sum(capacities) - used, sum(capacities), max(capacities), len(capacities))


def _check(sizes: Sequence[int], world_size: int, span: int, minimum: int, step: int, more: Sequence[str] = ()) -> None:
    numbers = {"range_elements": (span, 0), "minimum_elements": (minimum, 0), "step_elements": (step, 1)}
    refuse([*check(sizes, world_size, **numbers), *more])

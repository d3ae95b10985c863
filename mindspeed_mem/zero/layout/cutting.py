"""Which parameters lie in which chunk, and where: equal-size chunks, and the buckets that Megatron-core makes.

A layout says what is really built, padding and oversize chunks included. Chunks of equal size, filled in order, waste
what the next parameter does not fit into. Megatron's buckets end where they have reached a target size, so that they
waste alignment only. Sizes are in elements, whatever their type.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALIGNMENT = 64
"""Elements to which Megatron-core 0.16.1 aligns the start of each parameter: 128 bytes in bf16."""
_BUCKET_MULTIPLE = 128  # elements; 256 bytes in bf16
_HIGH_BANDWIDTH_MULTIPLE = 2**16


@dataclass(frozen=True)
class ParameterSize:
    """A parameter as far as a layout needs to know it."""

    name: str
    elements: int
    own_chunk: bool = False
    """Shares no bucket: Megatron's `shared_embedding`, an embedding tied over pipeline stages."""


@dataclass(frozen=True)
class ParameterPlace:
    """A parameter's place in its chunk."""

    name: str
    elements: int
    offset: int
    """Elements from the start of the chunk."""


@dataclass(frozen=True)
class ChunkContents:
    """One contiguous piece of memory, of which each data-parallel rank owns an equal part, and what lies in it."""

    capacity: int
    """Elements, over all ranks."""
    parameters: tuple[ParameterPlace, ...]

    @property
    def used(self) -> int:
        """Elements that are parameters."""
        return sum(one.elements for one in self.parameters)

    @property
    def waste(self) -> int:
        """Elements of padding: at the end, and where parameters are aligned also between them."""
        return self.capacity - self.used


@dataclass(frozen=True)
class Layout:
    """All chunks, in the order in which they were filled."""

    chunks: tuple[ChunkContents, ...]

    @property
    def held_elements(self) -> int:
        """Parameters and padding."""
        return sum(chunk.capacity for chunk in self.chunks)

    @property
    def waste_elements(self) -> int:
        return sum(chunk.waste for chunk in self.chunks)

    @property
    def waste_fraction(self) -> float:
        """Of what is held."""
        return self.waste_elements / max(1, self.held_elements)

    @property
    def count(self) -> int:
        return len(self.chunks)

    @property
    def largest(self) -> int:
        """Elements of the largest chunk."""
        return max(chunk.capacity for chunk in self.chunks)


class Cut(NamedTuple):
    """A chunk as a range of places in a list of sizes."""

    start: int
    stop: int
    filled: int
    """Elements up to the end of its last parameter, alignment between parameters included."""
    capacity: int


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def equal_chunks(parameters: Sequence[ParameterSize], chunk_elements: int, world_size: int) -> Layout:
    """Chunks of `chunk_elements`, filled first fit in the order given; `own_chunk` has no meaning here.

    A parameter larger than a chunk gets one of its own size, rounded up to the world size, and closes the open one.
    Raises ValueError if the world size does not divide `chunk_elements`, and as `check` does.
    """
    wrong = check(sizes_of(parameters), world_size, chunk_elements=(chunk_elements, 1))
    if not wrong and chunk_elements % world_size:
        wrong = [f"a chunk of {chunk_elements} elements cannot be divided by {world_size} ranks"]
    refuse(wrong)
    spans = first_fit(sizes_of(parameters), chunk_elements, world_size)
    return Layout(tuple(_placed(parameters[span.start : span.stop], span.capacity, 1) for span in spans))


def megatron_buckets(
    parameters: Sequence[ParameterSize],
    target_elements: int | None,
    world_size: int,
    *,
    high_bandwidth_padding: bool = False,
) -> Layout:
    """The buckets into which Megatron-core's distributed optimizer cuts one buffer, in their order.

    parameters: those of one buffer (one type) in the order of `parameters()`; buckets take them from the last to the
    first. target_elements: DistributedDataParallelConfig's `bucket_size` where it acts (with overlap_grad_reduce); a
    bucket ends with the parameter that reaches it. None: one bucket. high_bandwidth_padding: the config's
    `pad_buckets_for_high_nccl_busbw`. The rule is that of `_ParamAndGradBuffer` in megatron-core 0.16.1
    (megatron/core/distributed/param_and_grad_buffer.py); a test compares the two. Raises ValueError as `check` does.
    """
    backward = list(parameters)[::-1]
    sizes = sizes_of(backward)
    refuse(check(sizes, world_size, **({} if target_elements is None else {"target_elements": (target_elements, 1)})))
    alone = {place for place, one in enumerate(backward) if one.own_chunk}
    spans = reaching_target(sizes, target_elements, bucket_multiple(world_size, high_bandwidth_padding), alone)
    return Layout(tuple(_placed(backward[span.start : span.stop], span.capacity, ALIGNMENT) for span in spans))


def bucket_multiple(world_size: int, high_bandwidth_padding: bool = False) -> int:
    """What Megatron rounds the size of a bucket up to, in elements."""
    return math.lcm(world_size, _HIGH_BANDWIDTH_MULTIPLE if high_bandwidth_padding else _BUCKET_MULTIPLE)


def first_fit(sizes: Sequence[int], chunk_elements: int, world_size: int) -> list[Cut]:
    """`equal_chunks` over sizes alone, without checks."""
    spans: list[Cut] = []
    start = filled = capacity = 0
    for place, size in enumerate(sizes):
        if place and filled + size <= capacity:
            filled += size
            continue
        if place:
            spans.append(Cut(start, place, filled, capacity))
        start, filled = place, size
        capacity = chunk_elements if size <= chunk_elements else round_up(size, world_size)
    return [*spans, Cut(start, len(sizes), filled, capacity)]


def reaching_target(sizes: Sequence[int], target: int | None, multiple: int, alone: Collection[int] = ()) -> list[Cut]:
    """`megatron_buckets` over sizes in the buckets' own order, without checks; `alone`: places of own buckets."""
    spans: list[Cut] = []
    start = filled = 0

    def close(stop: int) -> None:
        nonlocal start, filled
        spans.append(Cut(start, stop, filled, round_up(filled, multiple)))
        start, filled = stop, 0

    for place, size in enumerate(sizes):
        filled = round_up(filled, ALIGNMENT)
        if place in alone and place > start:
            close(place)
        filled += size
        if place in alone or (target is not None and filled >= target):
            close(place + 1)
    if start < len(sizes):
        close(len(sizes))
    return spans


def sizes_of(parameters: Sequence[ParameterSize]) -> list[int]:
    return [one.elements for one in parameters]


def check(sizes: Sequence[int], world_size: int, **numbers: tuple[int, int]) -> list[str]:
    """What is wrong with these arguments; `numbers` are named ones, each with the least that is allowed."""
    wrong = [] if sizes else ["there are no parameters"]
    bad = [size for size in sizes if not _whole(size, 0)]
    if bad:
        wrong.append(f"sizes of parameters are whole numbers of at least 0, not {', '.join(map(repr, bad))}")
    for name, (number, least) in {"world_size": (world_size, 1), **numbers}.items():
        if not _whole(number, least):
            wrong.append(f"{name} is a whole number of at least {least}, not {number!r}")
    return wrong


def refuse(wrong: list[str]) -> None:
    """Raise ValueError with all these reasons, if there are any."""
    if wrong:
        raise ValueError("; ".join(wrong))


def _whole(number: object, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def _placed(parameters: Sequence[ParameterSize], capacity: int, alignment: int) -> ChunkContents:
    places, end = [], 0
    for one in parameters:
        offset = round_up(end, alignment)
        places.append(ParameterPlace(one.name, one.elements, offset))
        end = offset + one.elements
    return ChunkContents(capacity, tuple(places))

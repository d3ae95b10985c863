"""Which rank updates which elements of which parameter: pure arithmetic, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MODES = ("grouping", "sharding")

ALIGNMENT = 64
"""Slices start at multiples of this many elements. CPU kernels treat the last elements of a tensor, fewer than two
vectors, in another loop, which rounds 16-bit types (and fused SGD) differently; 64 is a multiple of two vectors for
all types and instruction sets, so that an element is in that loop with slices exactly if it is without."""


class Size(NamedTuple):
    """What has to be known of a parameter."""

    elements: int
    itemsize: int
    """Bytes of one."""
    divisible: bool = True
    """Whether it can be cut in memory order."""


class Assignment:
    """Gives parameters to ranks, one call after another; later calls take into account what ranks have already.

    ``grouping``: whole parameters, the longest first to the rank with the least so far (Graham's LPT rule, at most
    4/3 of the optimum). ``sharding``: equal slices of each parameter in rank order, the last ones shorter or empty.
    """

    def __init__(self, mode: str, ranks: int) -> None:
        self.mode = mode
        self.loads = [0] * ranks
        """Bytes of parameters that each rank updates."""

    def assign(self, sizes: Sequence[Size]) -> list[tuple[range, ...]]:
        """For each parameter the elements, counted in memory order, that each rank updates; empty: none."""
        ranks = len(self.loads)
        found: list[tuple[range, ...]] = [()] * len(sizes)
        whole = list(range(len(sizes)))
        if self.mode == "sharding":
            whole = [index for index, size in enumerate(sizes) if not size.divisible]
            for index, size in enumerate(sizes):
                if size.divisible:
                    found[index] = slices(size.elements, ranks)
                    for rank, own in enumerate(found[index]):
                        self.loads[rank] += len(own) * size.itemsize
        for index in sorted(whole, key=lambda i: -sizes[i].elements * sizes[i].itemsize):  # stable: ties stay in order
            count = sizes[index].elements
            owner = self.loads.index(min(self.loads))
            self.loads[owner] += count * sizes[index].itemsize
            found[index] = tuple(range(count if rank == owner else 0) for rank in range(ranks))
        return found

    def balance(self) -> float:
        """The largest load over the mean: 1 is perfect."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0


def slices(count: int, ranks: int) -> tuple[range, ...]:
    """`count` elements for `ranks` ranks in slices of equal length, but for what is left at the end."""
    length = -(-count // ranks)
    length = -(-length // ALIGNMENT) * ALIGNMENT
    return tuple(range(min(rank * length, count), min((rank + 1) * length, count)) for rank in range(ranks))

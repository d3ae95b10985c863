"""Pipelines whose first and last stage have layers of their own number, as the embedding, the head and what a stage
holds in flight are not alike.

Megatron has two spellings. With ``--decoder-first-pipeline-num-layers`` and ``--decoder-last-pipeline-num-layers``
these stages, and those between them, divide their layers evenly over their virtual stages; with
``--account-for-embedding-in-pipeline-split`` and ``--account-for-loss-in-pipeline-split`` embedding and loss count as
a layer, so that the first part and the last are one layer shorter. Which it is follows from the two numbers.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

_MOST = 3
"""Splits of one pipeline of so many virtual stages that are tried: those with the lightest stages, and of these the
ones that hold less."""
_COUNTED = ((0, 1), (1, 0), (1, 1))
"""Whether the embedding counts as a layer, and whether the loss does."""


class Ends(NamedTuple):
    """Layers of the first stage and of the last; 0 and 0: as many as all others have."""

    first: int = 0
    last: int = 0


EVEN = Ends()


def parts(layers: int, pipeline: int, virtual: int, ends: Ends) -> tuple[int, ...]:
    """The layers of each part, in the model's order: the first of all stages, then the second of all.

    Raises:
        ValueError: Megatron does not split so.
    """
    counts = by_stage(layers, pipeline, virtual, ends)
    for embedding, loss in _COUNTED:
        counts = counts or _by_part(layers, pipeline, virtual, ends, embedding, loss)
    if not counts:
        rest = "" if pipeline == 2 else f", the rest evenly over the {pipeline - 2} between"
        raise ValueError(
            f"{layers} layers on {pipeline} pipeline stages of {virtual} parts cannot have {ends.first} on the first "
            f"and {ends.last} on the last{rest}"
        )
    return counts


def words(layers: int, pipeline: int, virtual: int, ends: Ends) -> list[str]:
    """The same in Megatron's options, with the number of virtual stages."""
    found = ["--num-virtual-stages-per-pipeline-rank", str(virtual)] if virtual > 1 else []
    if by_stage(layers, pipeline, virtual, ends):
        # of two stages the first is enough, and with virtual stages megatron-core fails on both
        others = (layers - sum(ends)) // (pipeline - 2) if pipeline > 2 else ends.last
        if ends.first != others:
            found += ["--decoder-first-pipeline-num-layers", str(ends.first)]
        if ends.last != others:
            found += ["--decoder-last-pipeline-num-layers", str(ends.last)]
        return found
    counts = parts(layers, pipeline, virtual, ends)
    found += ["--account-for-embedding-in-pipeline-split"] * (counts[0] < max(counts))
    return found + ["--account-for-loss-in-pipeline-split"] * (counts[-1] < max(counts))


def counted(layers: int, pipeline: int, virtual: int, embedding: bool, loss: bool) -> tuple[int, ...]:
    """The layers of each part where embedding or loss count as one; empty where Megatron does not split so."""
    each = (layers + embedding + loss) // pipeline
    return _by_part(layers, pipeline, virtual, Ends(each - embedding, each - loss), int(embedding), int(loss))


@lru_cache(maxsize=4096)
def choices(layers: int, pipeline: int, virtual: int, head: float, fixed: Ends = EVEN) -> tuple[Ends, ...]:
    """What is worth to be tried of one pipeline: all alike where that divides, and what leaves less on the stage that
    has most to do.

    Args:
        layers: of the decoder.
        pipeline: stages.
        virtual: parts of each.
        head: what the last stage has to do besides, in layers.
        fixed: layers of the first or last stage that are asked for, as many as there are such splits; 0: any.
    """
    even = layers % (pipeline * virtual) == 0
    if pipeline == 1 or any(fixed):
        each = layers // pipeline
        is_it = even and fixed.first in (0, each) and fixed.last in (0, each) and (pipeline > 1 or virtual == 1)
        every = [EVEN] * is_it
        if pipeline > 1:
            every += [one for one in _all(layers, pipeline, virtual) if _agree(one, fixed)]
        return tuple(every)
    lightest = -(-layers // (pipeline * virtual)) * virtual + head  # with the last stage as long as any
    every_one: list[tuple[float, int, Ends]] = []
    for one in _all(layers, pipeline, virtual):
        others = (layers - sum(one)) / max(1, pipeline - 2)
        work = max(one.first, one.last + head, others)
        # The first stage holds as many micro-batches as there are stages, each further one a micro-batch less.
        every_one.append((work, round(max(one.first * pipeline, others * (pipeline - 1))), one))
    if not even:  # something has to be tried
        lightest = max(lightest, min((work for work, *_ in every_one), default=0.0))
    kept = [one for one in every_one if one[0] < lightest or (one[0] == lightest and not even)]
    found = [EVEN] * even
    least = None
    for _, held, one in sorted(kept):
        if len(found) < _MOST + even and (least is None or held < least):
            found.append(one)
            least = held
    return tuple(found)


def _agree(one: Ends, fixed: Ends) -> bool:
    return all(asked in (0, has) for has, asked in zip(one, fixed, strict=True))


@lru_cache(maxsize=1024)
def _all(layers: int, pipeline: int, virtual: int) -> tuple[Ends, ...]:
    """Every pair that Megatron accepts and that is not the even split."""
    each, left = divmod(layers, pipeline)
    found = []
    for first, last in itertools.product(range(virtual, layers, virtual), repeat=2):
        one = Ends(first, last)
        if by_stage(layers, pipeline, virtual, one) and (left or one != (each, each)):
            found.append(one)
    for embedding, loss in _COUNTED:
        counts = counted(layers, pipeline, virtual, bool(embedding), bool(loss))
        if len(set(counts)) > 1:
            found.append(Ends(sum(counts[::pipeline]), sum(counts[pipeline - 1 :: pipeline])))
    return tuple(dict.fromkeys(found))


def by_stage(layers: int, pipeline: int, virtual: int, ends: Ends) -> tuple[int, ...]:
    """The layers of each part where every stage divides its own evenly; empty where that cannot be."""
    left, inner = layers - sum(ends), pipeline - 2
    if min(ends) < 1 or inner < 0 or (left % (inner * virtual) or left < 1 if inner else left):
        return ()
    if any(size % virtual for size in ends):
        return ()
    others = left // inner // virtual if inner else 0
    return (ends.first // virtual, *[others] * inner, ends.last // virtual) * virtual


def _by_part(layers: int, pipeline: int, virtual: int, ends: Ends, embedding: int, loss: int) -> tuple[int, ...]:
    """Where the first part or the last is a layer shorter than the others; empty where that cannot be."""
    each, left = divmod(layers + embedding + loss, pipeline * virtual)
    if left or pipeline < 2 or ends != (each * virtual - embedding, each * virtual - loss):
        return ()
    counts = [each] * (pipeline * virtual)
    counts[0] -= embedding
    counts[-1] -= loss
    return tuple(counts) if min(counts) > 0 else ()

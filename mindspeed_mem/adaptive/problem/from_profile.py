"""A planning problem from what the ranks measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeVar

from mindspeed_mem.activation.observe.rank_profile import (
    ChunkProfile,
    HostCost,
    OperatorProfile,
    Outside,
    RankProfile,
)
from mindspeed_mem.adaptive.problem.definition import Link, Part, Pipeline, Problem, Stage
from mindspeed_mem.adaptive.problem.layer_classes import LayerClasses
from mindspeed_mem.adaptive.problem.part_view import PartView
from mindspeed_mem.plan.layers import in_words

_Figures = TypeVar("_Figures", Outside, HostCost)
_SECONDS = ("forward_seconds", "backward_seconds", "weight_seconds")
_EACH = (*_SECONDS, "forward_temporary_bytes", "backward_temporary_bytes", "weight_bytes")
_MOST = ("static_bytes", "temporary_bytes", "step_seconds")


class UnplannableError(ValueError):
    """What was measured is nothing to plan from; the message says why."""


class IncompleteError(UnplannableError):
    """A layer did not run in each of the steps that were measured; in others it may."""


def problem(
    ranks: Sequence[RankProfile], pipeline: Pipeline, device_limit: int, host_limit: int | None = None
) -> Problem:
    """What is to be planned, with limits in bytes of one rank.

    Of several ranks of one pipeline stage the slowest times and the most bytes count; what operators keep and read is
    taken from the one that keeps most. The link is the slowest that any rank measured.

    Raises:
        UnplannableError: a stage is missing, or has a part without layers.
        IncompleteError: a layer did not always run.
    """
    numbers = sorted({rank.stage for rank in ranks})
    if not ranks or numbers != list(range(len(numbers))):
        raise UnplannableError(
            f"profiles of stages {numbers} were given; at least one of each stage from 0 on is needed"
        )
    of_stages = [_worst([rank for rank in ranks if rank.stage == number]) for number in numbers]
    views = [[PartView(chunk) for chunk in rank.chunks] for rank in of_stages]
    if unseen := sorted({layer for of_stage in views for view in of_stage for layer in view.unseen}):
        raise IncompleteError(f"{in_words(unseen)} did not run in each step, and only what always runs can be planned")
    classes = LayerClasses(view for of_stage in views for view in of_stage)
    stages = [
        Stage(
            parts=tuple(_part(view, classes) for view in of_stage),
            operator_temporary_bytes=rank.temporary_bytes if _by_operator(rank) else 0,
            **{name: getattr(rank, name) for name in _MOST},
        )
        for rank, of_stage in zip(of_stages, views, strict=True)
    ]
    return Problem(
        classes=classes.made,
        stages=tuple(stages),
        pipeline=pipeline,
        link=_link(ranks),
        device_limit=device_limit,
        host_limit=host_limit,
        host=_most([rank.host for rank in ranks]),
    )


def _by_operator(rank: RankProfile) -> bool:
    """Whether temporaries are known for each operator."""
    return any(
        one.forward_temporary_bytes or one.backward_temporary_bytes for chunk in rank.chunks for one in chunk.operators
    )


def _link(ranks: Sequence[RankProfile]) -> Link:
    speeds = ("out", "back", "out_alone", "back_alone")
    slowest = {name: min(getattr(rank.link, name) for rank in ranks) for name in speeds}
    return Link(**slowest, blocking=any(rank.link.blocking for rank in ranks))


def _part(view: PartView, classes: LayerClasses) -> Part:
    after = view.profile.after
    if not view.layers:
        raise UnplannableError(
            "a part of a pipeline stage has no layers, or none that is seen as its layers are compiled, and cannot be "
            "planned; give each part a layer, and compile none of them as a whole"
        )
    first, last = view.layers[0], view.layers[-1]
    if skipped := set(range(first, last)) - set(view.layers):
        raise IncompleteError(f"{in_words(sorted(skipped))} did not run in a step, or nothing inside could be seen")
    before = view.profile.before
    return Part(
        layers=tuple(classes.name_of[layer] for layer in view.layers),
        first_layer=view.layers[0],
        before=replace(before, weight_bytes=before.weight_bytes + view.given_for_weights()),
        after=replace(after, bytes=after.bytes + sum(map(view.left_over, view.layers))),
    )


def _worst(ranks: Sequence[RankProfile]) -> RankProfile:
    """One rank that is as slow as the slowest and holds what the fullest holds.

    What operators keep and read is taken from the rank that keeps most.
    """
    if len(ranks) == 1:
        return ranks[0]
    fullest = max(ranks, key=lambda rank: sum(row["bytes"] for chunk in rank.chunks for row in chunk.storages))
    most = {name: max(getattr(rank, name) for rank in ranks) for name in _MOST}
    chunks = zip(fullest.chunks, *(rank.chunks for rank in ranks), strict=True)
    return replace(fullest, chunks=tuple(_slowest(chunk, others) for chunk, *others in chunks), **most)


def _slowest(chunk: ChunkProfile, others: Sequence[ChunkProfile]) -> ChunkProfile:
    rows: dict[tuple[int, str], list[OperatorProfile]] = {}
    for other in others:
        for one in other.operators:
            rows.setdefault((one.layer, one.op), []).append(one)
    operators = []
    for one in chunk.operators:
        same = rows[one.layer, one.op]
        operators.append(replace(one, **{name: max(getattr(other, name) for other in same) for name in _EACH}))
    before, after = _most([other.before for other in others]), _most([other.after for other in others])
    return replace(chunk, operators=tuple(operators), before=before, after=after)


def _most(parts: Sequence[_Figures]) -> _Figures:
    [kind] = {type(part) for part in parts}
    return kind(**{field.name: max(getattr(part, field.name) for part in parts) for field in fields(kind)})

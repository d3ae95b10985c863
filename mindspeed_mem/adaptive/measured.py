"""A planning problem from what the ranks measured."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_mem.activation.observe.rank_profile import RankProfile
from mindspeed_mem.adaptive.chunk_view import ChunkView
from mindspeed_mem.adaptive.layer_classes import LayerClasses
from mindspeed_mem.adaptive.problem import Chunk, Link, Outside, Pipeline, Problem, Stage
from mindspeed_mem.adaptive.worst_rank import worst


def problem(
    ranks: Sequence[RankProfile], pipeline: Pipeline, device_limit: int, host_limit: int | None = None
) -> Problem:
    """What is to be planned.

    Of several ranks of one pipeline stage the slowest times and the most bytes count; what operators keep and read is
    taken from the one that keeps most. The link is the slowest that any rank measured. Limits are bytes of one rank.

    Raises ValueError where a stage is missing, or has a part without layers.
    """
    numbers = sorted({rank.stage for rank in ranks})
    if not ranks or numbers != list(range(len(numbers))):
        raise ValueError(f"profiles of stages {numbers} were given; at least one of each stage from 0 on is needed")
    of_stages = [worst([rank for rank in ranks if rank.stage == number]) for number in numbers]
    views = [[ChunkView(chunk) for chunk in rank.chunks] for rank in of_stages]
    classes = LayerClasses(view for of_stage in views for view in of_stage)
    stages = []
    for rank, of_stage in zip(of_stages, views, strict=True):
        stages.append(
            Stage(
                chunks=tuple(_chunk(view, classes) for view in of_stage),
                static_bytes=rank.static_bytes,
                temporary_bytes=rank.temporary_bytes,
                step_seconds=rank.step_seconds,
            )
        )
    return Problem(
        classes=classes.made,
        stages=tuple(stages),
        pipeline=pipeline,
        link=_link(ranks),
        device_limit=device_limit,
        host_limit=host_limit,
    )


def _link(ranks: Sequence[RankProfile]) -> Link:
    slowest = {name: min(getattr(rank.link, name) for rank in ranks) for name in ("out", "back")}
    slowest |= {name: min(getattr(rank.link, name) for rank in ranks) for name in ("out_alone", "back_alone")}
    return Link(**slowest, blocking=any(rank.link.blocking for rank in ranks))


def _chunk(view: ChunkView, classes: LayerClasses) -> Chunk:
    before, after = view.profile.before, view.profile.after
    if not view.layers:
        raise ValueError("a pipeline stage has a part without layers, which cannot be planned: give each at least one")
    return Chunk(
        layers=tuple(classes.name_of[layer] for layer in view.layers),
        first_layer=view.layers[0],
        before=Outside(
            forward_seconds=before.forward_seconds, backward_seconds=before.backward_seconds, bytes=before.bytes
        ),
        after=Outside(
            forward_seconds=after.forward_seconds,
            backward_seconds=after.backward_seconds,
            bytes=after.bytes + sum(map(view.left_over, view.layers)),
        ),
    )

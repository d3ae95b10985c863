"""Small planning problems for the tests of the planner."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_mem.activation.observe.rank_profile import HostCost, Outside
from mindspeed_mem.adaptive.problem.definition import (
    Group,
    LayerClass,
    Link,
    Part,
    Pipeline,
    PlannedOperator,
    Problem,
    Stage,
)
from mindspeed_mem.schedule import Placement

MB = 10**6
# A layer like a transformer's: a norm, a product, attention, a product, an activation function, a product.
LAYER = LayerClass(
    name="layer",
    operators=(
        PlannedOperator(name=""),
        PlannedOperator(name="norm", forward_seconds=0.01, backward_seconds=0.02),
        PlannedOperator(name="qkv", forward_seconds=0.1, backward_seconds=0.2),
        PlannedOperator(name="core", forward_seconds=0.05, backward_seconds=0.12),
        PlannedOperator(name="up", forward_seconds=0.2, backward_seconds=0.4),
        PlannedOperator(name="act", forward_seconds=0.02, backward_seconds=0.03),
        PlannedOperator(name="down", forward_seconds=0.2, backward_seconds=0.4),
    ),
    groups=(
        Group(name="input", bytes=64 * MB, operators=("down",), used_by=("norm",), from_previous=True),
        Group(
            name="norm",
            bytes=66 * MB,
            operators=("norm",),
            used_by=("norm", "qkv"),
            recompute_seconds=0.01,
            needs=("input",),
        ),
        Group(
            name="qkv", bytes=192 * MB, operators=("qkv",), used_by=("core",), recompute_seconds=0.1, needs=("norm",)
        ),
        Group(
            name="core",
            bytes=70 * MB,
            operators=("core",),
            used_by=("core", "up"),
            recompute_seconds=0.05,
            needs=("qkv",),
        ),
        Group(
            name="up",
            bytes=256 * MB,
            operators=("up",),
            used_by=("act",),
            recompute_seconds=0.2,
            recompute_keeps=10 * MB,
            needs=("core",),
        ),
        Group(name="act", bytes=256 * MB, operators=("act",), used_by=("down",), recompute_seconds=0.02, needs=("up",)),
    ),
    input_bytes=64 * MB,
)


_LINEAR = {"qkv": (0.1, 192), "up": (0.21, 256), "down": (0.2, 64)}
_FEEDS = {"norm": 64, "core": 64, "act": 256}
SPLIT_LAYER = replace(
    LAYER,
    name="split layer",
    operators=tuple(
        replace(
            one,
            weight_seconds=_LINEAR[one.name][0],
            weight_bytes=_LINEAR[one.name][1] * MB,
            gradient_bytes=_LINEAR[one.name][1] * MB,
        )
        if one.name in _LINEAR
        else one
        for one in LAYER.operators
    ),
    groups=tuple(
        replace(one, weight_bytes=_FEEDS.get(one.name, 0) * MB, weights_only=one.name in ("norm", "act"))
        for one in LAYER.groups
    ),
)
"""The same with what its products put off."""


def small_problem(
    *,
    stages: int = 1,
    virtual: int = 1,
    layers: int = 2,
    micro_batches: int = 2,
    link: float = 4.0,
    send: float = 0.0,
    limit: int = 10**12,
    host: int | None = None,
    blocking: bool = False,
    kind: LayerClass = LAYER,
    schedule: str = "1f1b",
    cap: int | None = None,
    split_backward: bool = False,
    engine: float = 0.0,
) -> Problem:
    """`layers` in each part; head and loss on the last stage. Link in GB/s. engine: seconds of its own for each tensor
    that moves; each second run takes twice that."""
    made = []
    placement = Placement(stages, virtual, schedule == "v")
    for number in range(stages):
        parts = []
        for part in range(virtual):
            place = placement.part(number, part)
            first_layer = place * layers
            head = Outside()
            if place == placement.parts - 1:
                head = Outside(
                    forward_seconds=0.1,
                    backward_seconds=0.2,
                    bytes=90 * MB,
                    weight_seconds=0.1,
                    weight_bytes=70 * MB,
                    gradient_bytes=40 * MB,
                )
            before = Outside(bytes=64 * MB, forward_seconds=0.01 if first_layer == 0 else 0.0)
            parts.append(Part(layers=(kind.name,) * layers, first_layer=first_layer, before=before, after=head))
        made.append(Stage(parts=tuple(parts), static_bytes=500 * MB, temporary_bytes=30 * MB, step_seconds=0.1))
    return Problem(
        classes=(kind,),
        stages=tuple(made),
        pipeline=Pipeline(
            micro_batches=micro_batches, send_seconds=send, schedule=schedule, cap=cap, split_backward=split_backward
        ),
        link=Link(out=link, back=link, blocking=blocking),
        device_limit=limit,
        host_limit=host,
        host=HostCost(moved_seconds=engine, rerun_seconds=2 * engine),
    )


def tiny_class(sizes: list[int], seconds: list[float], needs: bool = True) -> LayerClass:
    """A layer of three groups, of MB and seconds to make again (0: impossible); forward takes 0.1 s an operator."""
    names = ("a", "b", "c")
    operators = [PlannedOperator(name=name, forward_seconds=0.1, backward_seconds=0.2) for name in (*names, "end")]
    groups = [
        Group(
            name=name,
            bytes=size * MB,
            operators=(name,),
            used_by=(operators[place + 1].name,),
            recompute_seconds=again or None,
            needs=(names[place - 1],) if needs and place else (),
        )
        for place, (name, size, again) in enumerate(zip(names, sizes, seconds, strict=True))
    ]
    return LayerClass(name="tiny", operators=tuple(operators), groups=tuple(groups))

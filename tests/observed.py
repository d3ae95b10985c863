"""Made-up observations of layers, for the tests of what is planned from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_mem.activation.observe.rank_profile import (
    ChunkProfile,
    OperatorProfile,
    Outside,
    RankProfile,
)
from mindspeed_mem.device.link_speed import LinkSpeed

SECONDS = 0.001
"""Of each operator's forward, unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One operator. Storages go by names within their layer; "in" is what the layer before made as "out"."""

    reads: Sequence[str] = ()
    makes: Mapping[str, int] = field(default_factory=dict)
    """Bytes."""
    saved: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of these, what backward keeps, and for whom: operators of this layer, or with a plus in front of the next."""
    flops: int = 0
    again: int | None = -1
    """-1: as many as forward."""
    named: bool = True


Layer = Mapping[str, Seen]


def chunk(
    layers: Sequence[Layer], first: int = 0, seconds: Mapping[tuple[int, str], float] | None = None, given: int = 64
) -> ChunkProfile:
    """A chunk of these layers; the first is given so many bytes, which it uses as the others use theirs."""
    storages: list[dict[str, Any]] = []
    rows, operators, profiles = [], [], []
    seconds = seconds or {}

    def new(layer: int, op: str, nbytes: int, savers: set[tuple[int, str]]) -> int:
        key = len(storages) + 1
        one = {"id": key, "layer": layer, "op": op, "bytes": nbytes}
        storages.append({**one, "saved": bool(savers), "elsewhere": False})
        if savers:
            rows.append({**one, "saved_by": sorted(savers)})
        return key

    users = {user[1:] for one in layers[0].values() for user in one.saved.get("out", ()) if user[0] == "+"}
    handed = new(-1, "", given, {(first, user) for user in users})
    for number, layer in enumerate(layers, first):
        names = {"in": handed}
        last = number == first + len(layers) - 1
        for op, one in layer.items():
            reads = sorted(names[name] for name in one.reads)
            for name, nbytes in one.makes.items():
                users = one.saved.get(name, ())
                savers = {(number + 1, user[1:]) if user[0] == "+" else (number, user) for user in users}
                if last:
                    savers = {(at, "" if at > number else user) for at, user in savers}  # the final norm
                names[name] = new(number, op, nbytes, savers)
            operators.append(
                {
                    "layer": number,
                    "op": op,
                    "inline": False,
                    "named": one.named and bool(op),
                    "reads": reads,
                    "makes": sorted(names[name] for name in one.makes),
                    "flops": one.flops,
                    "again": one.flops if one.again == -1 else one.again,
                }
            )
        whole = {"layer": number, "op": "", "inline": False, "named": False, "flops": 0, "again": 0, "makes": []}
        operators.append({**whole, "reads": [handed]})
        for op in ("", *layer):
            time = seconds.get((number, op), SECONDS if op else 0.0)
            profiles.append(OperatorProfile(layer=number, op=op, forward_seconds=time, backward_seconds=2 * time))
        handed = names.get("out", handed)
    return ChunkProfile(
        layers=tuple(range(first, first + len(layers))),
        operators=tuple(profiles),
        storages=tuple(rows),
        dataflow={"operators": operators, "storages": storages},
        before=Outside(forward_seconds=SECONDS, bytes=given),
        after=Outside(forward_seconds=SECONDS, backward_seconds=SECONDS, bytes=10),
    )


def rank(*chunks: ChunkProfile, stage: int = 0, **more: Any) -> RankProfile:
    sizes = {"static_bytes": 1000, "temporary_bytes": 100, "step_seconds": 0.1, **more}
    link = sizes.pop("link", LinkSpeed(out=2.0, back=3.0, out_alone=4.0, back_alone=5.0))
    return RankProfile(stage=stage, chunks=chunks, link=link, **sizes)

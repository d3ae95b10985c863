"""Several ranks of one pipeline stage as one: all of them wait for the slowest, and none may run out of memory."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_mem.activation.observe.rank_profile import ChunkProfile, OperatorProfile, OutsideProfile, RankProfile


def worst(ranks: Sequence[RankProfile]) -> RankProfile:
    """One rank that is as slow as the slowest and holds what the fullest holds.

    What operators keep and read is taken from the rank that keeps most.
    """
    if len(ranks) == 1:
        return ranks[0]
    fullest = max(ranks, key=lambda rank: sum(row["bytes"] for chunk in rank.chunks for row in chunk.storages))
    most = {name: max(getattr(rank, name) for rank in ranks) for name in ("static_bytes", "temporary_bytes")}
    chunks = zip(fullest.chunks, *(rank.chunks for rank in ranks), strict=True)
    return RankProfile(
        stage=fullest.stage,
        chunks=tuple(_slowest(chunk, others) for chunk, *others in chunks),
        step_seconds=max(rank.step_seconds for rank in ranks),
        link=fullest.link,
        **most,
    )


def _slowest(chunk: ChunkProfile, others: Sequence[ChunkProfile]) -> ChunkProfile:
    rows: dict[tuple[int, str], list] = {}
    for other in others:
        for one in other.operators:
            rows.setdefault((one.layer, one.op), []).append(one)
    operators = []
    for one in chunk.operators:
        same = rows[one.layer, one.op]
        operators.append(
            OperatorProfile(
                layer=one.layer,
                op=one.op,
                forward_seconds=max(other.forward_seconds for other in same),
                backward_seconds=max(other.backward_seconds for other in same),
            )
        )
    return ChunkProfile(
        layers=chunk.layers,
        operators=tuple(operators),
        storages=chunk.storages,
        dataflow=chunk.dataflow,
        before=_most([other.before for other in others]),
        after=_most([other.after for other in others]),
    )


def _most(parts: Sequence[OutsideProfile]) -> OutsideProfile:
    names = ("forward_seconds", "backward_seconds", "bytes")
    return OutsideProfile(**{name: max(getattr(part, name) for part in parts) for name in names})

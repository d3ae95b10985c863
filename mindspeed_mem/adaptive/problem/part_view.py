"""What was observed of one model chunk, a part of the planned model, looked up by storage, layer and operator."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_mem.activation.observe.rank_profile import ChunkProfile


@dataclass(frozen=True, kw_only=True)
class KeptStorage:
    """One storage that an operator reads or makes."""

    id: int
    layer: int
    """Who produced it; -1: outside the layers."""
    op: str
    bytes: int
    saved: bool
    elsewhere: bool
    """Others hold it anyway."""
    savers: frozenset[tuple[int, str]]
    """Layer and operator of those whose backward reads it."""
    for_weights: str = ""
    """Whether gradients of weights that are put off wait for it: "alone", "too" (others need it, too), or "": none."""

    def saved_in(self, layer: int) -> bool:
        return any(at == layer for at, _ in self.savers)


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One operator, as `Forward.dataflow` describes it."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    flops: int
    again: int | None
    """Of a second run; None: a plan cannot recompute it."""
    named: bool
    """A plan can name it."""


class PartView:
    """One part's storages and operators."""

    def __init__(self, profile: ChunkProfile):
        self.profile = profile
        self.layers = tuple(sorted(profile.layers))
        savers = {row["id"]: frozenset((at, op) for at, op in row["saved_by"]) for row in profile.storages}
        waiting = {row["id"]: row.get("for_weights", "") for row in profile.storages}
        self.storages = {
            row["id"]: KeptStorage(
                **{**row, "saved": row["id"] in savers, "savers": savers.get(row["id"], frozenset())},
                for_weights=waiting.get(row["id"], ""),
            )
            for row in profile.dataflow["storages"]
        }
        self._operators: dict[int, dict[str, Observed]] = {}
        for row in profile.dataflow["operators"]:
            one = Observed(
                reads=tuple(row["reads"]),
                makes=tuple(row["makes"]),
                flops=row["flops"],
                again=row["again"] if row["named"] else None,
                named=row["named"],
            )
            self._operators.setdefault(row["layer"], {})[row["op"]] = one

    @property
    def unseen(self) -> tuple[int, ...]:
        """Layers that ran when times were taken, and not in the call whose data flow was followed."""
        return tuple(layer for layer in self.layers if layer not in self._operators)

    def operators(self, layer: int) -> dict[str, Observed]:
        """In forward order."""
        return self._operators[layer]

    def names(self, layer: int) -> tuple[str, ...]:
        """All operators of a layer in forward order, those included that do nothing."""
        listed = dict.fromkeys(one.op for one in self.profile.operators if one.layer == layer)
        return tuple(listed | dict.fromkeys(self._operators[layer]))

    def kept_of(self, layer: int) -> dict[str, list[KeptStorage]]:
        """What each operator of a layer produced and backward keeps."""
        found: dict[str, list[KeptStorage]] = {}
        for one in self.storages.values():
            if one.saved and one.layer == layer and one.bytes and not one.elsewhere:
                found.setdefault(one.op, []).append(one)
        return found

    def passed_on(self, layer: int) -> dict[str, list[KeptStorage]]:
        """What those operators of a layer produced of which something is kept for later layers alone.

        All that such an operator produced leaves the device together, so all of it belongs to the layer after; but of
        what the only operator of a layer produced, as where it is compiled, the layer's own part is decided about in
        that layer, where it can be made again.
        """
        kept, only = self.kept_of(layer), self._operators[layer].keys() - {""}
        found = {}
        for op, some in kept.items():
            later = [one for one in some if not one.saved_in(layer)]
            if later:
                found[op] = later if only == {op} else some
        return found

    def own(self, layer: int) -> dict[str, list[KeptStorage]]:
        """What operators of a layer produced and do not pass on."""
        passed_on = self.passed_on(layer)
        own = {
            op: [one for one in some if one not in passed_on.get(op, ())] for op, some in self.kept_of(layer).items()
        }
        return {op: some for op, some in own.items() if some}

    def received(self, layer: int) -> dict[str, list[KeptStorage]]:
        """What operators of the layer before passed on to this one."""
        before = self.layers[: self.layers.index(layer)][-1:]
        handed = self.passed_on(before[0]) if before else {}
        return {op: some for op, some in handed.items() if any(one.saved_in(layer) for one in some)}

    def inputs(self, layer: int) -> set[int]:
        """The storages that a layer is given by the one before, or, being the first, from outside; not what all layers
        share."""
        given = {key for key in self.operators(layer)[""].reads if self.storages[key].bytes}
        before = self.layers[: self.layers.index(layer)]
        if before:
            return {key for key in given if self.storages[key].layer in before}
        shared = {key for other in self.layers[1:] for key in self.operators(other)[""].reads}
        own = {key for key in given - shared if self.storages[key].layer < 0}
        return {max(own, key=lambda key: (self.storages[key].bytes, -key))} if own else set()

    def given_for_weights(self) -> int:
        """Bytes of what this part was given that gradients of its weights wait for."""
        return sum(one.bytes for one in self.storages.values() if one.layer < 0 and one.for_weights)

    def left_over(self, layer: int) -> int:
        """Bytes that a layer passes on to no layer of this part: to the final norm, to the head."""
        after = self.layers[self.layers.index(layer) + 1 :][:1]
        taken = self.received(after[0]) if after else {}
        return sum(one.bytes for op, some in self.passed_on(layer).items() if op not in taken for one in some)

"""What each operator keeps per micro-batch, counted by storage while the engine only watches."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_mem.activation import regions
from mindspeed_mem.activation.observe.op_recorder import Watch
from mindspeed_mem.plan.operators import nodes_of, with_inline

if TYPE_CHECKING:
    from mindspeed_mem.activation.storage.records import Handle, Owner


class _Row:
    """One storage that is saved. Memory that runs out may take the storage away: then handles still want it."""

    def __init__(self, storage: torch.UntypedStorage, facts: dict[str, Any]):
        self.facts = facts
        self.savers: set[tuple[int, str]] = set()
        self.uses: set[int] = set()
        self.handles: list[weakref.ref[Handle]] = []
        self._storage = weakref.ref(storage)

    def is_kept(self) -> bool:
        """Whether backward still needs it: not what was saved for a part of the graph that is gone."""
        return self._storage() is not None or any(handle() is not None for handle in self.handles)


class Census:
    """The storages of one forward per model chunk, and what recomputing its operators would do to them (`watch`)."""

    def __init__(self, running: Callable[[], tuple[int, str] | None], device_type: str) -> None:
        self.watch = Watch(running, device_type)
        self._open: list[_Row] = []
        self._row_of: weakref.WeakKeyDictionary[torch.UntypedStorage, _Row] = weakref.WeakKeyDictionary()
        self._storages: dict[int, list[dict[str, Any]]] = {}
        self._choices: dict[int, list[dict[str, Any]]] = {}
        self._dataflow: dict[int, dict[str, Any]] = {}
        self._of_handle: weakref.WeakKeyDictionary[Handle, tuple[dict[str, Any], bool]] = weakref.WeakKeyDictionary()
        """The row of what has been counted, and whether this is its only handle."""

    def add(self, owner: Owner, saver: Owner, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        """``saver`` saves a tensor of ``storage``, which ``owner`` produced (layer -1: outside)."""
        key = self.watch.saves(storage, owner[:2])
        row = self._row_of.get(storage)
        if row is None:
            facts = {
                "id": key,
                "layer": owner[0],
                "op": owner[1],
                "number": owner[2],
                "bytes": storage.nbytes(),
                "shape": tuple(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
            }
            row = self._row_of[storage] = _Row(storage, facts)
            self._open.append(row)
        row.savers.add(saver[:2])
        row.uses.add(saver[2])

    def holds(self, storage: torch.UntypedStorage, handle: Handle) -> None:
        """``handle`` is of a tensor of ``storage``."""
        row = self._row_of.get(storage)
        if row is not None:
            row.handles.append(weakref.ref(handle))

    def wants(self, chunk: int) -> bool:
        """Whether ``chunk`` has not been counted yet."""
        return chunk not in self._storages

    def finish(self, chunk: int) -> None:
        """One micro-batch has gone forward through ``chunk``."""
        if not self._open:
            self.watch.clear()
            return
        kept = [row for row in self._open if row.is_kept()]
        forward = self.watch.forward
        forward.keep_only({row.facts["id"] for row in kept})
        self._choices[chunk], self._dataflow[chunk] = forward.choices(), forward.dataflow(_named())
        self.watch.clear()
        self._storages[chunk] = []
        for row in kept:
            facts = {**row.facts, "saved_by": sorted(row.savers), "uses": sorted(row.uses)}
            handles = [handle for one in row.handles if (handle := one()) is not None]
            self._of_handle.update(dict.fromkeys(handles, (facts, len(handles) == 1)))
            self._storages[chunk].append(facts)
        self._open.clear()
        self._row_of.clear()

    def for_weights(self, handle: Handle) -> None:
        """The gradient of a weight that is put off is made from what ``handle`` is of."""
        row, alone = self._of_handle.get(handle, (None, False))
        if row is not None:
            row["for_weights"] = "alone" if alone else "too"

    def storages(self, chunk: int | None = None) -> list[dict[str, Any]]:
        """One dict per storage of a chunk (None: of all): its number in that chunk's `dataflow` (``id``), producing
        layer (-1: outside), op and its number in forward order, bytes, shape, dtype, the operators that saved it
        (``saved_by``) and their numbers (``uses``); whether gradients of weights wait for it (``for_weights``)."""
        chunks = sorted(self._storages) if chunk is None else [chunk]
        return [row for one in chunks for row in self._storages.get(one, ())]

    def choices(self) -> list[dict[str, Any]]:
        """One dict per operator that ran: what recomputing it would free and cost, see `Forward.choices`."""
        return [row for chunk in sorted(self._choices) for row in self._choices[chunk]]

    def dataflow(self, chunk: int = 0) -> dict[str, Any]:
        """What the operators of a chunk read and make, see `Forward.dataflow`; empty if it has not been counted."""
        return self._dataflow.get(chunk, {"operators": [], "storages": []})


def _named() -> dict[int, set[str]]:
    """The operators of each layer that a memory plan can name; others go with what contains them."""
    return {layer: set(nodes_of(with_inline(sorted(paths)))) for layer, paths in regions.tagged_layers().items()}

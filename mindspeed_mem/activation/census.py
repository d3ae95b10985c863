"""What each operator keeps per micro-batch, counted by storage while the engine only watches."""

from __future__ import annotations

import weakref
from typing import Any

import torch


class Census:
    """The storages of one forward per model chunk."""

    def __init__(self) -> None:
        self._open: list[dict[str, Any]] = []
        self._row_of: weakref.WeakKeyDictionary[torch.UntypedStorage, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._done: dict[int, list[dict[str, Any]]] = {}

    def add(self, layer: int, op: str, tensor: torch.Tensor, storage: torch.UntypedStorage, saver: tuple) -> None:
        """``saver`` (layer, op) saves a tensor of ``storage``, which ``op`` of ``layer`` produced (-1: outside)."""
        row = self._row_of.get(storage)
        if row is None:
            row = self._row_of[storage] = {
                "layer": layer,
                "op": op,
                "bytes": storage.nbytes(),
                "shape": tuple(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "saved_by": set(),
            }
            self._open.append(row)
        row["saved_by"].add(saver)

    def finish(self, chunk: int) -> bool:
        """One micro-batch has gone forward through ``chunk``; returns whether that chunk had been counted before."""
        if not self._open or chunk in self._done:
            return bool(self._done)
        self._done[chunk] = [{**row, "saved_by": sorted(row["saved_by"])} for row in self._open]
        self._open.clear()
        self._row_of.clear()
        return False

    def storages(self) -> list[dict[str, Any]]:
        """One dict per storage: producing layer and op (layer -1: from outside), bytes, shape, dtype, who saved it."""
        return [row for chunk in sorted(self._done) for row in self._done[chunk]]

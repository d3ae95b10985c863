"""What each operator keeps per micro-batch, counted by storage while the engine only watches."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_mem.activation.watch import Watch


class Census:
    """The storages of one forward per model chunk, and what recomputing its operators would do to them (`watch`)."""

    def __init__(self, running: Callable[[], tuple[int, str] | None], device_type: str) -> None:
        self.watch = Watch(running, device_type)
        self._choices: dict[int, list[dict[str, Any]]] = {}
        self._open: list[dict[str, Any]] = []
        self._row_of: weakref.WeakKeyDictionary[torch.UntypedStorage, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._done: dict[int, list[dict[str, Any]]] = {}

    def add(
        self,
        owner: tuple[int, str, int],
        saver: tuple[int, str, int],
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
    ) -> None:
        """``saver`` saves a tensor of ``storage``, which ``owner`` produced: layer (-1: outside), operator, number."""
        self.watch.saves(storage)
        row = self._row_of.get(storage)
        if row is None:
            row = self._row_of[storage] = {
                "layer": owner[0],
                "op": owner[1],
                "number": owner[2],
                "bytes": storage.nbytes(),
                "shape": tuple(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "saved_by": set(),
                "uses": set(),
            }
            self._open.append(row)
        row["saved_by"].add(saver[:2])
        row["uses"].add(saver[2])

    def finish(self, chunk: int) -> bool:
        """One micro-batch has gone forward through ``chunk``; returns whether that chunk had been counted before."""
        if not self._open or chunk in self._done:
            self.watch.clear()
            return bool(self._done)
        self._choices[chunk] = self.watch.choices()
        self.watch.clear()
        kept = {id(row) for row in self._row_of.values()}  # not what was saved for a part of the graph that is gone
        self._done[chunk] = [
            {**row, "saved_by": sorted(row["saved_by"]), "uses": sorted(row["uses"])}
            for row in self._open
            if id(row) in kept
        ]
        self._open.clear()
        self._row_of.clear()
        return False

    def storages(self) -> list[dict[str, Any]]:
        """One dict per storage: producing layer (-1: outside), op and its number in forward order, bytes, shape, dtype,
        the operators that saved it (``saved_by``) and their numbers (``uses``)."""
        return [row for chunk in sorted(self._done) for row in self._done[chunk]]

    def choices(self) -> list[dict[str, Any]]:
        """One dict per operator that ran: what recomputing it would free and cost, see `Watch.choices`."""
        return [row for chunk in sorted(self._choices) for row in self._choices[chunk]]

"""What each operator keeps per micro-batch, counted by storage while the engine only watches."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_mem.activation.records import Record


class Census:
    """One forward's records per model chunk; later forwards of the chunk replace nothing."""

    def __init__(self) -> None:
        self._open: list[tuple[Record, tuple]] = []
        self._done: dict[int, list[dict[str, Any]]] = {}

    def add(self, record: Record, tensor: torch.Tensor) -> None:
        self._open.append((record, (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))))

    def finish(self, chunk: int) -> None:
        """One micro-batch has gone forward through ``chunk``."""
        rows = [
            {
                "layer": record.layer,
                "op": record.op,
                "bytes": record.nbytes,
                "shape": shape,
                "dtype": dtype,
                "saved_by": sorted(record.savers),
            }
            for record, (shape, dtype) in self._open
        ]
        self._open.clear()
        if rows:
            self._done.setdefault(chunk, rows)

    def storages(self) -> list[dict[str, Any]]:
        """One dict per storage: producing layer and op (layer -1: from outside), bytes, shape, dtype, who saved it."""
        return [row for chunk in sorted(self._done) for row in self._done[chunk]]

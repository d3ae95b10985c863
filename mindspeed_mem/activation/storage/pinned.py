"""What was released but is still held by something out of the engine's reach, and by whom."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import torch

from mindspeed_mem.activation.figures import PinnedFigures
from mindspeed_mem.activation.storage import marks
from mindspeed_mem.activation.storage.records import COPYING, HOST, Record

logger = logging.getLogger(__name__)


WORTH_SAYING = 1024
"""Bytes: where sequences begin, say, is a handful of numbers that attentions keep for all layers."""


class PinnedWatch:
    """Says once per operator, in words, why releasing it does not free its memory."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str], tuple[int, str]] = {}
        self._late: list[weakref.ref[Record]] = []

    def check(self, records: list[Record], output: Any, num_layers: int) -> None:
        """To be called when a forward has ended: by then only ``output`` and outsiders can hold a moved storage.

        Such a storage is not moved again, whoever saves it next: weights in a low precision, which a module keeps for
        all micro-batches, would travel with each. What is late is looked at when the next forward has ended.
        """
        records = [record for ref in self._late if (record := ref()) is not None] + records
        self._late = [weakref.ref(record) for record in records if record.state == COPYING]
        moved = [record for record in records if record.state == HOST]
        held = [(record, storage) for record in moved if (storage := record.storage()) is not None]
        for _, storage in held:
            marks.of(storage).keep()
        new = [(r, s, self._place(r, num_layers)) for r, s in held if r.nbytes >= WORTH_SAYING]
        new = [one for one in new if one[2] not in self._seen]
        if not new:
            return
        # by type, not isinstance: that would wake lazy objects and stumble over dead proxies
        modules = [found for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]
        alike: dict[tuple[int, str, str], set[int]] = {}
        for record, storage, place in new:
            if place not in self._seen:
                who = _holder(storage, output, modules)
                self._seen[place] = record.nbytes, who
                alike.setdefault((record.nbytes, place[1], who), set()).add(place[0])
        line = "swap has no effect on %d bytes of %s: the memory is pinned by %s"
        for (nbytes, op, who), layers in alike.items():
            logger.warning(line, nbytes, PinnedFigures.place(op, layers), who)

    @staticmethod
    def _place(record: Record, num_layers: int) -> tuple[int, str]:
        """What follows a stack of layers has a number as well."""
        return record.layer if record.layer < num_layers else -1, record.op

    def rows(self) -> tuple[PinnedFigures, ...]:
        return tuple(
            PinnedFigures(layer=layer, op=op, bytes=nbytes, by=who)
            for (layer, op), (nbytes, who) in sorted(self._seen.items())
        )


def _holder(storage: torch.UntypedStorage, output: Any, modules: list[torch.nn.Module]) -> str:
    outputs = output if isinstance(output, (list, tuple)) else [output]
    if any(_is_view(t, storage) for t in outputs):
        return "the pipeline schedule (it is the stage's output)"
    for module in modules:
        for name, value in vars(module).items():
            if _is_view(value, storage):
                return f"attribute {name} of a {type(module).__name__}"
            if not name.startswith("_") and type(value).__module__.partition(".")[0] not in ("torch", "builtins"):
                for inner, tensor in getattr(value, "__dict__", {}).items():
                    if _is_view(tensor, storage):
                        return f"attribute {name}.{inner} of a {type(module).__name__}"
    return "a reference outside the layers (a saved tensor of code that runs natively, a cache, or a Python variable)"


def _is_view(value: Any, storage: torch.UntypedStorage) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.untyped_storage() is storage

"""The micro-batches whose backward is to come, and when it comes."""

from __future__ import annotations

import weakref

from mindspeed_mem.activation.order import RecordedOrder
from mindspeed_mem.activation.position import Position
from mindspeed_mem.activation.storage.micro_batch import MicroBatch
from mindspeed_mem.activation.storage.records import InFlight
from mindspeed_mem.passes import BACKWARD


class MicroBatchesInFlight:
    """Holds them weakly: what nobody keeps for a backward is gone."""

    def __init__(self, position: Position):
        self.order = RecordedOrder()
        self._position = position
        self._of_key: weakref.WeakValueDictionary[tuple[int | None, int], MicroBatch] = weakref.WeakValueDictionary()

    def add(self, micro_batch: MicroBatch) -> None:
        self._of_key[micro_batch.key] = micro_batch

    def get(self, key: tuple[int | None, int]) -> MicroBatch | None:
        return self._of_key.get(key)

    def __len__(self) -> int:
        return len(self._of_key)

    def staying(self) -> int:
        """How many keep all their activations on the device."""
        return sum(one.stays for one in self._of_key.values())

    def turn(self, micro_batch: InFlight) -> float:
        """How many passes come before its backward, as far as anybody knows."""
        if micro_batch is self._position.micro_batch:
            return -1
        micro_batch_number, chunk = micro_batch.key
        ahead = self.order.ahead().get((BACKWARD, micro_batch_number, chunk))
        if ahead is not None:
            return ahead
        alive = [id(one) for one in self._of_key.values()]  # the older, the sooner
        return alive.index(id(micro_batch)) if id(micro_batch) in alive else 0

"""What a plan selects but stays on the device all the same: too small to be worth a copy, or without room on the host.

Each copy has fixed costs, on the device and in Python. What is moved faster than these take is left alone: norm
statistics, seeds. Packing such tensors together would save copies, but they would have to be complete, leave and come
back together, and be copied once more on the device, all for memory that hardly counts.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

from mindspeed_mem.activation.storage import marks
from mindspeed_mem.activation.storage.records import KEPT, STAYS, Record
from mindspeed_mem.device.link_speed import measure_link

if TYPE_CHECKING:
    from mindspeed_mem.device import Backend

logger = logging.getLogger(__name__)

_LEAST, _MOST = 2**14, 2**20  # bytes; what is derived lies between them
_SMALL, _LARGE = 2**12, 2**24  # bytes of the copies that are timed
_SECONDS = 0.1


class Staying:
    """Bytes of one process that stay, and why."""

    def __init__(self) -> None:
        self.smallest = 0
        """Bytes; what is smaller stays."""
        self.small_bytes = 0
        """Of what was too small, each time it was saved."""
        self.no_room_bytes = 0
        """Of what found no room on the host."""
        self.for_weights: set[tuple[int, int, int]] = set()
        """What stays on the host until gradients of weights are computed (for_weights.py),"""
        self.largest_gradient = 0
        """and of gradients of outputs there the most bytes that one has."""
        self._warned = False

    def is_small(self, record: Record) -> bool:
        """Whether a record is to stay for its size; then it does."""
        if record.nbytes >= self.smallest:
            return False
        if record.distance != STAYS:
            record.distance = STAYS
            self.small_bytes += record.nbytes
        return True

    def no_room(self, record: Record, limit_bytes: int | None) -> None:
        """The host has no room for a record: it stays, with one warning."""
        record.state = KEPT
        if (storage := record.storage()) is not None:
            marks.of(storage).keep()
        self.no_room_bytes += record.nbytes
        if not self._warned:
            self._warned = True
            logger.warning(
                "the host budget of %d bytes is used up (--swap-host-memory-gib, attach: host_memory_gib): "
                "%s%s (%d bytes) and what follows stays on the device; raise the budget or select less",
                limit_bytes,
                record.op or "what is outside the layers",
                f" of layer {record.layer}" if record.layer >= 0 else "",
                record.nbytes,
            )


def smallest_worth(backend: Backend) -> int:
    """From how many bytes on a copy takes longer than it takes to start one: a power of two, from 16 KiB to 1 MiB.

    0 where copies block: there a small copy costs little. It is measured, in about 0.2 s, once for each backend.
    """
    if backend.copies_block:
        return 0
    if backend not in _found:
        small, large = (measure_link(backend, nbytes, seconds=_SECONDS, beside=False) for nbytes in (_SMALL, _LARGE))
        start = _SMALL / min(small.out_alone, small.back_alone)  # nanoseconds, as speeds are in bytes for each
        worth = start * max(large.out_alone, large.back_alone)
        _found[backend] = min(max(1 << (int(worth).bit_length() - 1), _LEAST), _MOST)
    return _found[backend]


_found: weakref.WeakKeyDictionary[Backend, int] = weakref.WeakKeyDictionary()

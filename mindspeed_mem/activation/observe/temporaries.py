"""How much device memory a training call takes beyond what is there all the time and what backward keeps."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from mindspeed_mem.activation.storage.ledger import LEDGER

if TYPE_CHECKING:
    from mindspeed_mem.device import Backend


class Temporaries:
    """Cuts one training call into intervals, and takes the peak of each.

    Where no copies are made, no peak is above `static` + `most` + the most activations held on top of those that were
    held when the call began. On a backend that counts no memory everything stays 0.
    """

    def __init__(self, backend: Backend):
        """The call begins."""
        self._backend = backend
        self.static = backend.allocated() or 0
        """Bytes allocated when the call began."""
        self.most = 0
        """Bytes."""
        self.by: dict[Hashable, int] = {}
        """The most of each that ran, beyond what backward came to keep meanwhile."""
        self.peak = 0
        """The most that was allocated in all, which the backend's own figure no longer tells."""
        self._base = self._held = self._before_copies = LEDGER.held.now
        backend.reset_peak()

    def operator_ends(self, movable: bool, ran: Hashable = None) -> None:
        """An operator has run, by the name ``ran``, and the next begins.

        ``movable``: it was one of a layer. What it makes for backward is temporary until it ends, since a plan may take
        it away from there on; what others make stays. What backward is done with stays until its operator ends.
        """
        more = max(0, LEDGER.held.now - self._held)
        self._take(0 if movable else more, ran, more)
        self._held = LEDGER.held.now

    def copies_begin(self, ran: Hashable = None) -> None:
        """In the middle of an operator activations begin to leave, or to come back."""
        self._take(0, ran, max(0, LEDGER.held.now - self._held))
        self._before_copies = LEDGER.held.now

    def copies_end(self) -> None:
        """The operator goes on, with that much more or less on the device."""
        change = LEDGER.held.now - self._before_copies
        self._take(max(0, change))
        self._held += change

    def _take(self, more: int, ran: Hashable = None, kept: int = 0) -> None:
        """An interval ends in which ``more`` bytes came to be held for certain, and ``kept`` as it was."""
        peak = self._backend.peak()
        if peak is not None:
            self.most = max(self.most, peak - self.static - (self._held + more - self._base))
            mine = peak - self.static - (self._held + kept - self._base)
            self.by[ran] = max(self.by.get(ran, 0), mine)
            self.peak = max(self.peak, peak)
            self._backend.reset_peak()

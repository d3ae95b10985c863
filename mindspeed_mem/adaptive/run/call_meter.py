"""What training calls take while a plan is tried: time, peak, stalls, and what shows that memory was short."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mindspeed_mem.activation.storage.ledger import LEDGER
from mindspeed_mem.adaptive.run.correction import Measured

if TYPE_CHECKING:
    from mindspeed_mem.activation.engine import Engine


class CallMeter:
    """Of one rank. The host waits for the device before and after each call that is measured."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._calls: list[Measured] = []
        self._started = self._stalled = 0.0
        self._evicted = self._retries = 0
        self._again = 0  # attempts at the call that found too little memory

    def clear(self) -> None:
        """Forget the calls measured so far."""
        self._calls = []

    def forget_last(self) -> None:
        """The call that has ended was none to be measured."""
        del self._calls[-1:]

    def begin(self) -> None:
        """A call begins. The backend's peak starts again."""
        backend = self._engine.backend
        backend.synchronize()
        backend.reset_peak()
        LEDGER.reset_peak()
        self._evicted, self._stalled = self._engine.mover.evicted_bytes, backend.stall_seconds()
        self._retries = backend.allocation_retries()
        self._again, self._started = 0, time.perf_counter()

    def begin_again(self) -> None:
        """The call is run once more, after the allocator has given back what it kept: that attempt's time counts."""
        self._again += 1
        self._stalled, self._started = self._engine.backend.stall_seconds(), time.perf_counter()

    def end(self, stage: int, micro_batches: int) -> None:
        """It has ended as it should; it ran this pipeline stage. Calls with another number of micro-batches than this
        one had are no part of it any more."""
        backend = self._engine.backend
        if self._calls and self._calls[-1].micro_batches != micro_batches:
            self.clear()
        backend.synchronize()
        seconds, peak = time.perf_counter() - self._started, backend.peak()
        self._calls.append(
            Measured(
                stage=stage,
                seconds=seconds,
                peak=LEDGER.held.peak if peak is None else peak,
                stall=backend.stall_seconds() - self._stalled,
                evicted=self._engine.mover.evicted_bytes - self._evicted,
                retries=backend.allocation_retries() - self._retries + self._again,
                micro_batches=micro_batches,
            )
        )

    def measured(self) -> Measured | None:
        """All calls together: the shortest times (what delays a call is not the plan), the largest bytes. None before
        the first."""
        if not self._calls:
            return None
        seconds, stalls = (min(getattr(one, name) for one in self._calls) for name in ("seconds", "stall"))
        most = {name: max(getattr(one, name) for one in self._calls) for name in ("peak", "evicted", "retries")}
        of_all = {name: getattr(self._calls[0], name) for name in ("stage", "micro_batches")}
        return Measured(seconds=seconds, stall=stalls, **most, **of_all)

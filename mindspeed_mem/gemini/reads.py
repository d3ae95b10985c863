"""Parameters that a module's code reads without calling the module that owns them.

torch.nn.MultiheadAttention does so with its output projection, many models with a weight that is used twice. Hooks on
modules do not see it; the dictionary that an attribute is found in does. Such a parameter is gathered when it is read,
and counts from then on as one of the module whose forward is under way, in its backward as well. DeepSpeed's ZeRO-3
finds external parameters in the same place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mindspeed_mem.chunk.residency import Reading, Residency


class ForeignReads:
    """Watches the parameters of one model.

    Args:
        running: what the modules read whose forward is under way, the innermost last (`hooks.attach` keeps it).
    """

    def __init__(self, residency: Residency, running: list[Reading]) -> None:
        self._residency, self._running = residency, running

    def watch(self, model: torch.nn.Module) -> None:
        """From now on the attributes of `model` and its submodules are watched."""
        for module in model.modules():
            module._parameters = _Watched(module._parameters, self._seen)

    def _seen(self, param: torch.nn.Parameter) -> None:
        if not self._running or any(param in reading.open for reading in reversed(self._running)):
            return
        if self._residency.manages(param):
            reading = self._running[-1]
            reading.params = (*reading.params, param)
            self._allow()
            self._residency.acquire(reading)

    def _allow(self) -> None:
        """More is read at once than the modules alone say: the budget has to hold it."""
        if self._residency.budget is not None:
            needed = self._residency.largest_use([{p for reading in self._running for p in reading.params}])
            self._residency.budget = max(self._residency.budget, needed)


class _Watched(dict):
    """A module's parameters by name."""

    def __init__(self, parameters: dict, seen: Callable[[torch.nn.Parameter], None]) -> None:
        super().__init__(parameters)
        self._seen = seen

    def __getitem__(self, name: str) -> torch.nn.Parameter | None:
        param = super().__getitem__(name)
        if param is not None:
            self._seen(param)
        return param

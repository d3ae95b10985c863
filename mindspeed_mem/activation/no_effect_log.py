"""What is configured but turned out to have no effect while running: each said once, layers together."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mindspeed_mem.plan.layers import as_ranges

logger = logging.getLogger(__name__)


class NoEffectLog:
    """Collects findings and logs those that are new, as warnings where somebody has configured them: ``configured()``.
    Of a plan that the program has made there is nothing to do about them."""

    def __init__(self, configured: Callable[[], bool]) -> None:
        self._configured = configured
        self._said: set[tuple[str, int]] = set()
        self._new: dict[tuple[str, str], set[int]] = {}

    def add(self, what: str, layer: int, why: str) -> None:
        """``what`` (a phrase that "in layer 3" can follow) is so in ``layer``, because ``why``."""
        if (what, layer) not in self._said:
            self._said.add((what, layer))
            self._new.setdefault((what, why), set()).add(layer)

    def flush(self) -> None:
        """Log what has been added since the last time."""
        if not self._new:
            return
        level = logging.WARNING if self._configured() else logging.DEBUG
        for (what, why), layers in self._new.items():
            logger.log(level, "%s in layer%s %s: %s", what, "s" if len(layers) > 1 else "", as_ranges(layers), why)
        self._new.clear()

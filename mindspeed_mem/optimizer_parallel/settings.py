"""How the optimizers of this process are parallelized. Set by the adaptor, read by the patches."""

from __future__ import annotations

_mode: str | None = None


def mode() -> str | None:
    """``grouping`` or ``sharding``; None: not at all."""
    return _mode


def use(mode: str | None) -> None:
    global _mode
    _mode = mode

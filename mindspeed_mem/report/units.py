"""How sizes are written."""

from __future__ import annotations


def mib(nbytes: float) -> str:
    """Bytes as MiB with two decimals, without the unit."""
    return f"{nbytes / 2**20:.2f}"

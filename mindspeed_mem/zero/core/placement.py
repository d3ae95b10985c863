"""Placement policies: what lies in device memory, what on the host, and how much may be gathered at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

POLICIES = {
    "device": "device",
    "cuda": "device",
    "npu": "device",
    "host": "host",
    "cpu": "host",
    "static": "static",
    "auto": "auto",
}
"""Each policy by all of its names."""
_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)(|KIB|MIB|GIB)", re.IGNORECASE)


@dataclass(frozen=True)
class Placement:
    """Where chunks rest."""

    policy: str = "device"
    """One of the values of `POLICIES`."""
    budget: int | None = None
    """Bytes of gathered parameters at once; None: what one module needs, and the next chunk."""
    fraction: float = 1.0
    """With ``static``: the share of the elements whose shards rest on the host."""

    def on_host(self, sizes: Sequence[int]) -> list[bool]:
        """Which chunks of `sizes` (elements), in order of use, rest on the host.

        ``static`` takes as many from the end as its share allows: those whose gradients come first have the most
        time to travel. ``auto`` starts with everything on the host.
        """
        if self.policy != "static":
            return [self.policy != "device"] * len(sizes)
        return last_share(sizes, self.fraction)


def last_share(sizes: Sequence[int], share: float) -> list[bool]:
    """Which of `sizes` are taken, from the last on, so that all of them are at most this `share` of their sum."""
    room = share * sum(sizes)
    chosen = [False] * len(sizes)
    for index in reversed(range(len(sizes))):
        if sizes[index] <= room:
            room -= sizes[index]
            chosen[index] = True
    return chosen


def placement(value: str | Placement) -> Placement:
    """The placement that ``device``, ``host``, ``auto`` (each with ``:BYTES``) or ``static:FRACTION`` means.

    BYTES is a number, or one with KiB, MiB or GiB. ``cuda``, ``npu`` and ``cpu`` are other names of device and host.
    Raises ValueError naming what is allowed.
    """
    if isinstance(value, Placement):
        return value
    name, colon, rest = str(value).strip().partition(":")
    policy = POLICIES.get(name.lower())
    allowed = "device, host or auto, each alone or with a budget (device:2GiB), or static:FRACTION (static:0.5)"
    if policy is None or (colon and not rest):
        raise ValueError(allowed)
    if policy == "static":
        try:
            fraction = float(rest or 1)
        except ValueError:
            raise ValueError(allowed) from None
        if not 0 <= fraction <= 1:
            raise ValueError(f"{allowed}; the fraction lies between 0 and 1")
        return Placement("static", None, fraction)
    if not colon:
        return Placement(policy)
    found = _BYTES.fullmatch(rest.strip())
    if found is None or not float(found[1]):
        raise ValueError(f"{allowed}; a budget is a number of bytes above 0, with KiB, MiB or GiB behind it if wanted")
    return Placement(policy, int(float(found[1]) * _UNITS[found[2].upper()]))

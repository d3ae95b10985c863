"""How much memory the host has left, for those who are about to ask for much of it."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")


def available(meminfo: Path = _MEMINFO, groups: Path = _GROUPS) -> int | None:
    """Bytes that processes of this host, or of this container, can still have; None where the kernel does not say.

    The lesser of what the host has available and of what the container's own limit (cgroups, version 2 or 1) leaves.
    """
    found = [_of_host(meminfo), _of_container(groups / "memory.max", groups / "memory.current", groups / "memory.stat")]
    old = groups / "memory"
    found.append(_of_container(old / "memory.limit_in_bytes", old / "memory.usage_in_bytes", old / "memory.stat"))
    known = [number for number in found if number is not None]
    return max(0, min(known)) if known else None


def ranks_here() -> int:
    """How many ranks share this host, as torchrun says it; 1 without."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) else 1


def _of_host(meminfo: Path) -> int | None:
    for line in _read(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _of_container(most: Path, used: Path, stat: Path) -> int | None:
    limit, now = _read(most).strip(), _read(used).strip()
    if not (limit.isdecimal() and now.isdecimal()):  # "max": no limit
        return None
    given_back = 0  # files that were read: the kernel drops them when it needs room
    for line in _read(stat).splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            given_back = int(value)
    return int(limit) - int(now) + given_back


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

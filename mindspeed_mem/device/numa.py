"""Binds a process to the cores next to its device, so that host buffers lie in the memory next to it, too.

On hosts with several NUMA nodes, copies to and from the memory of a far node are several times slower when all devices
copy at once. Linux places a page on the node of the core that first touches it, and pinning touches all pages: a
process on the right cores gets its host buffers in the right place, if it is bound before they are made.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_VARIABLE = "MINDSPEED_MEM_NUMA"
_SYSFS, _PROC = Path("/sys"), Path("/proc")


def bind(
    device_index: int | None,
    pci_bus_id: str | None = None,
    *,
    ranks: tuple[int, int] | None = None,
    sysfs: Path = _SYSFS,
    proc: Path = _PROC,
) -> str:
    """Bind all threads of this process to the NUMA node of its device; returns one line of what was done or why not.

    Args:
        device_index: the device's, for messages; None where the host itself is the device. Then the ranks of a host are
            spread over its nodes.
        pci_bus_id: `Backend.pci_address` of the device; None if unknown: nothing is done.
        ranks: this process's number among the ranks of this host, and how many these are; None: what LOCAL_RANK and
            LOCAL_WORLD_SIZE say.
        sysfs, proc: where the kernel shows its topology and this process's threads.

    No thread gets a core that it could not use before, so that what a launcher has bound stays bound. Threads made
    later inherit the cores of the thread that makes them. It never raises: training goes on without it.
    """
    try:
        return _bind(device_index, pci_bus_id, ranks, sysfs, proc)
    except (_Reason, OSError, ValueError) as error:
        return f"not bound to a NUMA node: {error}"


class _Reason(Exception):
    """Why nothing is done."""


def _bind(index: int | None, address: str | None, ranks: tuple[int, int] | None, sysfs: Path, proc: Path) -> str:
    if os.environ.get(_VARIABLE) == "0":
        raise _Reason(f"{_VARIABLE} is 0")
    if not hasattr(os, "sched_setaffinity"):
        raise _Reason("only Linux can do that")
    present = os.sched_getaffinity(0)
    nodes = {number: cores for number, cores in _nodes(sysfs).items() if cores}  # some have memory only
    if not nodes:
        raise _Reason(f"the kernel shows none below {sysfs / 'devices/system/node'}")
    if len(nodes) == 1:
        raise _Reason("this host has only one")
    if index is None:
        ranks = ranks or _local_ranks()
        usable = sorted(number for number, cores in nodes.items() if cores & present)
        chosen, why = _share(usable, *ranks), "for rank {} of the {} on this host".format(*ranks)
    else:
        chosen, why = [_node_of(f"device {index}", address, sysfs)], f"next to device {index} ({address})"
    wanted = set().union(*(nodes.get(number, set()) for number in chosen))
    if not wanted & present:
        raise _Reason(f"this process may use no core of {_named(chosen)}, {why}")
    if present <= wanted:
        raise _Reason(f"this process keeps to {_named(chosen)} anyway, {why}")
    threads = _bind_threads(wanted, proc)
    return f"bound to {_named(chosen)} (cores {_ranges(wanted & present)}; {threads} threads), {why}"


def _bind_threads(wanted: set[int], proc: Path) -> int:
    """Take from each thread the cores that are not `wanted`, unless none would be left; returns how many changed."""
    os.sched_setaffinity(0, os.sched_getaffinity(0) & wanted)  # first this thread: an error here is told
    changed = 1
    for entry in (proc / "self" / "task").iterdir():
        thread = int(entry.name)
        try:
            before = os.sched_getaffinity(thread)
            if before & wanted and before - wanted:
                os.sched_setaffinity(thread, before & wanted)
                changed += 1
        except ProcessLookupError:
            continue  # it has ended
    return changed


def _share(nodes: list[int], rank: int, count: int) -> list[int]:
    """The nodes for one of `count` ranks: more ranks than nodes share them, fewer have several each."""
    first = rank * len(nodes) // count
    return nodes[first : max((rank + 1) * len(nodes) // count, first + 1)]


def _local_ranks() -> tuple[int, int]:
    rank, count = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not 0 <= rank < count:
        raise ValueError(f"LOCAL_RANK is {rank} and LOCAL_WORLD_SIZE {count}; the launcher sets them")
    return rank, count


def _nodes(sysfs: Path) -> dict[int, set[int]]:
    """The cores of each NUMA node, by its number."""
    folders = (sysfs / "devices" / "system" / "node").glob("node[0-9]*")
    return {int(folder.name[4:]): _cores((folder / "cpulist").read_text()) for folder in sorted(folders)}


def _node_of(device: str, address: str | None, sysfs: Path) -> int:
    """The number of the node that a PCI device hangs on."""
    if address is None:
        raise _Reason(f"the PCI address of {device} is unknown")
    file = sysfs / "bus" / "pci" / "devices" / address.lower() / "numa_node"
    if not file.is_file():
        raise _Reason(f"the kernel shows no {file} for {device}")
    number = int(file.read_text())
    if number < 0:
        raise _Reason(f"the firmware does not tell where {device} is (numa_node is {number})")
    return number


def _cores(text: str) -> set[int]:
    """What a cpulist such as "0-3,8" names; empty for a node without cores."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _ranges(cores: Iterable[int]) -> str:
    """The inverse of `_cores`."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _named(nodes: list[int]) -> str:
    return f"NUMA node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"

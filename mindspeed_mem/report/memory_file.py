"""Files for torch's memory viewer (pytorch.org/memory_viz), as `torch.cuda.memory._dump_snapshot` writes them.

The viewer shows activations as they come and go over a step, each with the operator that made it in place of a stack.
Their addresses are made up, no two alike: nobody asks an allocator. Times are the host's.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mindspeed_mem import output
from mindspeed_mem.activation.storage.ledger import Owner

_FIRST = 1 << 32  # an address
_ALIGNED = 512
_PROTOCOL = 4  # the last that the viewer reads

Came = tuple[int, int, tuple[str, str, str]]
"""Number, bytes, and who made it, in which pass, and how."""
Event = tuple[int, Came | int]
"""When, in microseconds since 1970, and what came, or the number of what went."""


class Allocations:
    """The log of a ledger over one step. ``name``: of a layer and operator."""

    def __init__(self, name: Callable[[int, str], str]):
        self.events: list[Event] = []
        self.during = "outside the passes"
        """The pass that runs."""
        self._name, self._open, self._count = name, True, 0

    def entered(self, nbytes: int, owner: Owner, back: bool) -> int:
        self._count += 1
        if self._open:
            how = "brought back" if back else "made"
            self.events.append((_now(), (self._count, nbytes, (self._name(*owner), self.during, how))))
        return self._count

    def left(self, number: int) -> None:
        if self._open:
            self.events.append((_now(), number))

    def close(self) -> None:
        """The step has ended; what is alive stays so."""
        self._open = False


def beside(file: Path) -> Path:
    """``trace.rank0.json`` has ``trace.rank0.memory.pickle`` beside it."""
    return file.with_suffix(".memory.pickle")


def write(file: Path, events: Sequence[Event]) -> None:
    """Write a file for the viewer. Raises OSError."""
    output.write(file, pickle.dumps(snapshot(events), protocol=_PROTOCOL))


def snapshot(events: Sequence[Event]) -> dict[str, Any]:
    """What the viewer reads: one segment, and the trace of one device."""
    trace: list[dict[str, Any]] = []
    blocks: dict[int, dict[str, Any]] = {}  # by number
    stacks: dict[tuple[str, str, str], list[dict[str, Any]]] = {}  # pickled once each
    end = _FIRST
    for when, what in events:
        if isinstance(what, int):
            block = blocks[what]
            block["state"] = "inactive"
            place = {"addr": block["address"], "size": block["requested_size"], "stream": 0, "time_us": when}
            place["frames"] = block["frames"]
            trace += ({"action": action, **place} for action in ("free_requested", "free_completed"))
            continue
        number, nbytes, (who, during, how) = what
        frames = stacks.setdefault(what[2], [_frame(who, how), _frame(during, "pass")])
        size = max(1, -(-nbytes // _ALIGNED)) * _ALIGNED
        blocks[number] = {
            **{"address": end, "size": size, "requested_size": nbytes},
            **{"state": "active_allocated", "frames": frames},
        }
        trace.append({"action": "alloc", "addr": end, "size": nbytes, "stream": 0, "time_us": when, "frames": frames})
        end += size
    alive = [one for one in blocks.values() if one["state"] == "active_allocated"]
    segment = {
        **{"device": 0, "address": _FIRST, "total_size": end - _FIRST, "stream": 0, "segment_type": "large"},
        **{"allocated_size": sum(one["size"] for one in alive), "active_size": sum(one["size"] for one in alive)},
        **{"requested_size": sum(one["requested_size"] for one in alive), "segment_pool_id": (0, 0)},
        **{"is_expandable": False, "frames": [], "blocks": list(blocks.values())},
    }
    return {"segments": [segment] if blocks else [], "device_traces": [trace], "allocator_settings": {}}


def _frame(name: str, file: str) -> dict[str, Any]:
    return {"name": name, "filename": file, "line": 0}


def _now() -> int:
    return time.time_ns() // 1000

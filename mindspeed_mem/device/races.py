"""Happens-before: which accesses to a storage are ordered, told by vector clocks, whatever really ran first."""

from __future__ import annotations

from typing import Any, Protocol

import torch

HOST = "host"
COMPUTE = "compute"

# Stream name -> how many of that stream's operations are known to be done (or ordered before what comes next).
Clock = dict[str, int]


class RaceError(RuntimeError):
    """Two accesses to the same memory are not ordered, and one of them writes."""


def join(clock: Clock, other: Clock) -> None:
    """Let `clock` know all that `other` knows."""
    for name, count in other.items():
        if clock.get(name, 0) < count:
            clock[name] = count


def covers(clock: Clock, other: Clock) -> bool:
    """Whether all that `other` knows is known to `clock`."""
    return all(clock.get(name, 0) >= count for name, count in other.items())


class Owner(Protocol):
    """The stream whose memory a storage is."""

    freed: list[tuple[int, Clock]]


class Access:
    """Who touched one storage last.

    `owner` is the stream whose memory it is (None: the host's). `allocated` is what that stream had been ordered after
    when the memory was handed out: a caching allocator may have taken it from a tensor that the stream was still to be
    done with, so nothing else may touch it before that.
    """

    def __init__(self, nbytes: int, owner: Owner | None, allocated: Clock) -> None:
        self.nbytes, self.owner, self.allocated = nbytes, owner, allocated
        self.on_host = owner is None
        self.used_on: list[Any] = []  # streams that the allocator has been told of
        self.writer: Clock = {}  # one entry at most: the last write
        self.readers: Clock = {}  # the last read of each stream since that write
        self.copies: list[Any] = []  # copies on side streams that touch it and have not run yet

    def read(self, name: str, clock: Clock, what: str) -> None:
        """Stream `name`, which knows `clock`, reads; raises RaceError unless everything it must follow is in it."""
        self._check(name, clock, what, "reads", {"write": self.writer})
        self.readers[name] = clock.get(name, 0)

    def write(self, name: str, clock: Clock, what: str) -> None:
        """The same for a write."""
        self._check(name, clock, what, "writes", {"write": self.writer, "read": self.readers})
        self.writer, self.readers = {name: clock.get(name, 0)}, {}

    def unordered(self, clock: Clock) -> Clock:
        """The uses of the memory that `clock` does not know to be done."""
        uses = dict(self.readers)
        join(uses, self.writer)
        return {name: count for name, count in uses.items() if clock.get(name, 0) < count}

    def _check(self, name: str, clock: Clock, what: str, does: str, earlier: dict[str, Clock]) -> None:
        for kind, uses in (earlier | {"use of the memory before it was allocated": self.allocated}).items():
            for other, count in uses.items():
                if other != name and clock.get(other, 0) < count:
                    where = "host buffer" if self.on_host else "device memory"
                    raise RaceError(
                        f"{what}: stream {name} {does} {where} of {self.nbytes} bytes without being ordered after "
                        f"the {kind} by stream {other} (its operation {count}; known are {clock.get(other, 0)})"
                    )


# Operators that look at no element. Views are recognised by their schema.
_METADATA = frozenset(
    "_reshape_alias _unsafe_view detach_ empty empty_like empty_strided is_pinned is_same_size lift_fresh new_empty "
    "new_empty_strided resize_ set_".split()
)


def touches_data(op: Any) -> bool:
    """Whether operator `op` reads or writes elements, rather than making a view or uninitialised memory."""
    schema = getattr(op, "_schema", None)  # higher-order operators have none
    return schema is None or not (op.is_view or schema.name.removeprefix("aten::") in _METADATA)


def whole(storage: torch.UntypedStorage, offset: int, nbytes: int) -> torch.Tensor:
    """uint8[nbytes] over `storage`, from byte `offset`."""
    return torch.empty(0, dtype=torch.uint8).set_(storage, offset, (nbytes,), (1,))

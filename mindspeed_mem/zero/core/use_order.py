"""In which order chunks are used and their gradients reduced: recorded once for each kind of pass, then followed.

A pass is what lies between two optimizer steps, or an evaluation: a whole pipeline schedule. Each kind (its key) has an
order of its own, so that an evaluation in between does not put training out of phase.

Collectives of a group have to be started in one order by all its ranks. While an order is being recorded, each rank
says before each collective what it is going to do. A reduction can wait until the end of the step, so one that other
ranks do not start yet is put off; anything else that differs is an error on all ranks of the group, where without this
they would wait for each other for ever, or take one chunk's numbers for another's.

While an order is followed nobody has to ask other ranks what they do: all have recorded the same. A reduction is then
started where the order has it, also if a gradient has not come on this rank.
"""

from __future__ import annotations

import bisect
import logging
import math
import zlib
from collections.abc import Hashable
from enum import IntEnum
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

MOST_WARNINGS = 3
"""Of passes that deviate: where they often do, it is nothing to warn of."""


class ChunkOrderError(RuntimeError):
    """Ranks that share chunks use them in different orders; the message says who was about to do what."""


class Act(IntEnum):
    """What a rank can be about to do."""

    GATHER = 0
    REDUCE = 1
    """A chunk's gradients, as soon as they are complete: can be put off."""
    REDUCE_LAST = 2
    """At the end of the step, complete or not."""
    END = 3
    """Of a pass."""


class Intent(NamedTuple):
    act: Act
    number: int
    """Of the chunk; at the end of a pass, what identifies the order that it had."""

    def __str__(self) -> str:
        if self.act is Act.END:
            return "is at the end of its pass"
        return f"{'gathers' if self.act is Act.GATHER else 'reduces the gradients of'} chunk {self.number}"


class Reducer(Protocol):
    """Whoever reduces gradients of chunks."""

    def is_complete(self, chunk: int) -> bool:
        """Whether all gradients of this chunk have come."""

    def start_number(self, chunk: int) -> None:
        """Start the reduction of this chunk, and tell `UseOrder.reduction`."""

    def missing(self, chunk: int) -> str:
        """Which gradients of this chunk have not come."""


class PassOrder:
    """One kind of pass: position -> numbers of the chunks used at once, or the chunk whose gradients are reduced."""

    def __init__(self) -> None:
        self.events: list[tuple[int, ...] | int] = []
        self._positions: dict[int, list[int]] = {}
        self.once = False
        """Something was used that other passes of this kind do not use."""

    def append(self, event: tuple[int, ...] | int) -> None:
        """The next event: a use of these chunks, or the reduction of one."""
        for chunk in event if isinstance(event, tuple) else ():
            self._positions.setdefault(chunk, []).append(len(self.events))
        self.events.append(event)

    def next_use(self, chunk: int, after: float) -> float:
        """Position of the first use of `chunk` behind position `after`; infinity if there is none."""
        positions = self._positions.get(chunk, ())
        found = bisect.bisect_right(positions, after)
        return positions[found] if found < len(positions) else math.inf

    def fingerprint(self) -> int:
        """The same for the same order of events, however chunks are numbered."""
        numbers: dict[int, int] = {}

        def own(chunk: int) -> int:
            return numbers.setdefault(chunk, len(numbers))

        events = (tuple(map(own, event)) if isinstance(event, tuple) else own(event) for event in self.events)
        return zlib.crc32(repr(list(events)).encode())


class UseOrder:
    """Records a pass of a kind that is new, and says of a known one what comes next.

    If a pass deviates from its order, it has no future any more, and the kind is recorded anew the next time.
    """

    def __init__(self) -> None:
        self.deviations = 0
        """Passes that were not what had been recorded."""
        self.reducers: WeakValueDictionary[int, Reducer] = WeakValueDictionary()
        """By the number of the chunk."""
        self._orders: dict[Hashable, PassOrder] = {}
        self._recording: PassOrder | None = None
        self._following: PassOrder | None = None
        self._key: Hashable = None
        self._at = -1
        self._asked: dict[dist.ProcessGroup, torch.device] = {}
        self._warned = False

    @property
    def following(self) -> bool:
        """Whether what comes next is known, to this and to all other ranks."""
        return self._following is not None

    def begin(self, key: Hashable) -> None:
        """A pass of the kind `key` starts."""
        self._key, self._at = key, -1
        self._following = self._orders.get(key)
        self._recording = PassOrder() if self._following is None else None
        self._asked.clear()

    def end(self, completed: bool = True) -> None:
        """The pass is over; an incomplete one is not kept. Collective if it was recorded."""
        recorded, self._recording = self._recording, None
        if self._following is not None and completed and self._at + 1 != len(self._following.events):
            self._lose("it ends before")
        self._following = None
        if recorded is not None and completed and recorded.events and self._is_everybodys(recorded):
            self._orders[self._key] = recorded

    # ---- events

    def use(self, chunks: tuple[int, ...]) -> None:
        """These chunks are used now."""
        self._reduce_what_is_next(overdue=True)
        self._happens(chunks)
        self._reduce_what_is_next()

    def complete(self, chunk: int) -> bool:
        """All gradients of `chunk` have come. Whether its reducer is to start; otherwise the order says when."""
        if self._following is None:
            return True
        self._reduce_what_is_next()
        reducer = self.reducers.get(chunk)
        if reducer is not None and reducer.is_complete(chunk):
            self._warn_of_waiting()
        return False

    def last_call(self, chunk: int) -> None:
        """The step's gradients are all there: start the reductions that come next, until that of `chunk` has been."""
        while (found := self.next_reduction()) is not None:
            self._reduce_next(found)
            if found == chunk:
                break

    def reduction(self, chunk: int) -> None:
        """The gradients of `chunk` are reduced now."""
        self._happens(chunk)

    def may_do(self, intent: Intent, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Whether all ranks of `group` are about to do the same; False for a reduction that has to be put off.

        Without an order they are asked. Collective then, and waits for the device. Raises ChunkOrderError on all ranks
        if they never will be.
        """
        if self._following is not None:
            return True
        self._asked[group] = device
        return len(told(group, device, intent)) == 1

    def once(self) -> None:
        """What is used next is used in this pass alone: it is not one to follow."""
        if self._recording is not None:
            self._recording.once = True

    # ---- what comes

    def next_use(self, chunk: int, after: float | None = None) -> float:
        """Position of the next use of `chunk`, from now or behind the position `after`; infinity if none is known."""
        known = self._following
        return math.inf if known is None else known.next_use(chunk, self._at if after is None else after)

    def coming(self, number: int) -> list[int]:
        """The next `number` different chunks to be used, in order; empty if nobody knows."""
        found: dict[int, None] = {}
        if self._following is not None:
            events = self._following.events
            for position in range(self._at + 1, len(events)):
                if len(found) >= number:
                    break
                event = events[position]
                found.update(dict.fromkeys(event if isinstance(event, tuple) else ()))
        return list(found)[:number]

    def next_reduction(self) -> int | None:
        """The chunk whose reduction comes next, before any use; None if a use comes next, or nobody knows."""
        found = self._next()
        return found if isinstance(found, int) else None

    # ---- inside

    def _next(self) -> tuple[int, ...] | int | None:
        if self._following is None or self._at + 1 >= len(self._following.events):
            return None
        return self._following.events[self._at + 1]

    def _happens(self, event: tuple[int, ...] | int) -> None:
        expected = self._next()
        self._at += 1
        if self._recording is not None:
            self._recording.append(event)
        elif self._following is not None and event != expected:
            self._lose(f"{_said(event)} instead of {_said(expected)}")

    def _reduce_what_is_next(self, overdue: bool = False) -> None:
        """Start the reductions that the order has next, as far as they are complete; `overdue`: if not, too."""
        while (found := self.next_reduction()) is not None:
            reducer = self.reducers.get(found)
            if reducer is None or not (overdue or reducer.is_complete(found)):
                return
            self._reduce_next(found)

    def _reduce_next(self, chunk: int) -> None:
        reducer, at = self.reducers.get(chunk), self._at
        if reducer is not None:
            reducer.start_number(chunk)
        if self._at == at:
            self._lose(f"chunk {chunk} has nothing to reduce")

    def _warn_of_waiting(self) -> None:
        """A rank on which alone a gradient does not come lets others wait, perhaps for ever: say who it is."""
        found = self.next_reduction()
        if self._warned or found is None or (reducer := self.reducers.get(found)) is None:
            return
        self._warned = True
        logger.warning(
            "gradients are reduced later than when their order was recorded, as %s did not come before them this time. "
            "If they did on other ranks, those wait for this one",
            reducer.missing(found),
        )

    def _is_everybodys(self, order: PassOrder) -> bool:
        """Whether all ranks with which this one shares chunks have recorded the same. Collective."""
        mine = Intent(Act.END, -1 if order.once else order.fingerprint())
        same = not order.once
        for _ in range(2):  # a rank of one group learns in the second round what a rank of another has seen
            for group, device in self._asked.items():
                same = len(told(group, device, mine)) == 1 and same
                mine = mine if same else Intent(Act.END, -1)
        return same

    def _lose(self, what: str) -> None:
        self.deviations += 1
        self._following = None
        self._orders.pop(self._key, None)
        logger.log(
            logging.WARNING if self.deviations <= MOST_WARNINGS else logging.INFO,
            "a pass over the chunks is not as it was recorded: %s. It is recorded anew the next time. If it is as "
            "recorded on other ranks, collectives do not match now, and training stops",
            what,
        )


def _said(event: tuple[int, ...] | int | None) -> str:
    if event is None:
        return "its end"
    return f"the reduction of chunk {event}" if isinstance(event, int) else f"a use of chunks {event}"


def told(group: dist.ProcessGroup, device: torch.device, mine: Intent) -> set[Intent]:
    """What the ranks of `group` are about to do, if it is `mine` or can be put off until they are; see `may_do`.

    At the end of a pass the numbers may differ: then all of them.
    """
    if group.size() == 1:
        return {mine}
    while True:
        all_of_them = torch.empty(group.size(), 2, dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(all_of_them, torch.tensor([mine], dtype=torch.int64, device=device), group=group)
        intents = [Intent(Act(act), number) for act, number in all_of_them.tolist()]
        fixed = {intent for intent in intents if intent.act is not Act.REDUCE}
        if len(fixed) > 1 and any(intent.act is not Act.END for intent in fixed):
            raise ChunkOrderError(
                f"ranks do not use chunks in the same order: {_listed(group, intents)}. Where parameters are "
                "sharded, all data-parallel ranks have to run the same modules in the same order: run modules that are "
                "for some ranks' data only on all of them, or keep parameters whole (--chunk-zero-stage 2; in "
                "mindspeed_mem.gemini shard_param_frac=0)"
            )
        if len(set(intents)) == 1 or mine.act is Act.REDUCE or len(fixed) == len(set(intents)):
            return set(intents)


def _listed(group: dist.ProcessGroup, intents: list[Intent]) -> str:
    ranks = dist.get_process_group_ranks(group)
    return ", ".join(f"rank {rank} {intent}" for rank, intent in zip(ranks, intents, strict=True))

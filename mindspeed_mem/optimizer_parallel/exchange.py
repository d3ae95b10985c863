"""How ranks hand out what they updated: all-gathers of equal, bounded messages, which gloo, NCCL and HCCL all have.

What a rank has of all parameters of one dtype is one flat sequence. Ranks have sequences of different lengths, and
all-gathers of different lengths do not exist on all backends: shorter ones are padded. A message is the same stretch
of every rank's sequence, however many parameters that touches.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mindspeed_mem.optimizer_parallel.part import OptimizerPart

MESSAGE_BYTES = 64 * 2**20
"""Of what a rank receives at once, all ranks' parts together; sent and received take this and one rank's part more."""


class Segment(NamedTuple):
    """Elements of one parameter in a message."""

    number: int
    """Of the parameter."""
    elements: range
    offset: int
    """In the rank's part of the message, in elements."""


class Message(NamedTuple):
    """One all-gather."""

    kind: Any
    """What all its elements have in common."""
    length: int
    """Elements that each rank contributes, padding included."""
    segments: tuple[tuple[Segment, ...], ...]
    """Of each rank."""


def messages(
    ranges: Sequence[Sequence[range]], kinds: Sequence[Hashable], itemsizes: Sequence[int], limit: int
) -> list[Message]:
    """The messages for parameters of which ``ranges[i][rank]`` are each rank's elements, with at most `limit` bytes.

    (At least one element of each rank, whatever `limit`.) Parameters of one kind share messages.
    """
    found = []
    for kind in dict.fromkeys(kinds):
        indices = [index for index, one in enumerate(kinds) if one == kind]
        ranks = len(ranges[indices[0]])
        length = max(1, limit // (ranks * itemsizes[indices[0]]))
        sequences = [_cut([(index, ranges[index][rank]) for index in indices], length) for rank in range(ranks)]
        totals = [sum(len(ranges[index][rank]) for index in indices) for rank in range(ranks)]
        for number in range(-(-max(totals) // length)):
            segments = tuple(tuple(cut[number]) if number < len(cut) else () for cut in sequences)
            found.append(Message(kind, min(length, max(totals) - number * length), segments))
    return found


def _cut(sequence: list[tuple[int, range]], length: int) -> list[list[Segment]]:
    """One rank's elements in pieces of `length`."""
    found: list[list[Segment]] = []
    filled = length
    for index, elements in sequence:
        while elements:
            if filled == length:
                found.append([])
                filled = 0
            now = elements[: length - filled]
            found[-1].append(Segment(index, now, filled))
            filled += len(now)
            elements = elements[len(now) :]
    return found


class Exchange:
    """The collectives of one process group (None: the default one)."""

    def __init__(self, group: dist.ProcessGroup | None, message_bytes: int = MESSAGE_BYTES) -> None:
        self.group = group
        self.message_bytes = message_bytes
        self.ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._key: tuple = ()
        self._messages: list[Message] = []

    def plan(self, parts: Sequence[OptimizerPart]) -> list[Message]:
        """The messages of `spread`, which stay the same as long as the parts do."""
        key = tuple(map(id, parts))
        if key != self._key:
            kinds = [(part.target.dtype, part.target.device) for part in parts]
            itemsizes = [part.target.element_size() for part in parts]
            self._messages = messages([part.ranges for part in parts], kinds, itemsizes, self.message_bytes)
            self._key = key
        return self._messages

    def spread(self, parts: Sequence[OptimizerPart]) -> None:
        """Bring every rank's pieces into the targets of all ranks, rounded to the targets' dtype. Collective."""
        opened = [part.open() for part in parts]
        for part, flat in zip(parts, opened, strict=True):
            if part.has_master and part.piece is not None:
                flat[part.own.start : part.own.stop].copy_(part.flat(part.piece) if part.whole else part.piece)
        if self.ranks > 1:
            for message in self.plan(parts):
                self._send(message, opened)
        for part, flat in zip(parts, opened, strict=True):
            part.close(flat)

    def _send(self, message: Message, opened: list[torch.Tensor]) -> None:
        dtype, device = message.kind
        mine = torch.empty(message.length, dtype=dtype, device=device)
        everyone = torch.empty(self.ranks * message.length, dtype=dtype, device=device)
        _copy(_places(message.segments[self.rank], mine), _elements(message.segments[self.rank], opened))
        dist.all_gather_into_tensor(everyone, mine, group=self.group)
        to, of = [], []
        for rank, segments in enumerate(message.segments):
            if rank != self.rank:
                to += _elements(segments, opened)
                of += _places(segments, everyone[rank * message.length : (rank + 1) * message.length])
        _copy(to, of)

    def collect(
        self, part: OptimizerPart, mine: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor of which each rank has what `part` says, on all ranks. Collective.

        Args:
            mine: this rank's piece of it; None on ranks without one.
            shape: of the piece of a rank that has the parameter whole, which may be any; else it is the parameter's.

        Returns:
            On the parameter's device, possibly `mine` itself; with the parameter's shape, also with its strides: fused
            optimizers go by memory order alone.
        """
        device = part.target.device
        owners = [rank for rank, own in enumerate(part.ranges) if own]
        if mine is not None:
            mine = mine.detach().to(device)
        if self.ranks == 1:
            assert mine is not None
            return mine
        if len(owners) == 1:
            like_parameter = shape == part.shape
            if mine is None:
                whole = torch.empty(shape.numel() if like_parameter else shape, dtype=dtype, device=device)
            else:
                whole = (part.flat(mine) if like_parameter else mine).contiguous()
            source = owners[0] if self.group is None else dist.get_global_rank(self.group, owners[0])
            dist.broadcast(whole, src=source, group=self.group)
            return part.joined(whole) if like_parameter else whole
        length = max(map(len, part.ranges))
        padded = torch.zeros(length, dtype=dtype, device=device)
        if mine is not None:
            padded[: len(part.own)].copy_(mine)
        everyone = torch.empty(self.ranks * length, dtype=dtype, device=device)
        dist.all_gather_into_tensor(everyone, padded, group=self.group)
        return part.joined(everyone[: sum(map(len, part.ranges))])  # only at the end slices are short


def _elements(segments: Sequence[Segment], opened: list[torch.Tensor]) -> list[torch.Tensor]:
    return [opened[one.number][one.elements.start : one.elements.stop] for one in segments]


def _places(segments: Sequence[Segment], buffer: torch.Tensor) -> list[torch.Tensor]:
    return [buffer[one.offset : one.offset + len(one.elements)] for one in segments]


def _copy(to: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, of)

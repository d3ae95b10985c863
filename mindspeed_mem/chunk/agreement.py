"""Ranks tell each other what they are about to do, as long as no recorded order says it.

Collectives of a group have to be started in one order by all its ranks. While an order is being recorded, each rank
says before each collective what it is going to do. A reduction can wait until the end of the step, so one that other
ranks do not start yet is put off; anything else that differs is an error on all ranks of the group, where without this
they would wait for each other for ever, or take one chunk's numbers for another's.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist


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


def agree(group: dist.ProcessGroup, device: torch.device, mine: Intent) -> bool:
    """Whether all ranks of `group` are about to do `mine`; False for a reduction that has to be put off.

    Collective over the group, and waits for the device. Raises ChunkOrderError on all ranks if they never will be.
    """
    return len(told(group, device, mine)) == 1


def told(group: dist.ProcessGroup, device: torch.device, mine: Intent) -> set[Intent]:
    """What the ranks of `group` are about to do, if it is `mine` or can be put off until they are; see `agree`.

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

"""Carries tensors between pipeline stages by torch.distributed, for `executor.run`.

[Note: a communicator for each line] A line goes from one stage to a neighbour, in one direction of the model. On NCCL
and HCCL the operations of a rank on one communicator run one after the other, a receive that waits holding up the
send behind it. So no rank both sends and receives in one group here, or is in it with two neighbours: the lines of one
direction are split by whether they go to a later stage, and whether the sender's number is even; the line that closes
the circle between the last and the first stage, which virtual stages need, has a group of its own. These are at most 6
groups for a pipeline, and 8 for a V.

[Note: greetings] NCCL sets up a connection when a pair first uses it, and blocks both until the other comes. An order
of passes may use lines in any order, so each line carries one greeting right after its group was made.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_mem.passes import FORWARD
from mindspeed_mem.ranks import gather
from mindspeed_mem.schedule.placement import Line


def group_name(line: Line) -> str:
    """Which group of a pipeline carries what goes along this line."""
    direction, sender, receiver = line
    way = {1: "down", -1: "up"}.get(receiver - sender, "circle")
    return f"{direction}, {way}, {'odd' if sender % 2 else 'even'}"


class _Known:
    """The groups made so far. torch owns them: held here, their threads would outlive `destroy_process_group`, which
    may end them one by one too. A pipeline made anew has new ones: what a run that failed has left on its way would
    come in the place of what is sent now."""

    world: Callable[[], Any] = staticmethod(lambda: None)
    of: weakref.WeakKeyDictionary[
        dist.ProcessGroup, dict[tuple, weakref.WeakValueDictionary[str, dist.ProcessGroup]]
    ] = weakref.WeakKeyDictionary()


def connect(
    pipeline: dist.ProcessGroup, device: torch.device | str, lines: Sequence[Line], *, backend: str | None = None
) -> dict[str, dist.ProcessGroup]:
    """The groups of these lines of this rank's pipeline, by name.

    The first call for a pipeline makes those of all pipelines and is collective: every rank of the default group has
    to make it, whatever its pipeline. They end with the default group.
    """
    world = dist.group.WORLD
    if _Known.world() is not world:
        _Known.world, _Known.of = weakref.ref(world), weakref.WeakKeyDictionary()
    known = _Known.of.setdefault(pipeline, {})
    mine = (tuple(dist.get_process_group_ranks(pipeline)), tuple(lines), backend)
    names = {group_name(line) for line in lines}
    if set(known.get(mine, ())) != names:
        everyone = gather(mine)
        timeout = _timeout(pipeline, device)
        made = {}
        for one in sorted(set(everyone), key=repr):
            for name in dict.fromkeys(map(group_name, one[1])):
                group = dist.new_group(list(one[0]), timeout=timeout, backend=one[2])
                if one == mine:
                    made[name] = group
        _greet(made, pipeline, device, lines)
        known[mine] = weakref.WeakValueDictionary(made)
    return dict(known[mine])


class Wires:
    """The lines of one stage, for tensors that all have one shape.

    Args:
        pipeline: the process group whose ranks are the stages, in their order.
        groups: what `connect` returned for it.
        shape, dtype, device: of every tensor.
        timed: ``with timed("forward-recv"):`` is put around each wait for an arrival.

    A receive is started on, and its wait orders, the current stream, as torch does it for every process group.
    """

    def __init__(
        self,
        pipeline: dist.ProcessGroup,
        groups: dict[str, dist.ProcessGroup],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        timed: Callable[[str], AbstractContextManager] = contextlib.nullcontext,
    ) -> None:
        self._groups, self._ranks, self._timed = groups, dist.get_process_group_ranks(pipeline), timed
        self._stage, self._shape, self._dtype, self._device = pipeline.rank(), tuple(shape), dtype, device

    def send(self, direction: str, receiver: int, value: Any) -> _Transfer:
        """Start to send. Raises ValueError if `value` is not the one tensor that the other stage waits for."""
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != self._shape or value.dtype != self._dtype:
            found = f"{tuple(value.shape)}, {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"stage {self._stage} made ({found}) in a {direction} pass, but stage {receiver} expects one tensor "
                f"({self._shape}, {self._dtype}): between stages a capped schedule passes on nothing else"
            )
        group = self._groups[group_name((direction, self._stage, receiver))]
        tensor = value.detach().contiguous()
        work = _begun(dist.isend(tensor, self._ranks[receiver], group=group))
        return _Transfer(tensor, work, contextlib.nullcontext())

    def receive(self, direction: str, sender: int) -> _Transfer:
        """Ask for a tensor; what comes forward requires a gradient."""
        tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device, requires_grad=direction == FORWARD)
        group = self._groups[group_name((direction, sender, self._stage))]
        work = _begun(dist.irecv(tensor, self._ranks[sender], group=group))
        return _Transfer(tensor, work, self._timed(f"{direction}-recv"))


@dataclass(frozen=True)
class _Transfer:
    """What is on its way, kept from being freed."""

    tensor: torch.Tensor
    work: dist.Work
    timed: AbstractContextManager

    def wait(self) -> torch.Tensor:
        with self.timed:
            self.work.wait()
        return self.tensor


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None  # as for ranks that are not in the group
    return work


def _greet(
    groups: dict[str, dist.ProcessGroup],
    pipeline: dist.ProcessGroup,
    device: torch.device | str,
    lines: Sequence[Line],
) -> None:
    ranks, stage = dist.get_process_group_ranks(pipeline), pipeline.rank()
    token = torch.zeros(1, device=device)
    for line in lines:
        _, sender, receiver = line
        if stage == sender:
            _begun(dist.isend(token, ranks[receiver], group=groups[group_name(line)])).wait()
        elif stage == receiver:
            _begun(dist.irecv(token, ranks[sender], group=groups[group_name(line)])).wait()


def _timeout(group: dist.ProcessGroup, device: torch.device | str) -> timedelta | None:
    """That of this group; torch has no public way to ask, and None is torch's default."""
    try:
        return group._get_backend(torch.device(device)).options._timeout
    except (AttributeError, RuntimeError):
        return None

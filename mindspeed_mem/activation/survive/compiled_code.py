"""Room for compiled code while memory is tight: nobody sees what it allocates, and it cannot run again.

So it finds room made for what code of its kind has taken before, in each pass. At first that is a guess: forward takes
several times what it is given, backward as much as forward, and gradients of weights and inputs. Where that was too
little, a step that is tried again finds more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from mindspeed_mem.activation.position import Position
from mindspeed_mem.activation.rerun.arguments import tensors_in
from mindspeed_mem.activation.survive.eviction import EvictingMover
from mindspeed_mem.activation.survive.guard_policy import GuardPolicy
from mindspeed_mem.device.op_guard import OpGuard
from mindspeed_mem.device.op_rules import storage_of

_sequence_nr = torch._C._autograd._get_sequence_nr
_GUESS = 4  # times what it is given: a loss makes two of logits in 16 bits, in 32 bits
_MORE = 2  # times the room in which code has failed


@dataclass
class _Need:
    """What code of one kind takes in one pass."""

    most: float = 0.0
    """Bytes for each byte that it is given."""
    known: bool = False
    """Whether it has taken them, and not only failed with less."""


@dataclass
class _Needs:
    forward: _Need = field(default_factory=_Need)
    backward: _Need = field(default_factory=_Need)
    """Beside what it starts from."""


class CompiledCode:
    """What is known of compiled functions and modules. Modules of one class are alike.

    Args:
        guard: makes room, while memory is tight, before what cannot run again.
        policy: knows the highest peak before somebody resets it.
        is_tight: whether memory is.
    """

    def __init__(
        self,
        guard: OpGuard,
        policy: GuardPolicy,
        mover: EvictingMover,
        position: Position,
        is_tight: Callable[[], bool],
    ):
        self._guard, self._policy, self._mover, self._position = guard, policy, mover, position
        self._backend, self._is_tight = mover.backend, is_tight
        self._needs: dict[Any, _Needs] = {}
        self._running: list[tuple[_Need, float]] = []  # the innermost last, with the room that it found
        self.reserved = 0
        """Bytes of the room that are for the backward that runs: nothing is to be copied back into them."""

    def begins_anew(self) -> None:
        """What ran in a step before runs no more."""
        self._running.clear()
        self.reserved = 0

    def ran_short(self) -> None:
        """A step has failed for lack of memory: what ran needs more than it found."""
        if self._running:
            need, room = self._running[-1]
            need.most, need.known = _MORE * room, False

    def run(self, run: Callable, call: Callable, args: tuple, kwargs: dict, module: nn.Module | None = None) -> Any:
        """``run(call, args, kwargs)`` a function that may be compiled, or what the calls of ``module`` are."""
        tensors = [one for one in tensors_in((args, kwargs)) if self._backend.owns(one)]
        given = max(sum({storage_of(one): one.nbytes for one in tensors}.values()), 1)
        needs = self._needs.setdefault(call if module is None else type(module), _Needs())

        def with_room(*args: Any, **kwargs: Any) -> Any:  # where nobody records what an operator consists of
            need = needs.forward
            takes = int((need.most if need.known else max(need.most, _GUESS)) * given)
            self._guard.room_for(takes, args, kwargs)
            before = self._begins(need, takes, given)
            depth = len(self._running)
            try:
                result = call(*args, **kwargs)
            except BaseException as error:  # as of a second run that has all that was wanted
                if not self._backend.is_out_of_memory(error):
                    del self._running[depth - 1 :]
                raise
            self._ends(depth, given, *before)
            return result

        first = _sequence_nr()
        result = run(with_room, args, kwargs)
        weights = () if module is None else module.parameters()
        gradients = sum(one.nbytes for one in weights if one.requires_grad)
        micro_batch = self._position.micro_batch
        if micro_batch is not None:
            for node in _unseen_of(result, first):
                away = functools.partial(self._mover.away, micro_batch, micro_batch.count)
                self._watch_backward(node, needs, given, gradients, away)
        return result

    def _watch_backward(
        self, node: Any, needs: _Needs, given: int, of_weights: int, away: Callable[[], tuple[int, int]]
    ) -> None:
        """``given``: the bytes of its inputs, ``of_weights``: of gradients of its weights. ``away``: of what it starts
        from, bytes on the host, and bytes to be made again."""
        begun: list[tuple[int, int, int]] = []

        def begins(gradients: tuple) -> None:
            if self._is_tight():
                need, least = needs.backward, given + of_weights
                guess = 0 if need.known else int(needs.forward.most * given)
                takes = max(int(need.most * given), guess + least)
                on_host, to_make = away()
                self._guard.room_for(on_host + to_make + takes, gradients)
                if (on_host, to_make) != (now := away()):  # for that, some of it has left
                    self._guard.room_for(sum(now) + takes, gradients)
                self.reserved = to_make + takes
                allocated, peak = self._begins(need, takes, given)
                before = allocated + to_make - self._mover.bytes_in  # what comes back is none that it takes
                begun[:] = [(len(self._running), before, peak)]

        def ends(*_: Any) -> None:
            if begun:
                self.reserved = 0
                depth, allocated, peak = begun.pop()
                self._ends(depth, given, allocated + self._mover.bytes_in, peak)

        node.register_prehook(begins)
        node.register_hook(ends)

    def _begins(self, need: _Need, takes: int, given: int) -> tuple[int, int]:
        """What is allocated, and the most that has been since the peak was reset last."""
        if not need.known:
            self._policy.note_peak()
            self._backend.reset_peak()
        self._running.append((need, takes / given))
        return self._backend.allocated() or 0, self._backend.peak() or 0

    def _ends(self, depth: int, given: int, allocated: int, peak: int) -> None:
        """Notes the most that has been allocated beyond what was then, as far as the peak shows it."""
        if depth > len(self._running):  # of a step that has failed before
            return
        need, _ = self._running[depth - 1]
        del self._running[depth - 1 :]
        highest = self._backend.peak() or 0
        seen = highest - allocated if highest > peak or not need.known else 0
        need.most, need.known = max(need.most if need.known else 0.0, seen / given), True


def _unseen_of(result: Any, first: int) -> list[Any]:
    """The nodes of the graph of ``result`` whose backward is code that no guard sees, of those made since ``first``.

    Others may come after them: views, and what runs between compiled graphs where code breaks into several.
    """
    ends = dict.fromkeys(one.grad_fn for one in tensors_in(result) if one.grad_fn is not None)
    made, left = dict[Any, None](), list(ends)
    while left:
        node = left.pop()
        if node not in made and first <= node._sequence_nr() and node.next_functions:
            made[node] = None
            left += [before for before, _ in node.next_functions if before is not None]
    return [node for node in made if isinstance(node, BackwardCFunction)] or [node for node in ends if node in made]

"""One operator at a time: where memory runs out inside it, room is made and it runs again.

A dispatch mode sees every operator that torch runs, in forward, backward and optimizer alike, and the graph task takes
it along to autograd's threads. It costs some microseconds per operator, so it is for times when memory is tight.
What is known of an operator's needs (op_needs.py) is made room for before it runs.
The few backwards that a mode would change (formulas.py) run out of its sight, with room made before them.

A collective finds room made before it begins: nothing has been sent then, and the other ranks do not notice. Where a
library finds no memory at the driver, torch's allocator gives back what it keeps before the operator runs again. On a
CPU with limited memory, a oneDNN kernel that torch has replaced by another for lack of memory counts as out of memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_mem.device import collectives, onednn
from mindspeed_mem.device.base import Backend
from mindspeed_mem.device.formulas import FormulaKeepingMode
from mindspeed_mem.device.limited_cpu import LimitedMemory
from mindspeed_mem.device.op_needs import OpNeeds
from mindspeed_mem.device.op_rules import Rule, pins, rule_of, storages, why_begun, why_computed, why_not

_MOST_DOUBLINGS = 6
_SCRATCH = 4  # times what an operator was given: about what a backward that the guard does not see takes besides


class OpGuard(FormulaKeepingMode):
    """``with guard:`` around what may run out of device memory.

    Args:
        backend: knows the device's out-of-memory error, and its random state.
        make_room: called as ``make_room(nbytes, pinned)`` when nothing of the failed operator is on the stack any more;
            ``pinned`` are the ``_cdata`` of the storages it works on. It returns the bytes it has freed, 0 where it can
            free no more, and None to have the error raised as it is. Operators that it runs are not guarded.
        give_up: called as ``give_up(operator, nbytes, why)``; the error to raise, chained to the device's own.
    """

    supports_higher_order_operators = True  # they fail as others of unknown effect do

    def __init__(
        self,
        backend: Backend,
        make_room: Callable[[int, set[int]], int | None],
        give_up: Callable[[str, int, str], Exception],
    ) -> None:
        super().__init__()
        self._backend, self._make_room, self._give_up = backend, make_room, give_up
        self._process = os.getpid()
        self.needs = OpNeeds(backend.owns)
        self.retries = 0
        """How often an operator ran again."""
        self.failures = 0
        """How often an operator failed for lack of memory: before each, a caching allocator has counted a retry."""
        self.lacks = 0
        """How often there was too little memory: inside an operator, or before one."""

    def operator(self, op: Any, args: tuple, kwargs: dict) -> Any:
        if os.getpid() != self._process:  # a data loader's, forked meanwhile: it has the mode, but not the device
            return op(*args, **kwargs)
        if pins(op, kwargs):
            return op(*args, **kwargs)
        rule = rule_of(op)
        if rule is Rule.APART:
            return self._one_by_one(op, args, kwargs)
        if rule is Rule.COLLECTIVE:
            self.room_for(collectives.scratch_bytes(op, args, kwargs, self._backend), args, kwargs)
        return self._run(op, args, kwargs)

    def before_unseen(self, nbytes: int, gradients: tuple) -> None:
        self.room_for(_SCRATCH * nbytes, gradients)

    def room_for(self, nbytes: int, args: tuple = (), kwargs: dict | None = None) -> None:
        """Make room for ``nbytes``, as far as that can be, before what has these arguments and cannot run again."""
        self.needs.left = 0
        room = self._backend.room() if nbytes else None
        if room is not None and room < nbytes:
            self.lacks += 1
            self._make_room(nbytes - room, storages(args, kwargs or {}))

    def _call(self, op: Any, args: tuple, kwargs: dict) -> Any:
        memory = getattr(self._backend, "ledger", None)
        return onednn.call(op, args, kwargs, memory) if isinstance(memory, LimitedMemory) else op(*args, **kwargs)

    def _run(self, op: Any, args: tuple, kwargs: dict) -> Any:
        key = self.needs.key(op, args, kwargs)
        nbytes = self.needs.of(key, args, kwargs)
        if nbytes:
            self._foresee(nbytes, args, kwargs)
        random = _states(self._backend, args, kwargs) if _random(op) else None
        try:
            result = self._call(op, args, kwargs)
            self.needs.saw(key, result, args, kwargs)
            return result
        except (RuntimeError, MemoryError) as error:
            if not self._backend.is_out_of_memory(error):
                raise
            caught = error
        # Only here, behind the except block: its traceback would keep the operator's tensors alive.
        wanted = self._backend.bytes_wanted(caught)
        self.needs.lacked(key, wanted, self._backend.room() if wanted else None, args, kwargs)
        return self._again(op, args, kwargs, random, caught)

    def _foresee(self, nbytes: int, args: tuple, kwargs: dict) -> None:
        """Make room for ``nbytes`` beyond the margin, unless there was so much when it was looked at last."""
        needs = self.needs
        if nbytes > needs.left:
            room = self._backend.room()
            if room is None:
                return
            lack = nbytes + needs.margin - room
            if lack > 0:
                self.lacks += 1
                self._make_room(lack, storages(args, kwargs))
                room = self._backend.room() or 0
            needs.left = room - needs.margin
        needs.left -= nbytes

    def _again(self, op: Any, args: tuple, kwargs: dict, random: Any, error: Exception) -> Any:
        wanted = self._backend.bytes_wanted(error)
        why = why_not(op, args, kwargs) or self._why_changed(op, args, kwargs, error)
        pinned = storages(args, kwargs)
        doublings = 0
        self.lacks += 1
        self.failures += 1
        while not why:
            # The frames of the attempt hold tensors. Free memory is in pieces: each time more is asked for.
            error = error.with_traceback(None)
            freed = self._make_room(max(wanted, 1) << min(doublings, _MOST_DOUBLINGS), pinned)
            if freed is None:
                raise error
            if (freed or not doublings) and self._backend.is_from_driver(error):
                freed += self._backend.give_back()
            if not freed:
                break
            doublings += 1
            self.retries += 1
            if random is not None:
                _restore(self._backend, *random)
            try:
                return self._call(op, args, kwargs)
            except (RuntimeError, MemoryError) as again:
                if not self._backend.is_out_of_memory(again):
                    raise
                self.failures += 1
                error, wanted = again, max(wanted, self._backend.bytes_wanted(again))
                why = self._why_changed(op, args, kwargs, error)
        raise self._give_up(str(op), wanted, why) from error.with_traceback(None)

    def _why_changed(self, op: Any, args: tuple, kwargs: dict, error: Exception) -> str:
        return why_computed(op, error) or (why_begun(op, args, kwargs) if self._backend.is_from_driver(error) else "")

    def _one_by_one(self, op: Any, args: tuple, kwargs: dict) -> Any:
        count = max((len(a) for a in (*args, *kwargs.values()) if _is_list(a)), default=0)
        if count < 2:
            return self._run(op, args, kwargs)

        names = [argument.name for argument in op._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs

        def pick(name: str, index: int) -> Any:
            argument = given[name]
            fits = isinstance(argument, (list, tuple)) or (name == "scalars" and isinstance(argument, torch.Tensor))
            return argument[index : index + 1] if fits and len(argument) == count else argument

        for index in range(count):
            positional = tuple(pick(name, index) for name, _ in zip(names, args, strict=False))
            self._run(op, positional, {name: pick(name, index) for name in kwargs})
        return None


@functools.cache
def _random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def _is_list(argument: Any) -> bool:
    return isinstance(argument, (list, tuple)) and bool(argument) and isinstance(argument[0], torch.Tensor)


def _states(backend: Backend, args: tuple, kwargs: dict) -> tuple[Any, ...]:
    """The random states that an operator may draw from: its own generator's, or its device's and the host's."""
    generator = kwargs.get("generator")
    with backend.on_host():
        if generator is not None:
            return generator, generator.get_state()
        index = next((one.get_device() for one in args if isinstance(one, torch.Tensor) and backend.owns(one)), None)
        if index is None and kwargs.get("device") is not None:
            index = kwargs["device"].index
        return None, backend.rng_state(index), torch.get_rng_state(), index


def _restore(backend: Backend, generator: torch.Generator | None, *states: Any) -> None:
    if generator is not None:
        generator.set_state(states[0])
    else:
        backend.set_rng_state(states[0], states[2])
        torch.set_rng_state(states[1])

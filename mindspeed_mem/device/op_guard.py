"""One operator at a time: where memory runs out inside it, room is made and it runs again.

A dispatch mode sees every operator that torch runs, in forward, backward and optimizer alike, and the graph task takes
it along to autograd's threads. It costs some microseconds per operator, so it is for times when memory is tight.

Running again must not do anything twice:

| operator | out of memory inside it |
|---|---|
| makes new tensors | runs again; a random one from the random state that it began with |
| writes its arguments, each element from what was there (add_, index_add_, addmm_) | runs again: these allocate first |
| overwrites its arguments (out=) | runs again, unless it reads them, too, or has to resize them |
| works through lists of tensors (_foreach_add_, _fused_adam_) | is run tensor by tensor, so that each runs once |
| collective, on distributed tensors, of an unknown library, or writes its arguments in another way | fails |

A collective finds room made before it begins: nothing has been sent then, and the other ranks do not notice. On a CPU
with limited memory, a oneDNN kernel that torch has replaced by another for lack of memory counts as out of memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from mindspeed_mem.device import collectives, onednn
from mindspeed_mem.device.base import Backend
from mindspeed_mem.device.limited_cpu import LimitedMemory

_MOST_DOUBLINGS = 6
# Whose operators only compute (also those of their namespaces' variants, such as flash_attn_3).
_COMPUTE = ("aten", "prims", "flash_attn", "xformers", "npu")
_COMMUNICATES = ("all_reduce", "all_gather", "all_to_all", "alltoall", "reduce_scatter", "distribute")
_LISTS = ("_foreach_", "_fused_", "_amp_foreach_")
# They allocate all they need before they write anything; pointwise operators (which torch marks as such) do, too.
_ALLOCATE_FIRST = frozenset(
    "add_ sub_ mul_ div_ addmm_ addmv_ addr_ baddbmm_ copy_ fill_ zero_ masked_fill_ masked_scatter_ clamp_ "
    "index_put_ _index_put_impl_ index_add_ index_copy_ index_fill_ scatter_ scatter_add_ "
    "put_ tril_ triu_ cumsum_ cumprod_ normal_ uniform_ bernoulli_ random_ exponential_ geometric_ "
    "log_normal_ cauchy_ as_strided_ squeeze_ unsqueeze_ transpose_ t_ detach_ requires_grad_".split()
)
# They update running statistics that their schemas do not call mutable.
_HIDDEN = frozenset("native_batch_norm cudnn_batch_norm miopen_batch_norm".split())


class Rule(Enum):
    AGAIN = "runs again"
    APART = "its tensors one by one"
    OVERWRITES = "runs again unless it reads what it writes, or resizes it"
    COLLECTIVE = "is a collective, which other ranks take part in"
    UNSURE = "changes its arguments, perhaps in part already"
    UNKNOWN = "is none of torch's own: it may communicate with other ranks"


@functools.cache
def rule_of(op: Any) -> Rule:
    """What may be done when memory runs out inside `op`."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return Rule.UNKNOWN
    name = schema.name.partition("::")[2]
    if _of(op, collectives.NAMESPACES) or (not _of(op, ("aten", "prims")) and any(word in name for word in _COMMUNICATES)):
        return Rule.COLLECTIVE
    if not _of(op, _COMPUTE):
        return Rule.UNKNOWN
    if not schema.is_mutable:
        return Rule.UNSURE if name in _HIDDEN else Rule.AGAIN
    if op.namespace != "aten":
        return Rule.UNSURE
    if name.startswith(_LISTS):
        return Rule.APART
    if all(argument.is_out for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write):
        return Rule.OVERWRITES
    if name in _ALLOCATE_FIRST or torch.Tag.pointwise in op.tags:
        return Rule.AGAIN
    return Rule.UNSURE


def _of(op: Any, namespaces: tuple[str, ...]) -> bool:
    return any(op.namespace == name or op.namespace.startswith(name + "_") for name in namespaces)


class OpGuard(TorchDispatchMode):
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
        self.retries = 0
        """How often an operator ran again."""
        self.rescued = 0
        """How many operators came through in the end."""
        self.lacks = 0
        """How often there was too little memory: inside an operator, or before a collective."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled under it; what they allocate themselves is not guarded."""
        return True

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if os.getpid() != self._process:  # a data loader's, forked meanwhile: it has the mode, but not the device
            return op(*args, **kwargs)
        if _apart(op):
            return self._one_by_one(op, args, kwargs)
        if rule_of(op) is Rule.COLLECTIVE:
            self._room_before(op, args, kwargs)
        return self._run(op, args, kwargs)

    def _room_before(self, op: Any, args: tuple, kwargs: dict) -> None:
        wanted = collectives.scratch_bytes(op, args, kwargs, self._backend)
        room = self._backend.room() if wanted else None
        if room is not None and room < wanted:
            self.lacks += 1
            self._make_room(wanted - room, _storages(args, kwargs))

    def _call(self, op: Any, args: tuple, kwargs: dict) -> Any:
        memory = getattr(self._backend, "ledger", None)
        return onednn.call(op, args, kwargs, memory) if isinstance(memory, LimitedMemory) else op(*args, **kwargs)

    def _run(self, op: Any, args: tuple, kwargs: dict) -> Any:
        random = _states(self._backend, kwargs) if _random(op) else None
        try:
            return self._call(op, args, kwargs)
        except (RuntimeError, MemoryError) as error:
            if not self._backend.is_out_of_memory(error):
                raise
            caught = error
        # Only here, behind the except block: its traceback would keep the operator's tensors alive.
        return self._again(op, args, kwargs, random, caught)

    def _again(self, op: Any, args: tuple, kwargs: dict, random: Any, error: Exception) -> Any:
        wanted = self._backend.bytes_wanted(error)
        why = _why_not(op, args, kwargs) or _computed(op, error)
        pinned = _storages(args, kwargs)
        doublings = 0
        self.lacks += 1
        while not why:
            # The frames of the attempt hold tensors. Free memory is in pieces: each time more is asked for.
            error = error.with_traceback(None)
            freed = self._make_room(max(wanted, 1) << min(doublings, _MOST_DOUBLINGS), pinned)
            if freed is None:
                raise error
            if not freed:
                break
            doublings += 1
            self.retries += 1
            if random is not None:
                _restore(self._backend, *random)
            try:
                result = self._call(op, args, kwargs)
            except (RuntimeError, MemoryError) as again:
                if not self._backend.is_out_of_memory(again):
                    raise
                error, wanted = again, max(wanted, self._backend.bytes_wanted(again))
                why = _computed(op, error)
            else:
                self.rescued += 1
                return result
        raise self._give_up(str(op), wanted, why) from error.with_traceback(None)

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
def _apart(op: Any) -> bool:
    return rule_of(op) is Rule.APART


@functools.cache
def _random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


def _is_list(argument: Any) -> bool:
    return isinstance(argument, (list, tuple)) and bool(argument) and isinstance(argument[0], torch.Tensor)


def _why_not(op: Any, args: tuple, kwargs: dict) -> str:
    """Why `op`, which has just failed, cannot run again; empty if it can."""
    rule = rule_of(op)
    if rule is Rule.OVERWRITES:
        written = [leaf for leaf in tree_iter([kwargs.get(a.name) for a in op._schema.arguments if a.is_out])]
        others = (args, [value for key, value in kwargs.items() if not any(value is w for w in written)])
        targets = {_storage(leaf) for leaf in written} - {None}
        if any(_storage(leaf) in targets for leaf in tree_iter(others)) or not all(map(_has_its_memory, written)):
            return Rule.UNSURE.value
    if rule not in (Rule.COLLECTIVE, Rule.UNSURE, Rule.UNKNOWN):
        communicates = any(type(leaf).__module__.startswith("torch.distributed") for leaf in tree_iter((args, kwargs)))
        return "works on distributed tensors: it may have communicated" if communicates else ""
    return rule.value


def _computed(op: Any, error: Exception) -> str:
    """Why `op` cannot run again if another kernel has computed it to the end; empty if it can."""
    if not isinstance(error, onednn.FellBackError) or not op._schema.is_mutable or rule_of(op) is Rule.OVERWRITES:
        return ""
    return "has changed its arguments already"


def _has_its_memory(leaf: Any) -> bool:
    """False for an output that has got its new size, but not the memory for it: run again, the operator would not
    notice and write beyond the end."""
    if not isinstance(leaf, torch.Tensor) or not leaf.numel():
        return True
    last = leaf.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True)
    )
    return (last + 1) * leaf.element_size() <= leaf.untyped_storage().nbytes()


def _storages(args: tuple, kwargs: dict) -> set[int]:
    return {storage for leaf in tree_iter((args, kwargs)) if (storage := _storage(leaf)) is not None}


def _storage(leaf: Any) -> int | None:
    if not isinstance(leaf, torch.Tensor):
        return None
    try:
        return leaf.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # subclasses without memory of their own
        return None


def _states(backend: Backend, kwargs: dict) -> tuple[Any, ...]:
    """The random states that an operator may draw from: its own generator's, or the device's and the host's."""
    generator = kwargs.get("generator")
    with backend.on_host():
        if generator is not None:
            return generator, generator.get_state()
        return None, backend.rng_state(), torch.get_rng_state()


def _restore(backend: Backend, generator: torch.Generator | None, *states: torch.Tensor) -> None:
    if generator is not None:
        generator.set_state(states[0])
    else:
        backend.set_rng_state(states[0])
        torch.set_rng_state(states[1])

"""Inline code that runs again in backward: the operations it is made of, recorded below autograd.

Code between two markers is no function that could be called once more. While it runs, every operation is noted with the
storages it reads and writes. What backward needs is made again by those operations alone on which it depends, without
autograd; each random one under the random state it found. Where something writes memory unseen (a kernel that is no
torch operation), the result is found to differ when the tape is tried out, and nothing is dropped.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_mem.activation.rerun import rng
from mindspeed_mem.activation.rerun.arguments import join, split, tensors_in
from mindspeed_mem.activation.rerun.changeable import Changeable, beside_torch, put_back
from mindspeed_mem.activation.rerun.second_run import READERS, Rerun
from mindspeed_mem.activation.rerun.state import Called, places_of
from mindspeed_mem.activation.rerun.unused_seeds import UnusedSeeds
from mindspeed_mem.activation.storage import marks
from mindspeed_mem.activation.storage.mover import Mover
from mindspeed_mem.activation.storage.records import DROPPED, Handle, Owner, Record, take_hold, whole
from mindspeed_mem.device import fast_tensors
from mindspeed_mem.device.op_rules import written_arguments, written_places

_RANDOM = torch.Tag.nondeterministic_seeded
MANAGED = "its input is memory that Megatron empties or writes over itself"
COLLECTIVES = {"c10d", "_c10d_functional"}
_PROGRAMS = 64  # of one operator that are remembered
_OF_TORCH = {"aten", "prims"}  # of these it is known whether they draw
_UNLIKELY = 0x5A  # in each byte: a finite number in all dtypes (a factor of zero still gives zero)


class Facts(NamedTuple):
    """Of an operation, whatever it works on; tape.h takes them by their places."""

    refused: str
    """Why nothing it takes part in can run again; empty if that can."""
    blank: bool
    """What it makes has no content yet."""
    written: tuple[tuple[int, str], ...]
    """Places and names of the arguments that it writes to."""
    draws: bool
    """Random numbers, or may do so."""


@functools.cache
def facts_of(function: Any) -> Facts:
    return Facts(
        refused=_why_not(function),
        blank=function.__name__.startswith(("empty", "new_empty")),
        written=written_places(function),
        draws=_RANDOM in getattr(function, "tags", ()) or function.namespace not in _OF_TORCH,
    )


def _why_not(function: Any) -> str:
    if isinstance(function, HigherOrderOperator):
        return f"it contains {function.__name__}, which takes functions"
    return "it contains a collective" if function.namespace in COLLECTIVES else ""


class Ref(NamedTuple):
    """A tensor: which storage, and how it lies in it."""

    key: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class Step(NamedTuple):
    function: Callable
    given: Any
    refs: list[Ref]
    reads: set[int]
    writes: set[int]
    results: list[int | None]
    random: Any


Programs = dict[tuple[Any, ...], Sequence[Changeable]]
"""What has been tried out: its operations, and what of it backward needed; and what they change besides."""


class Tape(Rerun, TorchDispatchMode):
    """One run of an inline operator: a mode while it runs, afterwards what can make its storages again."""

    supports_higher_order_operators = True  # it sees that there are any

    def __init__(self, layer: int, op: str, number: int, mover: Mover, called: Called | None = None):
        """``called``: notes which functions run, where nobody knows yet what they change besides."""
        TorchDispatchMode.__init__(self)
        Rerun.__init__(self, layer, op, number, mover)
        self.called = called
        self.inputs: dict[int, Handle] | None = None
        self.paused = False  # what runs now is the engine's own: it keeps, copies and looks at tensors
        self._device_type = mover.backend.tensor_type
        self._steps: list[Step] = []
        self._arguments: dict[int, torch.Tensor] = {}
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._blank: set[int] = set()
        self._keys = 0
        self._wanted: set[int] = set()  # what it may have to make again
        self._records: dict[int, weakref.ref[Record]] = {}
        self._places: Sequence[Changeable] = ()  # what a second run changes besides

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled: the tape sees nothing of them, and keeps what they return as an input."""
        return True

    # ---- the first run
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        random = rng.capture(tensors_in((args, kwargs))) if facts_of(func).draws else None
        result = func(*args, **kwargs)
        if not self.why_not:
            self._note(func, args, kwargs, result, random)
        return result

    def _note(self, func: Any, args: tuple, kwargs: dict, result: Any, random: Any) -> None:
        facts = facts_of(func)
        if facts.refused:
            self.why_not = facts.refused
            return
        if isinstance(kwargs.get("generator"), torch.Generator):
            self.why_not = "it draws from a torch.Generator of its own"
            return
        refs: list[Ref] = []
        given = split((args, kwargs), self._ref, refs)
        old = {id(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs)) if _plain(tensor)}
        outputs = tensors_in(result)
        if not all(map(_plain, outputs)):
            self.why_not = "it works on tensors that are not plain strided memory"
            return
        writes = set()
        for tensor in tensors_in(written_arguments(func, args, kwargs)):
            if not self.made(tensor.untyped_storage()):
                self.why_not = "it changes its input in place"
                return
            writes.add(self._key(tensor.untyped_storage()))
        results: list[int | None] = []
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if id(storage) in old:
                results.append(None)
                continue
            key = self._key(storage)
            results.append(key)
            if key not in self._made:
                self._made[key] = weakref.ref(storage)
                writes.add(key)
        if writes:  # what only makes views needs no second run
            self._blank = self._blank | writes if facts.blank else self._blank - writes
            self._steps.append(Step(func, given, refs, {ref.key for ref in refs}, writes, results, random))

    _note_slowly = _note  # where the other is in C++

    def _ref(self, tensor: torch.Tensor) -> Ref | None:
        """How to name this argument; None for what is kept as it is: parameters, host scalars."""
        if type(tensor) is not torch.Tensor or tensor.device.type != self._device_type or not _plain(tensor):
            return None
        storage = tensor.untyped_storage()
        found = marks.of(storage)
        if found.static:
            return None
        if found.managed:
            self.why_not = MANAGED
        known = self._keys
        key = self._key(storage)
        if key > known:
            self._arguments[key] = tensor  # as it is: its node tells who made it
        return Ref(key, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _key(self, storage: torch.UntypedStorage) -> int:
        found = marks.of(storage)
        mine = found.tape
        if mine is None or mine[0]() is not self:
            self._keys += 1
            mine = found.tape = weakref.ref(self), self._keys
        return mine[1]

    def made(self, storage: torch.UntypedStorage, owner: Owner | None = None) -> bool:
        found = marks.known(storage)
        mine = None if found is None else found.tape
        return mine is not None and mine[0]() is self and mine[1] in self._made

    def finish(
        self, hold: Callable[[torch.Tensor], Handle], known: Programs
    ) -> list[tuple[torch.UntypedStorage, int]] | None:
        """The code has run to its end. Returns the storages alive that can be made again, with their keys.

        ``hold`` keeps an input for the second run. What is not among the programs ``known`` is tried out first:
        `why_not` says it if a second run does not give the same bits. None: there is no room for one this time.
        """
        blank = self._blank
        made = [(key, reference) for key, reference in self._made.items() if key not in blank]
        alive = [(storage, key) for key, reference in made if (storage := take_hold(reference())) is not None]
        arguments, self._arguments = self._arguments, {}
        called, self.called = self.called, None  # which holds what functions took
        if alive and not self.why_not:
            program = (*[step.function for step in self._steps], *[key for _, key in alive])
            places = known.get(program)
            if places is None:
                try:
                    places = self._try_out(alive, arguments, called)
                except torch.OutOfMemoryError:
                    return None
                if not self.why_not and any(storage.nbytes() for storage, _ in alive):  # nothing shows nothing
                    known[program] = places
                    if len(known) > _PROGRAMS:  # of code that takes another way each time
                        del known[next(iter(known))]
            self._places = places
        elif not alive:
            known.setdefault((), ())  # nobody needs to look at its functions again
        if self.why_not:
            return []
        self._wanted = {key for _, key in alive}
        needed = self._slice(self._wanted)[1]
        self.inputs = {key: hold(tensor) for key, tensor in arguments.items() if key in needed}
        self.moves_inputs = any([handle.record is not None for handle in self.inputs.values()])
        return alive

    def _try_out(
        self, alive: list[tuple[torch.UntypedStorage, int]], arguments: dict[int, torch.Tensor], called: Called | None
    ) -> Sequence[Changeable]:
        """Returns what a second run changes besides: it is as before."""
        changed: dict[Changeable, bool] = {}
        there = {key: tensor.untyped_storage() for key, tensor in arguments.items()}
        wanted = {key for _, key in alive}
        steps = self._slice(wanted)[0]
        if _reads_blank_numbers(steps):
            self.why_not = "it reads memory that no torch operation has written"
            return ()
        places = beside_torch()
        if called is not None:
            places, self.why_not = places_of((), None, called)
        if self.why_not:
            return ()
        with put_back(places, changed), UnusedSeeds() as seeds:
            made = _run([_without_leftovers(step) for step in steps], wanted, there)
        for storage, key in alive:
            again = whole(made[key])
            if again.nbytes != storage.nbytes() or not (seeds.are(again) or torch.equal(again, whole(storage))):
                self.why_not = "run again, it gives other values (a kernel that is no torch operation takes part)"
        return tuple(changed)

    def _slice(self, wanted: set[int]) -> tuple[list[Step], set[int]]:
        """The steps on which the storages ``wanted`` depend, in order, and all storages these touch."""
        needed, steps = set(wanted), []
        for step in reversed(self._steps):
            if step.writes & needed:
                needed |= step.reads | step.writes
                steps.append(step)
        return steps[::-1], needed

    def stays(self, slot: int) -> None:
        """Inputs that only it needs are no longer held."""
        self._wanted.discard(slot)
        needed = self._slice(self._wanted)[1]
        self.inputs = {key: handle for key, handle in (self.inputs or {}).items() if key in needed}

    def makes(self, slot: int, record: Record) -> None:
        self._records[slot] = weakref.ref(record)

    def can_run(self) -> bool:
        return self.inputs is not None

    def records(self) -> list[Record]:
        return [r for ref in self._records.values() if (r := ref()) is not None and r.state == DROPPED]

    def held(self) -> list[Handle]:
        return list(self.inputs.values()) if self.inputs is not None else []

    # ---- the second run
    def remake(self) -> None:
        """Fill every record that is still wanted. Raises RuntimeError if an input was changed in place meanwhile."""
        records = {key: r for key, ref in self._records.items() if (r := ref()) is not None and r.state == DROPPED}
        if records:
            wanted = set(records)
            steps, needed = self._slice(wanted)
            held = {key: h.bring_back() for key, h in (self.inputs or {}).items() if key in needed}
            with ExitStack() as stack:
                if self._places:
                    stack.enter_context(put_back(self._places))
                for reader in READERS:
                    weights = tensors_in([step.given for step in steps])
                    stack.enter_context(reader([], [*weights, *held.values()]))
                    del weights
                there = {key: tensor.untyped_storage() for key, tensor in held.items()}
                del held
                made = _run(steps, wanted, there)
            for key, record in records.items():
                self.fill(record, whole(made[key]))
            self.inputs, self._steps = None, []

    def __str__(self) -> str:
        return f"{self.op} of layer {self.layer}"


def _run(
    steps: list[Step], wanted: set[int], there: dict[int, torch.UntypedStorage]
) -> dict[int, torch.UntypedStorage]:
    """Run these steps, for the storages ``wanted``; ``there`` has their inputs and gets what they make."""
    last = {key: index for index, step in enumerate(steps) for key in (*step.reads, *step.writes)}
    unused: list[list[int]] = [[] for _ in steps]  # from then on
    for key, index in last.items():
        if key not in wanted:
            unused[index].append(key)
    with torch.no_grad():
        for step, no_longer in zip(steps, unused, strict=True):
            args, kwargs = join(step.given, [fast_tensors.view_of(there[ref.key], *ref[1:]) for ref in step.refs])
            if step.random is None:
                result = step.function(*args, **kwargs)
            else:
                result = _as_it_drew(step.random, step.function, args, kwargs)
            for made, tensor in zip(step.results, tensors_in(result), strict=True):
                if made is not None:
                    there[made] = tensor.untyped_storage()
            del args, kwargs, result
            for key in no_longer:
                there.pop(key, None)
    return there


def _reads_blank_numbers(steps: list[Step]) -> bool:
    """Whether integers or booleans are read that only a kernel that is no torch operation can have written.

    They may be indices, for which a trial cannot put in just anything.
    """
    blank: set[int] = set()
    for step in steps:
        read = {ref.key for ref in step.refs if not (ref.dtype.is_floating_point or ref.dtype.is_complex)}
        if (read - step.writes) & blank:
            return True
        blank = blank | step.writes if facts_of(step.function).blank else blank - step.writes
    return False


def _without_leftovers(step: Step) -> Step:
    """For a trial: memory without content may by chance be what an unseen kernel has just filled, as it filled it."""
    if not facts_of(step.function).blank:
        return step
    return step._replace(function=functools.partial(_filled, step.function))


def _filled(function: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    made = function(*args, **kwargs)
    real = made.is_floating_point() or made.is_complex()
    whole(made.untyped_storage()).fill_(_UNLIKELY if real else 0)
    return made


def _as_it_drew(random: Any, function: Callable, args: tuple, kwargs: dict) -> Any:
    with rng.as_of(random):
        return function(*args, **kwargs)


def _plain(tensor: torch.Tensor) -> bool:
    lazy = tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()
    return tensor.layout is torch.strided and not (lazy or tensor.is_nested)

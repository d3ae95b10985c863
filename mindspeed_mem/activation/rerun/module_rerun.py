"""Operators that run again in backward instead of keeping what they produced.

A `ModuleRerun` is one run of an operator that is a module or a function: what it took, held by handles that may
themselves be on the host or be made again. Whoever saves a storage that the operator produced, in it or after it, keeps
a record without device memory; the first one that backward asks for runs the operator again and fills all that are
still wanted. The second run stops as soon as the last of them is there (early stop, as in torch.utils.checkpoint's
non-reentrant form): what backward does not need, such as a last matrix product, is not computed twice.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch.autograd.graph import saved_tensors_hooks

from mindspeed_mem.activation import hot_path
from mindspeed_mem.activation.rerun import rng, settings
from mindspeed_mem.activation.rerun.arguments import NOTHING, Slot, join, split, tensors_in
from mindspeed_mem.activation.rerun.bits import alike, nearly_same
from mindspeed_mem.activation.rerun.changeable import GENERATORS, Changeable, given, put_back, to_be_kept
from mindspeed_mem.activation.rerun.dropped import Made, Saves
from mindspeed_mem.activation.rerun.second_run import GUARDS, READERS, MadeBy, Rerun, no_shared_casts
from mindspeed_mem.activation.rerun.unused_seeds import UnusedSeeds
from mindspeed_mem.activation.storage import marks
from mindspeed_mem.activation.storage.ledger import LEDGER
from mindspeed_mem.activation.storage.micro_batch import MicroBatch
from mindspeed_mem.activation.storage.mover import Mover
from mindspeed_mem.activation.storage.records import (
    DROPPED,
    HOST,
    KEPT,
    LOADED,
    Handle,
    Layout,
    OverwrittenError,
    Owner,
    Record,
    layout_of,
    local_of,
    version_of,
)
from mindspeed_mem.device import fast_tensors, is_host_device

TAKE_OUT = "Take it out of recompute_config"
GROWS = "Make what grows in it (a table for longer inputs) as large as it gets at once, or hand it in as an argument"
RAISES = "run again, it raises"
under_way: list[ModuleRerun] = []
"""Second runs, innermost last."""


def running() -> ModuleRerun | None:
    """The operator that is being run again, the innermost: it must leave counters and statistics alone."""
    return under_way[-1] if under_way else None


class Enough(BaseException):
    """All that was wanted is there. No Exception: nobody on the way may swallow it."""


class Untried:
    """Of a first run of which nobody knows whether it repeats itself."""

    __slots__ = ("kept", "saved", "leaves", "random")

    def __init__(self) -> None:
        self.kept: set[Record] = set()
        """What it made and backward needs: kept until it has turned out to repeat itself."""
        self.saved: list[tuple[Record, Layout] | None] = []
        """Each tensor that it saved, if it made that."""
        self.leaves: list[tuple[torch.Tensor, int]] = []
        """The tensors that it took, with their versions then."""
        self.random: Any = None
        """The generators' states at its begin, where they were the same at its end."""


class ModuleRerun(Rerun):
    """One run of an operator. Holds its inputs; what it made is held weakly."""

    __slots__ = (
        "inputs",
        "outputs",
        "noted",
        "call",
        "state",
        "settings",
        "untried",
        "saved",
        "_given",
        "_random",
        "_around",
        "_places",
        "_then",
        "_noted_again",
        "_entered_again",
        "_filled",
        "_remaining",
    )

    def __init__(
        self,
        layer: int,
        op: str,
        mover: Mover,
        call: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        hold: Callable[[torch.Tensor], Handle],
        state: Any = None,
        set_to: Sequence[settings.Noted] = (),
        places: Mapping[Changeable, bool] | None = MappingProxyType({}),
    ):
        """``call(*args, **kwargs)`` is about to run.

        Args:
            hold: keeps an input for the second run.
            state: an object whose attributes it reads, which may be others by the time of the second run.
            set_to: what the modules that run are set to.
            places: what a second run changes besides, and whether that makes another value of it. None: nobody knows
                yet whether it repeats itself, see `repeats`.
        """
        super().__init__(layer, op, 0, mover)
        self.call, self.state = call, state
        attributes = None if state is None else dict(vars(state))
        self.settings = set_to
        self._places: list[Changeable] = []
        self._then: list[tuple[Changeable, Any]] = []
        if places:
            with given(args, kwargs):
                self._starts_with(places)
        self.untried = untried = Untried() if places is None else None

        inputs: list[tuple[Handle, bool, dict[str, Any]]] = []
        slots: dict[int, Slot] = {}

        def take(tensor: torch.Tensor) -> tuple[Handle, bool, dict[str, Any]] | Slot | None:
            if type(tensor) is not torch.Tensor:
                return None
            if (slot := slots.get(id(tensor))) is not None:
                return slot  # one tensor again: some ask whether query is key
            slots[id(tensor)] = Slot(len(inputs))
            if untried is not None:
                untried.leaves.append((tensor.detach(), version_of(tensor)))
            return hold(tensor), tensor.requires_grad, dict(vars(tensor))

        self._given = split((args, kwargs, attributes), take, inputs)
        self.inputs: list[tuple[Handle, bool, dict[str, Any]]] | None = inputs
        self.moves_inputs = any([handle.record is not None for handle, *_ in inputs])
        self.saved = Saves()
        self._random = rng.capture(handle.alias for handle, *_ in inputs)
        # Context variables with plain values; who collects what modules return by one (Hugging Face) has it already.
        variables = []
        for variable, value in contextvars.copy_context().items():
            if type(value) in settings.PLAIN:
                variables.append((variable, value))
        self._around = _autocast_now(), variables
        self.outputs: list[weakref.ref[Record] | None] = []
        self.noted: list[Any] = []  # see `SecondRuns.once`
        self._noted_again = 0
        self._remaining = 0
        self._entered_again = 0
        self._filled: list[tuple[weakref.ref[torch.UntypedStorage], weakref.ref[torch.UntypedStorage]]] = []

    # ---- the first run
    def enters(self, path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """An operator inside is about to run on these arguments.

        A function of autograd saves its input only after it has run: the second run can stop before it, if the input is
        all that is still wanted.
        """
        self.saved.enters(self, path, args, kwargs)

    def made(self, storage: torch.UntypedStorage, owner: Owner) -> bool:
        return owner[2] >= self.number

    def saves(self, record: Record | None, tensor: torch.Tensor) -> None:
        """The operator saves one more tensor, of the storage of ``record``."""
        mine, untried = None, self.untried  # the record, of a storage that it made
        if record is not None and (record.way_back is self if untried is None else record in untried.kept):
            mine = record
        if untried is not None:
            untried.saved.append((mine, layout_of(tensor)) if mine is not None else None)
        self.saved.adds(self, mine, tensor)

    def ends(self, draws: bool = False) -> None:
        """The operator has run to its end. ``draws``: it drew when it was tried, so that nobody knows whether it also
        draws and puts back."""
        self.mover.dropped[self.layer, self.op] += self.saved.ends()
        if not draws and rng.same(self._random, rng.capture_as(self._random)):
            if self.untried is not None:
                self.untried.random = self._random
            self._random = None  # it drew nothing, or has put them back (`repeats`)

    def returns(self, result: Any, micro_batch: MicroBatch) -> None:
        """Whoever saves what the operator returns keeps a record that this makes again."""
        for index, leaf in enumerate(tensors_in(result)):
            self.outputs.append(None)
            self._returns_one(index, leaf, micro_batch)

    def _returns_one(self, index: int, leaf: torch.Tensor, micro_batch: MicroBatch) -> None:
        part = local_of(leaf)
        if type(part) is torch.Tensor and part.layout is torch.strided and not (part.is_nested or part.is_inference()):
            storage = part.untyped_storage()
            base = leaf if leaf._base is None else leaf._base
            if isinstance(base, torch.nn.Parameter):  # it would keep this run, and what that holds, as long as it lives
                return
            made_here = base.grad_fn is None or self.made(storage, micro_batch.owner_of(leaf))
            if made_here and not _known(storage, part):
                marks.of(storage).made_by = MadeBy(self, index, part)

    _returns_one_slowly = _returns_one  # where the other is in C++

    def makes(self, slot: int, record: Record) -> None:
        self.outputs[slot] = weakref.ref(record)

    def stays(self, slot: int) -> None:
        """No input is held for one output alone."""

    def can_run(self) -> bool:
        return self.inputs is not None

    def records(self) -> list[Record | Made]:
        refs = [slot[0] for slot in self.saved.slots if slot is not None] + [
            ref for ref in self.outputs if ref is not None
        ]
        return [record for ref in refs if (record := ref()) is not None and record.state == DROPPED]

    def held(self) -> list[Handle]:
        return [handle for handle, *_ in self.inputs or ()]

    # ---- the second run
    def remake(self) -> None:
        """Run the operator again and fill every record that is still wanted.

        Raises RuntimeError if it does not compute the same as before, as a change in place of its input.
        """
        self._remaining = len(self.records())
        if not self._remaining:
            return
        try:
            tensors = [_leaf(one.bring_back().detach(), grad, names) for one, grad, names in self.inputs or ()]
        except OverwrittenError as error:
            hint = f"{self} is recomputed from it. {TAKE_OUT}, or recompute what produces its input, too"
            raise OverwrittenError(f"{error}; {hint}") from error
        self._entered_again, self.saved.again, self._filled = 0, 0, []
        try:
            self._run_as_then(tensors, self.refill, self._refill_outputs)
        finally:
            self._filled.clear()
        if self._remaining:
            self._differs(None, None)
        self.inputs, self.settings, self._given = None, (), NOTHING
        self._then.clear()

    remake_slowly = remake  # where the other is in C++

    def _refill_outputs(self, result: Any) -> None:
        for ref, tensor in zip(self.outputs, tensors_in(result), strict=False):
            if ref is not None and (record := ref()) is not None and record.state == DROPPED:
                self._fill(record, local_of(tensor))

    def refill(self, tensor: torch.Tensor) -> None:
        """The second run saves ``tensor``: its memory is that of what the first run saved then."""
        slots, index = self.saved.slots, self.saved.again
        self.saved.again = index + 1
        if index == len(slots):
            self._differs(tensor, None)
        slot = slots[index]
        if slot is None:
            return
        record, layout = slot[0](), slot[1]
        if record is None or record.state != DROPPED:
            return
        if type(tensor) is not torch.Tensor:
            tensor = local_of(tensor)
        storage = tensor.untyped_storage()
        found = tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
        if found != layout or storage.nbytes() != record.nbytes:
            self._differs(tensor, layout, record.nbytes)
        if type(record) is Made and self.mover.backend.one_stream and not self.mover.several:
            self._remaining -= 1
            record.fill(tensor, storage, layout)
        else:
            self._fill(record, tensor, layout)
        if not self._remaining:
            raise Enough

    refill_slowly = refill  # where the other is in C++

    def _run_as_then(
        self, leaves: list[torch.Tensor], pack: Callable[[torch.Tensor], None], look: Callable[[Any], None]
    ) -> None:
        """Run the operator from ``leaves`` as it ran before, and disturb nothing. If it gets to its end, ``look`` is
        called with what it returns."""
        args, kwargs, attributes = join(self._given, leaves)
        under_way.append(self)
        self._noted_again = 0
        try:
            with ExitStack() as stack, contextlib.suppress(Enough):
                self._put_back_afterwards(stack, args, kwargs, attributes)
                self.mover.begin_again(leaves)
                with_graph = torch.is_grad_enabled()
                torch.set_grad_enabled(True)
                try:
                    with saved_tensors_hooks(pack, self._no_backward):
                        context = contextvars.Context()
                        for variable, value in self._around[1]:
                            context.run(variable.set, value)
                        result = context.run(self.call, *args, **kwargs)
                finally:
                    torch.set_grad_enabled(with_graph)
                    self.mover.end_again()
                look(result)
        finally:
            under_way.pop()
            _empty(leaves)

    def _put_back_afterwards(self, stack: ExitStack, args: tuple, kwargs: dict[str, Any], attributes: Any) -> None:
        """All is as it was when the operator ran first; once ``stack`` is left, as it is now."""
        if self._places:
            stack.enter_context(given(args, kwargs))
        for place, then in self._then:
            stack.enter_context(put_back([place]))  # the next may lie in an object of then
            place.write(then)
        if self._places:
            stack.enter_context(put_back(self._places))
        for guard in GUARDS:
            stack.enter_context(guard())
        for reader in READERS:
            stack.enter_context(reader(list(modules_of(self.call)), tensors_in((args, kwargs))))
        if self._random is not None:
            stack.enter_context(rng.as_of(self._random))
        now = _autocast_now()
        for then in self._around[0]:
            if then not in now:
                stack.enter_context(torch.autocast(*then))
        for then in self._around[0]:
            if then[2]:  # it is on
                stack.enter_context(no_shared_casts())
        if not settings.are(self.settings):
            stack.enter_context(settings.as_of(self.settings))
        if self.state is not None:
            stack.enter_context(_with_attributes(self.state, attributes))

    def _no_backward(self, _: None) -> torch.Tensor:
        raise RuntimeError(f"{self} computes gradients within its forward, so it cannot be recomputed")

    # ---- once: whether it repeats itself
    def given(self) -> AbstractContextManager[None]:
        """Around what looks at what it changes."""
        return given(*self._given[:2])

    def input_changed(self) -> bool:
        """Whether the first run, of which nobody knew whether it repeats itself, has changed an input in place."""
        return self.untried is not None and any(version_of(leaf) != version for leaf, version in self.untried.leaves)

    def drew(self) -> bool:
        """Whether generators were others at the end of the run that was tried."""
        return self.untried is not None and self.untried.random is None

    def may_put_back(self) -> bool:
        """Whether generators were as before at its end, so that it drew nothing, or draws from states that it puts
        back (``torch.random.fork_rng``)."""
        return self.untried is not None and self.untried.random is not None

    def repeats(
        self, result: Any, places: Sequence[Changeable], as_drawn: bool = False
    ) -> tuple[str, dict[Changeable, bool]]:
        """Run it again at once, and compare what it returns (None: that is not made again) and what backward needs.

        Where it seems to draw nothing, generators have moved on for this run, unless ``as_drawn``: if it draws from
        states that it puts back, it gives other values then.

        Returns why it does not repeat itself (empty if it does), and those of ``places`` that the second run changed,
        and whether to another value: they are as before. ``as_drawn``, the generators are among them.
        """
        assert self.untried is not None
        saved, leaves_then = self.untried.saved, self.untried.leaves
        changed: dict[Changeable, bool] = {}
        index, nearly, otherwise = 0, False, False
        seeds = UnusedSeeds()

        def compare(one: torch.Tensor | None, other: torch.Tensor | None) -> None:
            """To the end, whatever is found: other ranks may wait for collectives."""
            nonlocal nearly, otherwise
            if otherwise or seeds.are(other) or (one is not None and other is not None and alike(one, other)):
                return
            nearly = True  # kernels that add up in any order differ by that much without recompute, too
            if one is None or other is None or is_host_device(one.device):
                otherwise = True
            else:
                otherwise = torch.are_deterministic_algorithms_enabled() or not nearly_same(one, other)

        def pack(tensor: torch.Tensor) -> None:
            nonlocal index
            if index >= len(saved):
                compare(None, tensor)
                return
            before = saved[index]
            index += 1
            if before is not None and before[0].live_handles():  # somebody still needs it
                tensor = local_of(tensor)
                compare(_content(*before, tensor), tensor)
            if index == len(saved) and result is None:
                raise Enough

        def compare_results(again: Any) -> None:
            nonlocal otherwise
            otherwise = otherwise or index != len(saved)
            for one, other in zip_longest(tensors_in(result), tensors_in(again)) if result is not None else ():
                compare(one, other)

        why_not = ""
        now = rng.capture(leaf for leaf, _ in leaves_then)
        taken = zip(leaves_then, self.inputs or (), strict=True)
        leaves = [_leaf(leaf.detach(), wants_grad, attributes) for (leaf, _), (_, wants_grad, attributes) in taken]
        if as_drawn:
            self.untried.leaves = leaves_then = []  # not wanted again, on whatever rank
        try:
            if self.untried.random is not None:
                rng.restore(self.untried.random) if as_drawn else rng.move_on(now)
            on_host = self.mover.backend.is_host  # where a mode might change bits, and no kernel has such seeds
            with put_back(places, changed), contextlib.nullcontext() if on_host else seeds:
                self._run_as_then(leaves, pack, compare_results)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            why_not = f"{RAISES} {type(error).__name__}: {error}"
        finally:
            rng.restore(now)
        if not why_not and (otherwise or (nearly and any(changed.values()))):
            names = ", ".join(dict.fromkeys(place.name for place, differs in changed.items() if differs))
            why_not = "run again, it gives other values" + (f" (each run changes {names})" if names else "")
        return why_not, changed | ({GENERATORS: True} if as_drawn else {})

    def _starts_with(self, places: Mapping[Changeable, bool]) -> None:
        """What counts its runs may do something else after many: a second run finds what the first one found."""
        self._places = list(places)
        self._then = to_be_kept(place for place, differs in places.items() if differs)

    def settle(self, why_not: str, places: Mapping[Changeable, bool]) -> None:
        """It is known now whether it repeats itself: from here on it makes again what it has made, or is forgotten."""
        untried, self.untried = self.untried, None
        self.why_not = why_not
        if why_not:
            self.inputs, self._given = None, NOTHING
            return
        self._starts_with(places)
        for record in untried.kept if untried is not None else ():
            if record.state == KEPT and record.live_handles():
                if (storage := record.storage()) is not None:
                    LEDGER.enter(storage, owned=True)  # once more, if another record of it has just left
                record.distance = 0
                self.take_if_kept(record)

    def enters_again(self, path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """In the second run, what an operator takes is there before it runs."""
        if self.untried is not None:
            return
        number, self._entered_again = self._entered_again, self._entered_again + 1
        wanted = self.saved.entries.get(number)
        if wanted is None or self.saved.entered[number] != path:
            return
        tensors = tensors_in((args, kwargs))
        for position, first in wanted:
            self._is_there(first, tensors[position])
        if not self._remaining:
            raise Enough

    def _is_there(self, first: int, tensor: torch.Tensor) -> None:
        """``tensor`` is of the storage of which the ``first`` tensor is saved later."""
        slot = self.saved.slots[first]
        if slot is not None and (record := slot[0]()) is not None and record.state == DROPPED:
            if tensor.untyped_storage().nbytes() != record.nbytes:
                self._differs(tensor, None, record.nbytes)
            self._fill(record, tensor)

    def noted_before(self) -> Any:
        """In the second run, the next of what the first one noted."""
        self._noted_again += 1
        return self.noted[self._noted_again - 1]

    def _fill(self, record: Record | Made, tensor: torch.Tensor, layout: Layout | None = None) -> None:
        self._remaining -= 1
        if isinstance(record, Made):
            record.fill(tensor, tensor.untyped_storage(), layout or layout_of(tensor))
            self.mover.saves(record, tensor, first=True)
            return
        storage = tensor.untyped_storage()
        then = record.storage  # one and the same reference in all records of a storage, even once that is gone
        if any(storage is other() and before is not then for other, before in self._filled):
            self._differs(tensor, None)  # there were two before
        self._filled.append((weakref.ref(storage), then))  # weakly: it may have to leave before the run ends
        self.fill(record, tensor)

    _fill_slowly = _fill

    def _differs(self, found: torch.Tensor | None, layout: Layout | None, nbytes: int | None = None) -> NoReturn:
        """It has saved ``found`` (None: not all) where ``layout`` and ``nbytes``, of its memory, are known."""
        what, wanted, do = "saved less", "", TAKE_OUT
        if found is not None:
            what = f"saved a tensor of shape {tuple(found.shape)} and {found.dtype}"
            there = found.untyped_storage().nbytes()
            if layout is not None and (found.dtype, found.shape) != (layout[0], layout[1]):
                wanted = f" instead of shape {tuple(layout[1])} and {layout[0]}"
            elif nbytes is not None and there != nbytes:
                wanted = f" in memory of {there} bytes instead of {nbytes}"
                do = f"{GROWS}. Or: {TAKE_OUT[0].lower()}{TAKE_OUT[1:]}"
            elif layout is not None:
                lies = found.stride(), found.storage_offset()
                wanted = f" with strides and offset {lies} instead of {layout[2:]}"
        raise RuntimeError(f"{self} {what}{wanted} when it was recomputed: it must compute the same each time. {do}")

    def __str__(self) -> str:
        return f"{self.op or 'the whole'} of layer {self.layer}" if self.op else f"layer {self.layer}"


def modules_of(call: Callable) -> Iterator[torch.nn.Module]:
    """Those that a method, or one with its first arguments bound, belongs to."""
    for one in (getattr(call, "__self__", None), *getattr(call, "args", ())):
        if isinstance(one, torch.nn.Module):
            yield one
        elif isinstance(one, functools.partial):
            yield from modules_of(one)


def _leaf(tensor: torch.Tensor, wants_grad: bool, attributes: dict[str, Any]) -> torch.Tensor:
    """``tensor`` as an input of a second run, with what a program had set on that of the first."""
    if attributes:
        vars(tensor).update(attributes)
    return tensor.requires_grad_() if wants_grad else tensor


def _empty(leaves: list[torch.Tensor]) -> None:
    """Whoever keeps something of the second run keeps its graph, and that its leaves: leave them no memory."""
    if hot_path.native is not None:
        hot_path.native.empty_all(leaves)
        return
    for leaf in leaves:
        if leaf.is_inference() or leaf.is_nested:  # in no graph, and what has no empty kind
            continue
        if leaf.layout is torch.strided:
            leaf.data = fast_tensors.empty(leaf.dtype, leaf.device)
        elif leaf.layout is torch.sparse_coo:
            leaf.data = leaf.new_empty(0)


def _content(record: Record, layout: Layout, like: torch.Tensor) -> torch.Tensor | None:
    """What ``record`` has, laid out as it was saved; None if ``like`` lies otherwise."""
    storage = record.storage()
    if storage is None or record.state in (HOST, LOADED):  # it had to leave
        record.way_back.bring_back(record)
        assert record.buffer is not None
        storage = record.buffer.untyped_storage()
    if layout_of(like) != layout or like.untyped_storage().nbytes() != storage.nbytes():
        return None
    return fast_tensors.view_of(storage, *layout)


def _known(storage: torch.UntypedStorage, tensor: torch.Tensor) -> bool:
    """Whether the engine has seen the storage with what ``tensor`` holds now: some are written again and again."""
    found = marks.known(storage)
    if found is None:
        return False
    record: Record | None = found.record() if found.record is not None else None
    return found.static or found.stays or (record is not None and record.holds(tensor))


@contextlib.contextmanager
def _with_attributes(state: Any, attributes: dict[str, Any]) -> Iterator[None]:
    now = dict(vars(state))
    vars(state).clear()
    vars(state).update(attributes)
    try:
        yield
    finally:
        vars(state).clear()
        vars(state).update(now)


def _autocast_now() -> list[tuple]:
    """What `torch.autocast` takes, for each device: type, dtype, whether it is on, and whether it keeps its casts."""
    if hot_path.native is not None:
        return hot_path.native.autocast_now()
    keeps = torch.is_autocast_cache_enabled()
    return [(one, torch.get_autocast_dtype(one), torch.is_autocast_enabled(one), keeps) for one in _autocast_kinds()]


@functools.cache
def _autocast_kinds() -> tuple[str, ...]:
    return tuple({"cpu": None, torch._C._get_accelerator().type: None})

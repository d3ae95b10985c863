"""The part of an engine whose steps do not die for lack of device memory as long as the host has room (--survive-oom).

Every saved tensor is a handle on a record, also outside the layers, and any of them can be moved to the host while an
operator waits. The guard that notices a lack of memory runs only in steps in which memory may become tight.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from mindspeed_mem.activation import regions
from mindspeed_mem.activation.plan_in_force import PlanInForce
from mindspeed_mem.activation.position import Position
from mindspeed_mem.activation.saved_tensors import SavedTensors
from mindspeed_mem.activation.survive.compiled_code import CompiledCode
from mindspeed_mem.activation.survive.eviction import EvictingMover
from mindspeed_mem.activation.survive.guard_policy import GuardPolicy
from mindspeed_mem.activation.wording import Wording
from mindspeed_mem.device import Backend, delegation, onednn
from mindspeed_mem.device.op_guard import OpGuard

logger = logging.getLogger(__name__)

_AT_ONCE = 100  # at least this part of the device's memory is freed at a time: each lack costs an attempt
_MOST_SPARE = 10  # this part of it is kept free at most, for an allocator that has to retry
_NAMED = 5  # operators in a message


class NoRoomError(torch.OutOfMemoryError):
    """Device memory does not suffice even with everything on the host that can be there. The message says what was
    needed, what holds the memory, and what to try."""


class Survival:
    """Makes room when an operator lacks some, and says what can be done where there is none to make."""

    def __init__(
        self, position: Position, in_force: PlanInForce, mover: EvictingMover, saved: SavedTensors, wording: Wording
    ):
        self.mover, self.backend, self._wording = mover, mover.backend, wording
        self._position, self._in_force, self._saved = position, in_force, saved
        self.guard = OpGuard(self.backend, self.make_room, self.no_room)
        self.policy = GuardPolicy(self.backend)
        self._compiled = CompiledCode(self.guard, self.policy, mover, position, lambda: self._tight)
        self.forwards = 0
        """How many forwards of micro-batches have begun."""
        self.advises_recompute = True
        """Whether messages say what to recompute; not where that is found out."""
        self.guarded_steps = 0
        self._guarding = self._tight = False
        self._rest: tuple[contextlib.ExitStack, int, int] | None = None  # of what runs without the guard; see `given`
        self._given: Counter[tuple[str, bool]] = Counter()  # elements in this part of a step; see `given`

    def knows_layers(self) -> None:
        """The plan has been made: by now the device is chosen, and the model there."""
        self.backend.keep_reserve()
        self.policy.varies = any("experts" in path.split(".") for _, path in self._in_force.modules)

    def begins_anew(self, planned: bool) -> None:
        """Steps are of another kind from now on; ``planned``: they should fit. What an allocator keeps, in pieces of
        the steps before, goes back to the device."""
        self.policy.forget(planned)
        self.forget_lacks()
        self.backend.give_back()

    def forget_lacks(self) -> None:
        """What has been lacking so far says nothing about the steps that come."""
        self.guard.needs.forget()

    # ---- when memory runs out
    @contextlib.contextmanager
    def guarded(self, parts: int = 1, outgrown: bool = False) -> Iterator[None]:
        """Around what may lack memory: a step's forwards and backwards, or its optimizer; two ``parts``: both.
        ``outgrown``: models are given more than ever before."""
        if self._guarding:  # by somebody further out
            yield
            return
        tight = self.policy.begins(parts, outgrown) or self._in_force.everything
        self._guarding, before = True, self.guard.lacks
        self._given.clear()
        retries, failures = self.backend.allocation_retries(), self.guard.failures
        completed = False
        try:
            with contextlib.ExitStack() as inside:
                if tight:
                    self._tighten(inside)
                else:
                    inside.enter_context(onednn.noticed(getattr(self.backend, "ledger", None)))
                    self._rest = inside, *_here()
                yield
            completed = True
        except (RuntimeError, MemoryError) as error:
            if self.backend.is_out_of_memory(error):
                self._compiled.ran_short()
            raise
        finally:
            self._guarding = self._tight = False
            self.mover.spare = self._rest = None
            retries = self.backend.allocation_retries() - retries
            self._leave_more(retries)
            if completed and retries > self.guard.failures - failures:  # for some there was memory
                self._advise_against_pieces()
            self.policy.ends(self.guard.lacks > before)

    def _tighten(self, inside: contextlib.ExitStack) -> None:
        inside.enter_context(self.guard)
        self._tight, self.guarded_steps = True, self.guarded_steps + 1
        self._compiled.begins_anew()
        self.mover.spare = lambda: self.guard.needs.margin + self._compiled.reserved

    def given(self, tensors: Iterable[torch.Tensor], told_by: str = "models") -> None:
        """A model, or a layer, begins to run on these: callers may be wrong about sizes, and other layers may run than
        before. The rest of a step that is not guarded is, if they are more than ever for the models, or the layers."""
        if not self._guarding:  # as in an evaluation outside of steps
            return
        dense = [one for one in tensors if not one.is_nested and one.layout is torch.strided]
        longest = max((size for one in dense for size in one.shape[1:]), default=0)
        keeps = torch.is_grad_enabled()
        here = sum(one.numel() for one in dense)
        self._given[told_by, keeps] += here
        outgrown = self.policy.outgrown(self._given[told_by, keeps], longest, here, keeps=keeps, told_by=told_by)
        if not outgrown or self._rest is None or self.policy.is_first:
            return
        inside, *there = self._rest
        if there == [*_here()] and not regions.in_transform():  # else it would not be the first to be left
            self._rest = None
            self._tighten(inside)

    def _leave_more(self, retries: int) -> None:
        """The allocator has had to retry so often: what it keeps is in pieces, so more has to be free."""
        limit = self.backend.limit()
        if retries > 1 and limit:
            self.guard.needs.margin = min(self.guard.needs.margin + limit // _AT_ONCE, limit // _MOST_SPARE)

    def _advise_against_pieces(self) -> None:
        setting = self.backend.against_pieces()
        if setting is not None:
            self._in_force.tell(
                logging.WARNING,
                "torch's allocator had memory in pieces too small for a request, and gave all that it kept back to the "
                f"driver, which takes time; where a job starts with {setting}, there are fewer",
            )

    @contextlib.contextmanager
    def moving_everything(self) -> Iterator[None]:
        """Inside, whatever is saved is moved, whatever the plan says: the second attempt at a step."""
        self._in_force.everything = True
        try:
            yield
        finally:
            self._in_force.everything = False

    def run_compiled(
        self, run: Callable, call: Callable, args: tuple, kwargs: dict, module: nn.Module | None = None
    ) -> Any:
        """``run(call, args, kwargs)`` a function that may be compiled, or what the calls of ``module`` are: what that
        allocates, in forward and in backward, no guard sees."""
        if not self._tight:
            return run(call, args, kwargs)
        return self._compiled.run(run, call, args, kwargs, module)

    def make_room(self, nbytes: int, pinned: set[int]) -> int | None:
        """As `EvictingMover.make_room`, a good deal at a time."""
        limit = self.backend.limit()
        return self.mover.make_room(max(nbytes, limit // _AT_ONCE if limit else 0), pinned)

    def no_room(self, op: str, nbytes: int, why: str) -> NoRoomError:
        """What to raise when ``nbytes`` (0: unknown) are needed in ``op``; ``why`` nothing more was tried, if that is
        not for lack of what could leave."""
        holders = self.mover.on_device()
        slabs = self.mover.slabs
        where = self._position.running()
        lines = [  # it begins as torch's errors do: training loops look for these words, to go on with a smaller batch
            f"{self.backend.tensor_type.upper()} out of memory. "
            f"{nbytes or 'An unknown number of'} bytes of device memory are needed in {op}"
            + (f" ({self._name(*where)})" if where is not None else "")
            + (f", which {why}" if why else ", and no activation that could leave is left"),
            self._in_use(nbytes) + f"; {holders.total()} bytes are held by activations that backward needs",
            f"on the host: {slabs.bytes_in_use} bytes of activations"
            + (f", budget {slabs.limit_bytes} bytes" if slabs.limit_bytes is not None else "")
            + (": it is full" if self.mover.host_full else ""),
        ]
        named = [f"{self._name(*who)} {n} bytes" for who, n in holders.most_common(_NAMED)]
        lines.append("largest activations on the device: " + ("; ".join(named) or "none"))
        words = self._wording
        more = f"raise {words.host_memory}; " if self.mover.host_full else ""
        again = f"{words.recompute_all}; " if self.advises_recompute else ""
        lines.append(f"try: {more}{words.smaller}; {again}{words.more_ranks}")
        return NoRoomError("\n  ".join(lines))

    def _in_use(self, nbytes: int) -> str:
        """What is in use now: not always when ``nbytes`` were asked for."""
        allocated, limit = self.backend.allocated(), self.backend.limit()
        if allocated is None or limit is None:
            return f"in use: {'an unknown number of' if allocated is None else allocated} bytes"
        text = f"in use: {allocated} of {limit} bytes"
        if 0 < nbytes <= limit - allocated:
            text += ", so the rest was in pieces, in use elsewhere, or has been freed since"
        return text

    def _name(self, layer: int, op: str) -> str:
        inside = 0 <= layer < self._in_force.num_layers  # what follows the last layer has a number as well
        return f"{op or 'the layer'} of layer {layer}" if inside else "outside the layers"

    def explained(self, error: Exception) -> NoRoomError:
        """The error that says what was needed and what to try, for one that no guard has seen."""
        if isinstance(error, NoRoomError):
            return error
        why = "no guard saw: compiled code, or a step in which memory had not been tight before"
        failed = self.no_room("an operation", self.backend.bytes_wanted(error), why)
        failed.__cause__ = error
        return failed

    # ---- what is saved outside the layers: embedding, loss
    @contextlib.contextmanager
    def holding_all(self) -> Iterator[None]:
        """Around the forward of a micro-batch, loss included; layers have their own hooks inside."""
        self.forwards += 1
        hooks = saved_tensors_hooks(self._saved.pack_outside, self._saved.unpack)
        try:
            hooks.__enter__()
        except RuntimeError:  # somebody has disabled hooks here
            yield
            return
        try:
            yield
        finally:
            hooks.__exit__()


def _here() -> tuple[int, int]:
    """The thread, and how many dispatch modes there are in it."""
    return threading.get_ident(), torch._C._len_torch_dispatch_stack()


_asks: set[str] = set()  # the devices whose allocator asks for room before it fails


def ask_before_failing(backend: Backend, of_the_moment: Callable[[], Survival | None]) -> None:
    """Where there is an allocator that can, let it ask for room: once for each device."""
    if backend.type in _asks:
        return

    def make_room(nbytes: int) -> int:
        survival = of_the_moment()
        return survival.make_room(nbytes, set()) or 0 if survival is not None else 0

    if delegation.ask_through_allocator(backend, make_room):
        _asks.add(backend.type)
        logger.info("device memory is asked for by the delegating allocator (python -m mindspeed_mem build-allocator)")

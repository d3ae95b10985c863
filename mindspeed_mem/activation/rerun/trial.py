"""Whether an operator repeats itself: its first run is compared with a second one, at once and from the same inputs.

What draws from a generator of its own, counts its runs or reads what it changes makes other values in backward than in
forward, and gradients would be wrong. So what the first run makes is kept until the second has shown the same bits:
no more memory than the second run of backward needs. What does not repeat itself stays kept. Where an operator contains
collectives, the ranks that take part in them try it at the same call, and agree.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from mindspeed_mem.activation import hot_path
from mindspeed_mem.activation.agreement import collectives_begun, highest
from mindspeed_mem.activation.rerun import rng, settings
from mindspeed_mem.activation.rerun.arguments import tensors_in
from mindspeed_mem.activation.rerun.changeable import Changeable, argument_with_graph, tensors_given
from mindspeed_mem.activation.rerun.dropped import Program, Saves
from mindspeed_mem.activation.rerun.module_rerun import RAISES, ModuleRerun, modules_of
from mindspeed_mem.activation.rerun.set_around import Places, set_by_callers
from mindspeed_mem.activation.rerun.state import Called, places_of
from mindspeed_mem.activation.storage import marks

logger = logging.getLogger(__name__)
_DEPARTURES = 8
_ELSEWHERE = "it does not repeat itself on another rank that runs its collectives"
_ALONE = (
    "%s of layer %d was run a second time, to see whether it repeats itself: %s; where it does not on the other ranks "
    "that run its collectives, they wait for this one or fail: take it out of the plan"
)


class Verdict(NamedTuple):
    """What is known of an operator."""

    why_not: str
    places: dict[Changeable, bool]
    """What it changes besides its result, to be put back after it has run again; and whether to another value."""
    draws: bool
    """Whether generators were others when it had run."""


class Known(NamedTuple):
    """What is known of an operator whose modules are in certain modes."""

    settings: list[settings.Noted]
    """What its modules are set to."""
    flags: tuple[bool, ...]
    """By which it is told apart from what it is in another mode."""
    verdict: Verdict | None
    """None: it has not been tried with these flags yet."""
    program: Program | None
    """What it saves; None: that is not known yet, or varies."""


class TriedOperator:
    """What has been found of an operator, by the training flags of its modules: it may do more in training."""

    __slots__ = ("_roots", "_modules", "_verdicts", "_refused", "_programs", "_seen", "__weakref__")

    def __init__(self, call: Callable):
        self._roots = [weakref.ref(root) for root in modules_of(call)]
        self._modules: list[settings.Kind] = []
        self._forget()
        self._look()

    def _forget(self) -> None:
        self._verdicts: dict[tuple[bool, ...], Verdict] = {}
        self._refused = False  # with any flags
        self._programs: dict[tuple[bool, ...], Program] = {}
        self._seen: dict[tuple[bool, ...], tuple[Program, int]] = {}  # the last one, and how many before it differed

    def _look(self) -> None:
        """Its modules, or what they have, may be others."""
        before = self._modules
        roots = [root for reference in self._roots if (root := reference()) is not None]
        self._modules = now = settings.kinds_of((module for root in roots for module in root.modules()), before)
        # the references themselves: they compare equal where modules say that they do
        if len(before) != len(now) or any(one[0] is not other[0] for one, other in zip(before, now, strict=True)):
            self._forget()

    def _flags(self) -> tuple[bool, ...]:
        if not settings.still_apply(self._modules):
            self._look()
        return settings.modes(self._modules)

    def as_it_is(self) -> Known:
        """What is known of it with its flags as they are now."""
        flags = self._flags()
        return Known(settings.note(self._modules), flags, self._verdicts.get(flags), self._programs.get(flags))

    def ran(self, flags: tuple[bool, ...], saved: Saves) -> None:
        """It has run: two runs alike show what it saves, a later one may show that it varies."""
        if saved.program is not None:
            if len(saved.slots) != len(saved.program.saves):
                self._programs.pop(flags, None)
            return
        before, departures = self._seen.get(flags, (None, 0))
        if departures >= _DEPARTURES:
            return
        seen = saved.learn()
        if seen == before:
            self._programs[flags] = seen
        self._seen[flags] = seen, departures + (seen != before)

    def changes_itself(self, noted: Sequence[settings.Noted]) -> list[settings.Noted]:
        """It has run from these: returns, and notes from here on, those that it has left as they were."""
        noted = settings.of_others(noted)
        self._modules = [kind for _, kind, *_ in noted]
        return noted

    def refused(self) -> bool:
        """Whether it is known not to repeat itself as it is now."""
        if not self._refused:
            return False
        flags = self._flags()  # which may forget verdicts
        verdict = self._verdicts.get(flags)
        return verdict is not None and bool(verdict.why_not)

    def judge(self, flags: tuple[bool, ...], verdict: Verdict) -> None:
        self._refused = self._refused or bool(verdict.why_not)
        self._verdicts[flags] = verdict


class Trials:
    """The operators that have run so far, as long as their modules live."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Any, dict[tuple[int, str], TriedOperator]] = weakref.WeakKeyDictionary()
        self._others: dict[tuple[int, str], TriedOperator] = {}  # functions
        self.latest: dict[tuple[int, str], weakref.ref[TriedOperator]] = {}
        """Those asked for last, which may be gone with their model."""

    def operator(self, layer: int, path: str, call: Callable, state: Any = None) -> TriedOperator:
        owner = next(modules_of(call), state)
        known = self._others if owner is None else self._of.get(owner)
        if known is None:
            known = self._of[owner] = {}
        found = known.get((layer, path))
        if found is None:
            found = known[layer, path] = TriedOperator(call)
        self.latest[layer, path] = weakref.ref(found)
        return found


class Trial(AbstractContextManager):
    """Around the first run of ``rerun``, then `settle`."""

    def __init__(
        self, of: TriedOperator, flags: tuple[bool, ...], rerun: ModuleRerun, partners: Set[int], device_type: str
    ):
        self._of, self._flags, self._rerun = of, flags, rerun
        self._partners, self._device_type = partners, device_type
        self._called = Called()

    def __enter__(self) -> None:
        self._begun = collectives_begun(self._partners)
        self._weights = [(one, one._version) for root in modules_of(self._rerun.call) for one in _weights_of(root)]
        with self._rerun.given():
            self._before = tensors_given()
        self._first = torch._C._autograd._get_sequence_nr()
        self._called.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._called.__exit__(*exc_info)

    def settle(self, result: Any, shows: bool) -> None:
        """The first run has returned ``result`` (None: that is not made again): run again, and let what is made again
        go. ``shows``: it had something to work on; nothing shows nothing."""
        with self._rerun.given():
            self._settle(self._rerun, result, shows)

    def _settle(self, rerun: ModuleRerun, result: Any, shows: bool) -> None:
        rerun.settings = self._of.changes_itself(rerun.settings)
        now = collectives_begun(self._partners)
        shared = [group for group, number in now.items() if number is None or number != self._begun.get(group)]
        why_not = rerun.why_not or ("it changes its input in place" if rerun.input_changed() else "")
        roots = list(modules_of(rerun.call))
        why_not = why_not or rng.out_of_reach(module for root in roots for module in root.modules())
        if any(weight._version != version for weight, version in self._weights):
            why_not = why_not or "it changes its parameters"
        self._weights.clear()
        if not why_not and (argument := argument_with_graph(self._first, self._before)):
            why_not = f"it keeps what it computes in {argument}"
        found: list[Changeable] = []
        around: list[Changeable] = []
        if not why_not:
            found, why_not = places_of(roots, rerun.state, self._called)
        if not why_not:
            around, why_not = set_by_callers(roots, self._called)
        places: dict[Changeable, bool] = {}
        why_not = self._agreed(why_not, shared)
        if not why_not and not in_managed_memory(result):
            why_not, places = rerun.repeats(result, found)
            if shared and why_not.startswith(RAISES):  # to be known if what follows never ends
                logger.warning(_ALONE, rerun.op or "the layer", rerun.layer, why_not)
            [once_more] = highest([int(bool(why_not) and rerun.may_put_back())], shared, self._device_type)
            if once_more:
                why_not, places = rerun.repeats(result, found, as_drawn=True)
            why_not = self._agreed(why_not, shared)
        if not why_not:
            places = Places(places, around)
        [anywhere] = highest([int(shows)], shared, self._device_type)
        draws = rerun.drew()
        rerun.settle(why_not, places)
        if why_not or anywhere:
            self._of.judge(self._flags, Verdict(why_not, places, draws))

    def _agreed(self, why_not: str, shared: list) -> str:
        [found] = highest([int(bool(why_not))], shared, self._device_type)
        return why_not or (_ELSEWHERE if found else "")


def _weights_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [one for one in module.parameters() if type(one) is torch.nn.Parameter and not one.is_inference()]


def in_managed_memory(given: Any) -> bool:
    """Whether somebody else empties, refills or writes over a tensor among these: as an input it may not be there when
    it is needed, and a second run would write over what the first has returned (Megatron's own gathers do)."""
    if hot_path.native is not None:
        return hot_path.native.has_managed(given)
    plain = (leaf.untyped_storage() for leaf in tensors_in(given) if leaf.layout is torch.strided)
    return any(map(marks.is_managed, plain))

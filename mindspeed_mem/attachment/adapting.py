"""A plan for an attached model is found while it trains: its steps are the training calls of an `Adaptation`.

No schedule says what a step will be. So a step is taken to be like those before it: as many micro-batches, of inputs
as large as the largest so far, and as many steps of optimizers between them. A call ends where the last of these
begins, or where the step ends without it. Once it has run, one of smaller inputs is no part of what is measured.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from mindspeed_mem import __version__, ranks
from mindspeed_mem.activation import regions
from mindspeed_mem.activation.engine import Engine
from mindspeed_mem.activation.storage.records import local_of
from mindspeed_mem.adaptive.run.adaptation import SETTLED, Adaptation, Ranks
from mindspeed_mem.adaptive.run.kept_plan import digest
from mindspeed_mem.adaptive.run.training_call import Call
from mindspeed_mem.attachment.optimizers import before_step_of
from mindspeed_mem.nested import tensors_in

logger = logging.getLogger(__name__)

_GROWN = 1.05
"""Inputs are of another size if they are so many times as large as any before."""
_ASKED = 10
"""Under a settled plan the ranks tell each other every so many steps how large their inputs are."""


class _Size(NamedTuple):
    """Of a step's micro-batches."""

    each: int = 0
    """Numbers in the input of the largest."""
    samples: int = 0
    """The first size of that input."""
    micro_batches: int = 0

    def beside(self, other: _Size) -> _Size:
        each, samples = max(self[:2], other[:2])
        return _Size(each, samples, max(self.micro_batches, other.micro_batches))


class Steps:
    """Follows the steps of one attached model. ``target``: the file that keeps the plan; None: none does."""

    def __init__(self, model: nn.Module, engine: Engine, target: Path | None):
        self._model, self._engine = model, engine
        self._adaptation = Adaptation(engine, target)
        self._seen = _Size()  # in all steps so far,
        self._last = _Size()  # in the last, or the one that runs
        self._planned = _Size()  # what ranks have agreed on
        self._inside = self._warned = self._running = self._sizeless = False
        self._trains = False  # the step that runs, as far as it has shown
        self._now = 0  # micro-batches of the step that runs
        self._trained = 0  # those of them that an optimizer's step has followed
        self._parts, self._parts_before = 0, 1  # of a step: each ends with an optimizer's; of the one before it
        self._number = 0
        engine.passes.given = self._given

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Around a step."""
        self._begin()
        self._nothing_yet()
        self._inside, completed = True, False
        try:
            with before_step_of(self._model, self._optimizer_begins):
                yield
            completed = True
        finally:
            self._inside = False
            self._end(completed and self._trains)  # an evaluation is none
            if completed and self._parts:
                self._parts_before = self._parts
            self._last = self._last.beside(_Size(micro_batches=self._now))
            self._seen = self._seen.beside(self._last)

    def begin_again(self) -> None:
        """The step that runs is tried once more: what it ran so far is no part of it."""
        self._nothing_yet()
        if self._running:
            self._adaptation.begin_again()

    def _nothing_yet(self) -> None:
        self._now = self._trained = self._parts = 0
        self._trains, self._last = False, _Size()

    def _optimizer_begins(self) -> None:
        """Not a call's end: one in the middle of a backward, or before the step's forwards (one that takes a closure
        runs these itself)."""
        self._trains = True
        if torch._C._current_graph_task_id() == -1 and self._now > self._trained:
            self._trained = self._now
            self._parts += 1
            if self._parts >= self._parts_before:
                self._end(True)

    def _begin(self) -> None:
        self._number += 1
        adaptation = self._adaptation
        if self._number == 1 or adaptation.is_over:  # nothing is known of steps yet
            return
        ran = None
        if adaptation.state != SETTLED or self._number % _ASKED == 0:
            ran = self._agree()
        if not self._planned.micro_batches:
            return
        if not self._planned.each and not self._sizeless:
            self._say_sizeless()
        call = _call(self._planned)
        here = Ranks(ranks.number(), 0, ranks.gather, ranks.to_first, self._engine.in_force.partners)
        adaptation.begin(call, here, lambda: self._facts(call), ran)
        self._running = True

    def _end(self, completed: bool) -> None:
        if self._running:
            self._running = False
            self._adaptation.end(completed, self._now)

    def _say_sizeless(self) -> None:
        """A plan kept for nobody knows what size is none for this one."""
        self._sizeless, self._adaptation.target = True, None
        if ranks.number() == 0:
            logger.warning(
                "plan='auto' finds no tensor in what the model is given, so that it does not see how large inputs are: "
                "larger ones are not profiled again, and no kept plan is used and none kept; give the model tensors, "
                "or mappings, lists, tuples or dataclasses of them"
            )

    def _agree(self) -> Call | None:
        """All ranks plan for the largest step that any has seen; a little more is no other size. Returns the largest
        that any has just run; None: that was an evaluation."""
        seen = last = _Size()
        for theirs, latest in ranks.gather((self._seen, self._last)):
            seen, last = seen.beside(theirs), last.beside(latest)
        if seen.each > _GROWN * self._planned.each or seen.micro_batches > self._planned.micro_batches:
            self._planned = self._planned.beside(seen)
        return _call(last) if last.micro_batches else None

    def _given(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """The model runs with gradients on this."""
        if not self._inside:
            if not self._warned:
                logger.warning("plan='auto' has no effect on steps outside `with attached.step():`")
            self._warned = True
            return
        self._now, self._trains = self._now + 1, True
        tensors = [one for one in tensors_in((args, kwargs)) if one.dim()]
        if tensors:
            largest = max(tensors, key=torch.numel)
            self._last = self._last.beside(_Size(largest.numel(), largest.size(0)))

    def _facts(self, call: Call) -> dict[str, Any]:
        """What a kept plan must have been made for."""
        engine = self._engine
        device = engine.backend.describe()
        parameters = [
            (name, str(one.dtype), tuple(local_of(one).shape), one.requires_grad)
            for name, one in self._model.named_parameters()
        ]
        modules = [(name, type(one).__qualname__) for name, one in self._model.named_modules()]
        layers = {layer: sorted(paths) for layer, paths in sorted(regions.tagged_layers().items())}
        split = any(local_of(one) is not one for one in self._model.parameters())
        return {
            **{name: getattr(call, name) for name in ("seq_length", "micro_batch_size", "micro_batches")},
            "device_limit": engine.backend.nominal_limit(),
            "host_limit": engine.mover.slabs.limit_bytes,
            "device": f"{device['type']} {device.get('device', '')}".strip(),
            "ranks": len(engine.in_force.partners) or 1,
            "layers": engine.in_force.num_layers,
            "model": digest(modules, parameters, layers),
            "states_are_split": split,
            "torch": torch.__version__,
            "mindspeed_mem": __version__,
        }


def _call(size: _Size) -> Call:
    samples = max(size.samples, 1)
    return Call(1, 1, None, None, size.each // samples, samples, size.micro_batches)

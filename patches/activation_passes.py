"""Tells the engine which pass runs: what direction, micro-batch and model chunk. Before a call the plan is made."""

from __future__ import annotations

import functools
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation.engine import Engine
from mindspeed_mem.passes import Listener, Precedence, ScheduleCall
from mindspeed_mem.patches import _agreement
from mindspeed_mem.patching import join
from mindspeed_mem.ranks import gather


def _number_of(model: torch.nn.Module) -> int:
    """The models in the order in which they first came here: unlike their ids, the same on all ranks."""
    if model not in _numbers:
        _numbers[model] = next(_serial)
    return _numbers[model]


_numbers: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()
_serial = count()


class ActivationPasses(Listener):
    precedence = Precedence.ACTIVATION

    def __init__(self) -> None:
        self._engines: list[Engine | None] = []  # of the calls that run: a step may contain an evaluation

    def begin_call(self, call: ScheduleCall) -> None:
        engine = engines.current()
        if engine is not None:
            self._begin(engine, call)
        self._engines.append(engine)

    def _begin(self, engine: Engine, call: ScheduleCall) -> None:
        if torch.is_grad_enabled() or not call.forward_only:  # evaluation saves nothing, and may be a rank's own
            _agreement.agree(engine, call.models)
        in_pipeline = call.stages > 1 and not call.forward_only
        key = (*call.kind, _number_of(call.models[0]))
        of_pipeline = functools.partial(gather, group=call.pipeline)  # other pipelines may have calls of other kinds
        engine.passes.begin_schedule(key, call.passes(), call.stage if in_pipeline else None, of_pipeline)

    def end_call(self, call: ScheduleCall, completed: bool) -> None:
        if (engine := self._engines.pop()) is not None:
            engine.passes.end_schedule(completed)

    def begin_forward(self, micro_batch: int | None, model_chunk: int) -> None:
        if (engine := engines.current()) is not None:
            engine.passes.begin_forward(micro_batch, model_chunk)

    def end_forward(self, output: Any) -> None:
        if (engine := engines.current()) is not None:
            engine.passes.end_forward(output)

    def begin_backward(self, output: Any) -> None:
        if (engine := engines.current()) is not None:
            engine.passes.begin_backward(output)

    def end_backward(self) -> None:
        if (engine := engines.current()) is not None:
            engine.passes.end_backward()


join("mindspeed_mem.passes:LISTENERS", ActivationPasses(), declared_by=__name__)

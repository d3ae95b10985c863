"""Says where a call over the chunks begins and ends, and of what kind it is.

A script that does not overlap reductions gives Megatron no function to tell micro-batches apart, so it gets one here:
gradients are added up over all micro-batches before they are reduced, as Megatron does it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from mindspeed_mem.passes import Listener, Precedence, Run, ScheduleCall
from mindspeed_mem.patching import join
from mindspeed_mem.zero.buffers import runtime
from mindspeed_mem.zero.buffers.runtime import Runtime


def _followed(call: ScheduleCall) -> list[Any]:
    found = [getattr(model, "chunks_of_model", None) for model in call.models]
    return [chunks for chunks in found if chunks is not None]


class ChunkPasses(Listener):
    precedence = Precedence.CHUNKS

    def __init__(self) -> None:
        self._runtimes: list[Runtime | None] = []  # of the calls that run: a step may contain an evaluation

    def around_call(self, call: ScheduleCall, run: Run) -> Any:
        if runtime.current() is None or not _followed(call):
            return run(call)
        with _micro_batches_told_apart(call.models):
            return run(call)

    def begin_call(self, call: ScheduleCall) -> None:
        now = runtime.current()
        if now is not None:
            now.begin(call.kind, _followed(call), call.forward_only)
        self._runtimes.append(now)

    def end_call(self, call: ScheduleCall, completed: bool) -> None:
        if (now := self._runtimes.pop()) is not None:
            now.end(completed)


@contextlib.contextmanager
def _micro_batches_told_apart(models: Sequence[Any]) -> Iterator[None]:
    from megatron.core.utils import get_model_config

    config = get_model_config(models[0])
    if config.no_sync_func is not None:
        yield
        return
    config.no_sync_func = [model.no_sync for model in models] if len(models) > 1 else models[0].no_sync
    try:
        yield
    finally:
        config.no_sync_func = None


join("mindspeed_mem.passes:LISTENERS", ChunkPasses(), declared_by=__name__)

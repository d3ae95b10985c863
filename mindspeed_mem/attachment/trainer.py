"""Hugging Face's Trainer, by a callback. transformers is imported when one is made."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Mapping
from typing import Any

from mindspeed_mem.attachment.attached import Attached, attach
from mindspeed_mem.attachment.checks import Plan
from mindspeed_mem.plan import MemoryConfig, MemoryConfigError, load_memory_config

logger = logging.getLogger(__name__)

_in_step: set[Any] = set()
"""Callbacks in a step that survives, which keeps its model alive. Nobody tells them of a training that fails."""
_DATA_PARALLEL = (
    "args.n_gpu: got {0}, with which the Trainer wraps the model in DataParallel; allowed: 1; start a process for each "
    "device (torchrun --nproc-per-node {0}), or let it see one device only (CUDA_VISIBLE_DEVICES=0)"
)


def trainer_callback(plan: Plan | MemoryConfig | None = None, **arguments: Any) -> Any:
    """A transformers.TrainerCallback that attaches the model when training begins, and detaches it at the end.

    Each training step, the optimizer's included, runs in an `Attached.step`; no step is tried again as a whole. When
    training ends, the report is logged.

    Args:
        plan: as for `attach`; with "auto", a plan is found.
        arguments: the other arguments of `attach`.

    Returns the callback, for ``Trainer(..., callbacks=[...])``. During training, its ``attached`` is what `attach`
    returned.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        TypeError: `attach` has no such argument.
        MemoryConfigError: the plan itself is wrong. Whether it fits the model, and whether the Trainer uses
            DataParallel, which is refused, is checked when training begins.
    """
    from transformers import TrainerCallback

    inspect.signature(attach).bind(None, plan, **arguments)  # now, not once the model has been loaded
    if plan != "auto" and isinstance(plan, (str, os.PathLike, Mapping)):
        load_memory_config(plan)

    class MemoryCallback(TrainerCallback):
        attached: Attached | None = None
        _step: contextlib.ExitStack | None = None

        def on_train_begin(self, args: Any, *_: Any, model: Any = None, **__: Any) -> None:
            for callback in {self, *_in_step}:  # of a training that failed
                callback._stop()
            quantized = any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
            if args.n_gpu > 1 and not quantized:  # as the Trainer asks
                raise MemoryConfigError([_DATA_PARALLEL.format(args.n_gpu)], "trainer_callback")
            self.attached = attach(model, plan, **arguments)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self._end_step()
            if self.attached is not None:
                self._step = contextlib.ExitStack()
                self._step.enter_context(self.attached.step())
                if self.attached.engine.survival is not None:
                    _in_step.add(self)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self._end_step()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self._end_step()
            if self.attached is not None:
                report = self.attached.report()  # on all ranks
                if report:
                    logger.info(report)
            self._stop()

        def _end_step(self) -> None:
            _in_step.discard(self)
            step, self._step = self._step, None
            if step is not None:
                step.close()

        def _stop(self) -> None:
            self._end_step()
            attached, self.attached = self.attached, None
            if attached is not None:
                attached.detach()

    return MemoryCallback()

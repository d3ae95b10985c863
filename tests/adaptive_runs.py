"""Runs tiny GPT models under --adaptive-memory-optimization while the memory of the device is limited.

Import this where the CPU patches are applied: in functions that `tests.worlds.on_ranks` runs.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.adaptive.run.adaptation import Adaptation
from mindspeed_mem.device import get_backend
from mindspeed_mem.device.limited_cpu import LimitedMemory
from mindspeed_mem.features import check
from mindspeed_mem.plan import load_memory_config
from tests.guarding import settled
from tests.limited_runs import DeviceMemory, Training
from tests.models import DEVICE
from tests.swap_runs import patched
from tests.worlds import patch_modules


@contextlib.contextmanager
def adapting(plan_file: Path | None = None, host_limit: int | None = None) -> Iterator[engines.Engine]:
    """--adaptive-memory-optimization on whatever the backend's memory is limited to."""
    modules = patch_modules(*check({"adaptive_memory_optimization": True, "device": DEVICE}).patches)
    with patched([module for module in modules if module.rpartition(".")[2].partition("_")[0] != "cpu"]):
        engine = engines.start(load_memory_config(None), get_backend(DEVICE), host_limit, survive=True)
        Adaptation(engine, plan_file)
        try:
            yield engine
        finally:
            engines.stop()
            gc.collect()


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """What the pack logs inside."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    listener, logger = Listener(), logging.getLogger("mindspeed_mem")
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)


def room_for(
    memory: LimitedMemory | DeviceMemory, kind: str, share: float, steps: int = 3, **model: Any
) -> tuple[int, list]:
    """Bytes that let a step have so much of what it would take beyond parameters, gradients and optimizer states, and
    what the steps of a model without the pack compute."""
    before = settled(memory)
    plain = Training(memory, kind, **model)
    results = [plain.step() for _ in range(steps)]
    room = settled(memory) - before + round(plain.peak * share)
    del plain
    gc.collect()
    return room, results


def until_settled(engine: engines.Engine, step: Any, most: int = 24) -> int:
    """Take steps until a plan is settled on; returns how many."""
    for count in range(1, most + 1):
        step()
        if engine.adaptation.state == "settled":
            return count
    raise AssertionError(f"not settled after {most} steps: {engine.adaptation.state}")

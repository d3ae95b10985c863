"""Interleaved timing of variants that must be compared side by side in one process."""

from __future__ import annotations

import contextlib
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch


def interleaved(
    names: Sequence[str],
    setting: Callable[[str], AbstractContextManager],
    step: Callable[[], None],
    rounds: int,
    synchronize: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
    warm: int = 0,
) -> dict[str, list[float]]:
    """Seconds of ``step`` under each variant, one per round; every round runs all variants in an order of its own.

    ``setting(name)`` puts a variant in place (untimed). One untimed step of each variant comes first; ``warm``: and so
    many before each timed one, for a caching allocator that another variant has left in another state. ``clock``: for
    one thread on a shared machine `time.process_time`, which does not count the time that others take.
    """
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(-1, rounds):
        for name in order.sample(list(names), len(names)):
            with setting(name):
                for _ in range(warm):
                    step()
                synchronize()
                start = clock()
                step()
                synchronize()
                if round_number >= 0:
                    seconds[name].append(clock() - start)
    return seconds


@contextlib.contextmanager
def reproducible(device_type: str) -> Iterator[None]:
    """Inside, an accelerator's kernels give the same bits each time, where they can (flash attention does not by
    default); for comparing losses, not for timing."""
    before, fills = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    if device_type != "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def summary(seconds: dict[str, list[float]], base: str) -> dict[str, dict[str, float]]:
    """Median, 20 % and 80 % quantiles in ms, and the median of the per-round ratios to ``base``."""
    rows = {}
    for name, values in seconds.items():
        ratios = [value / reference for value, reference in zip(values, seconds[base], strict=True)]
        low, *_, high = statistics.quantiles(values, n=5) if len(values) > 1 else (values[0], values[0])
        rows[name] = {
            "median_ms": 1e3 * statistics.median(values),
            "p20_ms": 1e3 * low,
            "p80_ms": 1e3 * high,
            "ratio_of_medians": statistics.median(values) / statistics.median(seconds[base]),
            "median_of_ratios": statistics.median(ratios),
        }
    return rows


def machine(device_type: str) -> dict[str, str | int]:
    """What a figure must be read with."""
    found: dict[str, str | int] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": _processor(),
        "date": time.strftime("%Y-%m-%d"),
    }
    if device_type != "cpu":
        found["device"] = torch.get_device_module(device_type).get_device_name()
    return found


def _processor() -> str:
    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or platform.machine()
    fields = dict(line.partition(":")[::2] for line in lines)
    return f"{fields.get('Model name', platform.machine()).strip()}, {fields.get('CPU(s)', '?').strip()} CPUs"

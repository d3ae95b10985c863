"""Interleaved timing of variants that must be compared side by side in one process."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

# Without it the matrix products of a GPU refuse to be reproducible; read when the first of them is run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
_START = time.monotonic()

import torch  # noqa: E402

from mindspeed_mem.device import Backend, get_backend  # noqa: E402


def interleaved(
    names: Sequence[str],
    setting: Callable[[str], AbstractContextManager],
    step: Callable[[], None],
    rounds: int,
    synchronize: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
    warm: int = 0,
    minutes: float | None = None,
    agreed: Callable[[bool], bool] = bool,
) -> dict[str, list[float]]:
    """Seconds of ``step`` under each variant, one per round; every round runs all variants in an order of its own.

    ``setting(name)`` puts a variant in place (untimed). One untimed step of each variant comes first; ``warm``: and so
    many before each timed one, for a caching allocator that another variant has left in another state. ``clock``: for
    one thread on a shared machine `time.process_time`, which does not count the time that others take. ``minutes``: no
    round begins that would probably end later than so long after the program began; but there is always one.
    ``agreed``: makes one answer of what the ranks think about that.
    """
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    longest = 0.0
    for round_number in range(-1, rounds):
        begun = time.monotonic()
        if minutes is not None and round_number > 0 and agreed(begun + longest - _START > 60 * minutes):
            break
        for name in order.sample(list(names), len(names)):
            with setting(name):
                for _ in range(warm):
                    step()
                synchronize()
                start = clock()
                step()
                synchronize()
                taken = clock() - start
                if round_number >= 0:
                    seconds[name].append(taken)
        longest = max(longest, time.monotonic() - begun) if round_number >= 0 else 0.0  # the first makes what stays
    return seconds


def late(minutes: float) -> bool:
    """Whether the program began longer ago than that."""
    return time.monotonic() - _START > 60 * minutes


def progress(done: str) -> None:
    """Tell somebody who waits for a long run what has been done by now."""
    print(f"{time.monotonic() - _START:6.0f} s: {done}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def reproducible(device_type: str) -> Iterator[None]:
    """Inside, an accelerator's kernels give the same bits each time; for comparing results, not for timing.

    Strictly: told only to warn, flash attention's backward stays as it is. An operator that cannot be reproducible
    raises RuntimeError.
    """
    before, fills = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    if not get_backend(device_type).is_host:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def bits(tensor: torch.Tensor) -> int:
    """A number that tells tensors of one shape apart: the sum of their elements' bit patterns."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.detach().contiguous().view(integer).sum(dtype=torch.int64))


def warm_up(backend: Backend) -> int:
    """Steps before each timed one: an accelerator's caching allocator is as another variant has left it."""
    return int(not backend.is_host)


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
    if not get_backend(device_type).is_host:
        found["device"] = str(get_backend(device_type).describe()["device"])
    return found


def _processor() -> str:
    try:
        lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or platform.machine()
    fields = dict(line.partition(":")[::2] for line in lines)
    return f"{fields.get('Model name', platform.machine()).strip()}, {fields.get('CPU(s)', '?').strip()} CPUs"

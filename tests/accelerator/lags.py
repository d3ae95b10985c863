"""What is late on the accelerator while a case runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests import worlds

LAGS = {
    "copies late": {"side": 2000},
    "computation late": {"compute": 300},
    "random": {"random": 1000, "seed": 1},
    "everything late": {"side": 3000, "compute": 1000},
}
"""In microseconds, as `tests.accelerator.stand_in.lagging` takes them."""


def under(lag: str, case: Callable, *args: Any, **kwargs: Any) -> Any:
    """What ``case(*args, **kwargs)`` returns, run under one of the `LAGS`; on a real device under its own."""
    if worlds.REAL is not None:
        return case(*args, **kwargs)
    from tests.accelerator import stand_in

    with stand_in.lagging(**LAGS[lag]):
        return case(*args, **kwargs)

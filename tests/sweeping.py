"""Cases that others stand for: they run with --sweep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def but(cases: Iterable[Any], *swept: Any) -> list[Any]:
    """``cases`` for ``pytest.mark.parametrize``; without --sweep all but ``swept``."""
    cases = list(cases)
    assert all(case in cases for case in swept)
    return [pytest.param(case, marks=pytest.mark.sweep) if case in swept else case for case in cases]

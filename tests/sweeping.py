"""Cases that others stand for: they run with --sweep."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest


def but(cases: Iterable[Any], *swept: Any) -> list[Any]:
    """``cases`` for ``pytest.mark.parametrize``; without --sweep all but ``swept``."""
    cases = list(cases)
    assert all(case in cases for case in swept)
    return [pytest.param(case, marks=pytest.mark.sweep) if case in swept else case for case in cases]


def apart(cases: Iterable[Any], *swept: Any, python: Iterable[Any] = (), native: Iterable[Any] = ()) -> list[Any]:
    """``cases`` of a test that runs on both hot paths, in `make test` and in `make test-native`; without --sweep those
    of ``python`` and ``native`` on that path alone, and ``swept`` on none. Tuples are one case of several arguments.
    """
    cases, python, native = list(cases), list(python), list(native)
    assert all(case in cases for case in (*swept, *python, *native))
    others = [*swept, *(python if os.environ.get("MINDSPEED_MEM_NATIVE") == "1" else native)]
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=pytest.mark.sweep if case in others else ()))
    return found

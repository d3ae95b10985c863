"""Context variables: what runs again finds those that hold plain values as they were when it ran first.

No others: who collects what modules return by one (Hugging Face) has it already.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterable
from typing import Any

from mindspeed_mem.activation.rerun.settings import PLAIN

Variables = list[tuple[contextvars.ContextVar, Any]]


def context_now() -> Variables:
    """Those that are set, with their values."""
    return [(one, value) for one, value in contextvars.copy_context().items() if type(value) in PLAIN]


def context_of(variables: Iterable[tuple[contextvars.ContextVar, Any]]) -> contextvars.Context:
    """A context in which these are so, and no others set."""
    context = contextvars.Context()
    for variable, value in variables:
        context.run(variable.set, value)
    return context

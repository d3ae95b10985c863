"""Keeps torch's compiler out of what this package does around a model's modules.

Dynamo looks at every Python frame that starts while a compiled module runs: in its forward the hooks that gather its
parameters, and where something could not be compiled with it, hooks of what autograd saves, finalizers, and what these
call. It would compile them as parts of the model.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import wrapt

_PACKAGE = Path(__file__).parents[1]
_SKIPPED = ("device", "gemini", "nested.py", "parallel", "plan", "zero", "attachment/gathering.py")
_INLINED = "wrappers.py"
"""Of `activation`: stands between a model's modules, and is compiled with them."""


@functools.cache
def keep_out() -> None:
    """From now on, or once somebody has imported dynamo."""
    wrapt.register_post_import_hook(_skip, "torch._dynamo.trace_rules")


def _skip(trace_rules: Any) -> None:
    """As `trace_rules.add` does for one module, which imports what that is in; and dynamo is not there yet."""
    engine = [one for one in (_PACKAGE / "activation").iterdir() if one.name != _INLINED]
    paths = [*engine, *(_PACKAGE / name for name in _SKIPPED)]
    trace_rules.SKIP_DIRS += [str(one) if one.suffix else f"{one}/" for one in paths]
    trace_rules._recompile_re()

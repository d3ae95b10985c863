"""Keeps torch's compiler out of the engine.

While a compiled module runs what could not be compiled with it, dynamo looks at every Python frame that starts: at our
hooks and finalizers, too, and at what these call. It would compile them as parts of the model.
"""

from __future__ import annotations

import functools
import pkgutil
from types import ModuleType

import wrapt

from mindspeed_mem import activation

_INLINED = {"wrappers"}
"""Stands between a model's modules, and is compiled with them."""
_CALLED = ("mindspeed_mem.device", "mindspeed_mem.nested", "mindspeed_mem.plan")


@functools.cache
def stay_out() -> None:
    """From now on, or once somebody has imported dynamo."""
    wrapt.register_post_import_hook(_skip, "torch._dynamo.trace_rules")


def _skip(trace_rules: ModuleType) -> None:
    mine = [f"{activation.__name__}.{one.name}" for one in pkgutil.iter_modules(activation.__path__)]
    for name in (*(one for one in mine if one.rpartition(".")[2] not in _INLINED), *_CALLED):
        trace_rules.add(name)

"""Keeps torch's compiler out of what this package does around a model's modules.

Dynamo looks at every Python frame that starts while a compiled module runs: in its forward the hooks that gather its
parameters, and where something could not be compiled with it, hooks of what autograd saves, finalizers, and what these
call. It would compile them as parts of the model.
"""

from __future__ import annotations

import functools
import pkgutil
from importlib.util import find_spec
from types import ModuleType

import wrapt

_ROOMS = ("mindspeed_mem.activation", "mindspeed_mem.zero", "mindspeed_mem.gemini")
_OTHERS = (
    *("mindspeed_mem.device", "mindspeed_mem.nested", "mindspeed_mem.plan"),
    *("mindspeed_mem.attachment.gathering", "mindspeed_mem.parallel.recompute"),
)
_INLINED = {"mindspeed_mem.activation.wrappers"}
"""Stands between a model's modules, and is compiled with them."""


@functools.cache
def keep_out() -> None:
    """From now on, or once somebody has imported dynamo."""
    wrapt.register_post_import_hook(_skip, "torch._dynamo.trace_rules")


def _skip(trace_rules: ModuleType) -> None:
    paths = [(room, found.submodule_search_locations) for room in _ROOMS if (found := find_spec(room)) is not None]
    inside = [f"{room}.{one.name}" for room, path in paths for one in pkgutil.iter_modules(path)]
    for name in (*(one for one in inside if one not in _INLINED), *_OTHERS):
        trace_rules.add(name)

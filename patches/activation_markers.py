"""megatron.core.utils: the range markers that Megatron calls around its inline operators name them.

Why here: ``nvtx_range_push/pop`` are called unconditionally and by suffix (``rotary_pos_emb``, ``activation``,
``self_attn_bda``, ...); the markers themselves stay Megatron's.
"""

from __future__ import annotations

import contextlib
import sys

import torch

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.patching import Direct, around, join


def _marker(method):
    @Direct
    def make(original):
        compiling, names = torch.compiler.is_compiling, original.__globals__

        def marker(msg=None, suffix=None):
            engine = None if compiling() else engines.in_use
            if engine is not None and engine.position.stack and msg is None and suffix is not None:
                getattr(engine.operators, method)(suffix)
            if msg is None and names.get("_nvtx_enabled"):
                # With ranges enabled upstream names a range after its caller, which must not be this file.
                caller = sys._getframe(1)
                msg = f"{caller.f_globals.get('__name__')}.{caller.f_code.co_name}"
            return original(msg, suffix)

        return marker

    return make


around("megatron.core.utils:nvtx_range_push", since="0.14")(_marker("mark_start"))
around("megatron.core.utils:nvtx_range_pop", since="0.14")(_marker("mark_stop"))


@contextlib.contextmanager
def _ranges_closed():
    """A second run that stops early leaves ranges open: close them, or Megatron finds its own out of order."""
    ranges = getattr(sys.modules["megatron.core.utils"], "_nvtx_range_messages", [])
    before = len(ranges)
    try:
        yield
    finally:
        while len(ranges) > before:
            ranges.pop()
            torch.cuda.nvtx.range_pop()


join("mindspeed_mem.activation.rerun.second_run:GUARDS", _ranges_closed, declared_by=__name__)

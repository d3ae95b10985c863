"""megatron.core.utils: the range markers that Megatron calls around its inline operators name them.

Why here: ``nvtx_range_push/pop`` are called unconditionally and by suffix (``rotary_pos_emb``, ``activation``,
``self_attn_bda``, ...); the markers themselves stay Megatron's.
"""

from __future__ import annotations

import sys

import torch

from mindspeed_mem.activation.wrappers import range_begins, range_ends
from mindspeed_mem.patching import Direct, around, join


@around("megatron.core.utils:nvtx_range_push", since="0.14")
@Direct
def range_push(original):
    return range_begins(original)


@around("megatron.core.utils:nvtx_range_pop", since="0.14")
@Direct
def range_pop(original):
    return range_ends(original)


class _RangesClosed:
    """A second run that stops early leaves ranges open: close them, or Megatron finds its own out of order."""

    __slots__ = ("_ranges", "_before")

    def __enter__(self):
        self._ranges = getattr(sys.modules["megatron.core.utils"], "_nvtx_range_messages", [])
        self._before = len(self._ranges)

    def __exit__(self, *exc_info):
        while len(self._ranges) > self._before:
            self._ranges.pop()
            torch.cuda.nvtx.range_pop()


join("mindspeed_mem.activation.rerun.second_run:GUARDS", _RangesClosed, declared_by=__name__)

"""Operators that our recompute runs again: what they read is gathered meanwhile (stage 3).

Why here: such an operator's `forward` runs without the hooks of its module, and in the backward of whoever asked for
what it makes, so nobody else knows that its weights are needed. It replaces no symbol of others: both rooms are ours.

What runs again may differ between ranks (an expert without tokens does not), and gathering must not. So a layer that
recomputes anything is gathered as a whole when its backward starts.
"""

from __future__ import annotations

import contextlib

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation import regions
from mindspeed_mem.patching import join
from mindspeed_mem.zero.buffers import runtime
from mindspeed_mem.zero.core.gathering import Reading


def reads(modules, tensors):
    now = runtime.current()
    if now is None or not now.gathering.chunks:
        return contextlib.nullcontext()
    return now.gathering.during(Reading((p for one in modules for p in one.parameters(recurse=False)), tensors))


def recomputes(module):
    engine = engines.current()
    return engine is not None and engine.in_force.recomputes and module.__dict__.get(regions.TAG, (0, None))[1] == ""


join("mindspeed_mem.activation.rerun.second_run:READERS", reads, declared_by=__name__)
join("mindspeed_mem.zero.core.hooks:HELD_WHOLE", recomputes, declared_by=__name__)

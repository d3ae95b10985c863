"""megatron.core.pipeline_parallel.schedules: say once when the first training step's forward and backward are done.

Why here: every training loop on megatron-core calls one of these three functions once per step and model. By then all
packs have patched, so that it can be verified whose patches are still reached. The loops themselves stay Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable

from mindspeed_mem.patching import around

_waiting: list[Callable[[], None]] = []


def after(callback: Callable[[], None]) -> None:
    """Have `callback` called once, on every rank, after the next training step; a second request is the same one."""
    if callback not in _waiting:
        _waiting.append(callback)


def _schedule(original, **kwargs):
    result = original(**kwargs)
    if _waiting and not kwargs.get("forward_only", False):
        callbacks, _waiting[:] = _waiting[:], []
        for callback in callbacks:
            callback()
    return result


for _name in ("no_pipelining", "pipelining_with_interleaving", "pipelining_without_interleaving"):
    around("megatron.core.pipeline_parallel.schedules:forward_backward_" + _name)(_schedule)

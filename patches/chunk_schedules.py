"""megatron.core.pipeline_parallel.schedules: say where a pass over the chunks begins and ends, and of what kind it is.

Why here: every training loop on megatron-core calls one of these three functions once per step and model. A script that
does not overlap reductions gives Megatron no function to tell micro-batches apart, so it gets one here: gradients are
added up over all micro-batches before they are reduced, as Megatron does it.
"""

from __future__ import annotations

import contextlib

from mindspeed_mem.patching import around
from mindspeed_mem.zero.buffers import runtime


def _schedule(original, **kwargs):
    now = runtime.current()
    if now is None:
        return original(**kwargs)
    models = kwargs["model"] if isinstance(kwargs["model"], list) else [kwargs["model"]]
    found = [getattr(model, "chunks_of_model", None) for model in models]
    followed = [chunks for chunks in found if chunks is not None]
    names = ("num_microbatches", "seq_length", "micro_batch_size", "forward_only")
    kind = (original.__name__, *(kwargs.get(name) for name in names))
    now.begin(kind, followed, kwargs.get("forward_only", False))
    completed = False
    try:
        with _micro_batches_told_apart(models) if followed else contextlib.nullcontext():
            result = original(**kwargs)
        completed = True
        return result
    finally:
        now.end(completed)


@contextlib.contextmanager
def _micro_batches_told_apart(models):
    from megatron.core.utils import get_model_config

    config = get_model_config(models[0])
    if config.no_sync_func is not None:
        yield
        return
    config.no_sync_func = [model.no_sync for model in models] if len(models) > 1 else models[0].no_sync
    try:
        yield
    finally:
        config.no_sync_func = None


for _name in ("no_pipelining", "pipelining_with_interleaving", "pipelining_without_interleaving"):
    around("megatron.core.pipeline_parallel.schedules:forward_backward_" + _name)(_schedule)

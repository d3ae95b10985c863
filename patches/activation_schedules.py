"""megatron.core.pipeline_parallel.schedules: tell the engine which micro-batch and chunk runs, and in which direction.

Why here: all schedules (none, 1F1B, interleaved) call the module globals ``forward_step`` and ``backward_step``; the
loops themselves stay Megatron's. A micro-batch's backward is found by the output tensor its forward returned.
The three schedule functions are wrapped only to know where a step begins and ends, an exception included.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import count
from weakref import WeakKeyDictionary

import torch

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.patches import _schedule_calls as calls
from mindspeed_mem.patching import around
from mindspeed_mem.schedule import ScheduleError, order, settings

_SCHEDULES = "megatron.core.pipeline_parallel.schedules:"


@lru_cache(maxsize=16)
def _passes(stage, stages, chunks, group, number, cap, forward_only):
    """The order of this stage; None for sizes that the pure function does not know."""
    try:
        return order(stages, chunks, number, group_size=group, cap=cap, forward_only=forward_only)[stage]
    except (ScheduleError, TypeError):
        return None


def _number_of(model):
    """The models in the order in which they first came here: unlike their ids, the same on all ranks."""
    if model not in _numbers:
        _numbers[model] = next(_serial)
    return _numbers[model]


_numbers, _serial = WeakKeyDictionary(), count()


def _schedule(original, **kwargs):
    engine = engines.current()
    if engine is None:
        return original(**kwargs)
    models = calls.models_of(kwargs)
    number, forward_only = kwargs.get("num_microbatches"), kwargs.get("forward_only", False)
    if torch.is_grad_enabled() or not forward_only:  # evaluation saves nothing, and a rank may evaluate on its own
        calls.agree(engine, models)
    stage, stages = calls.stage_of(original.__name__, kwargs)
    of_order = (*calls.chunks_of(original.__name__, models), number, settings.current().max_inflight, forward_only)
    sizes = (kwargs.get("seq_length"), kwargs.get("micro_batch_size"))
    engine.passes.begin_schedule(
        (original.__name__, *of_order, *sizes, _number_of(models[0])),
        _passes(stage, stages, *of_order),
        stage if stages > 1 and not forward_only else None,
        calls.gather,
    )
    completed = False
    try:
        result = original(**kwargs)
        completed = True
        return result
    finally:
        engine.passes.end_schedule(completed)


for _name in ("no_pipelining", "pipelining_with_interleaving", "pipelining_without_interleaving"):
    around(_SCHEDULES + "forward_backward_" + _name)(_schedule)


@around(_SCHEDULES + "forward_step")
def forward_step(original, *args, **kwargs):
    engine = engines.current()
    if engine is None:
        return original(*args, **kwargs)
    engine.passes.begin_forward(kwargs.get("current_microbatch"), kwargs.get("vp_stage") or 0)
    result = original(*args, **kwargs)
    engine.passes.end_forward(result[0])
    return result


@around(_SCHEDULES + "backward_step")
def backward_step(original, input_tensor, output_tensor, *args, **kwargs):
    engine = engines.current()
    if engine is None:
        return original(input_tensor, output_tensor, *args, **kwargs)
    engine.passes.begin_backward(output_tensor)
    try:
        return original(input_tensor, output_tensor, *args, **kwargs)
    finally:
        engine.passes.end_backward()

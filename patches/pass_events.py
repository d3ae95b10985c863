"""megatron.core.pipeline_parallel.schedules: what runs there becomes events for the listeners of mindspeed_mem.passes.

Why here: every training loop on megatron-core calls one of the three schedule functions once per step and model, and
all of them call the module globals ``forward_step`` and ``backward_step``. The loops themselves stay Megatron's. A
pass is known by its numbers in forward, and by the output of its forward in backward.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspeed_mem import features, passes
from mindspeed_mem.passes import WEIGHT, Pass, ScheduleCall
from mindspeed_mem.patching import around
from mindspeed_mem.schedule import ScheduleError, order

_SCHEDULES = "megatron.core.pipeline_parallel.schedules:"


def _schedule(original: Callable[..., Any], **kwargs: Any) -> Any:
    if not passes.LISTENERS:
        return original(**kwargs)
    return passes.run_call(_call(original.__name__, kwargs), lambda call: original(**call.arguments))


for _name in ("no_pipelining", "pipelining_with_interleaving", "pipelining_without_interleaving"):
    around(_SCHEDULES + "forward_backward_" + _name)(_schedule)


@around(_SCHEDULES + "forward_step")
def forward_step(original, *args, **kwargs):
    listeners = passes.listening()
    with contextlib.ExitStack() as stack:
        for one in listeners:
            stack.enter_context(one.during_forward())
            one.begin_forward(kwargs.get("current_microbatch"), kwargs.get("vp_stage") or 0)
        result = original(*args, **kwargs)
        for one in reversed(listeners):
            one.end_forward(result[0])
        return result


@around(_SCHEDULES + "backward_step")
def backward_step(original, input_tensor, output_tensor, *args, **kwargs):
    with contextlib.ExitStack() as stack:
        for one in passes.listening():
            one.begin_backward(output_tensor)
            stack.callback(one.end_backward)
        return original(input_tensor, output_tensor, *args, **kwargs)


def _call(schedule: str, kwargs: Mapping[str, Any]) -> ScheduleCall:
    models = kwargs["model"] if isinstance(kwargs["model"], list | tuple) else [kwargs["model"]]
    pipeline = _pipeline(schedule, kwargs)
    stage, stages = (0, 1) if pipeline is None else (pipeline.rank(), pipeline.size())
    virtual_stages, group_size = _model_chunks(schedule, models)
    number, now = kwargs["num_microbatches"], features.in_force()
    limits = now.max_inflight, now.zero_bubble, now.v_placement
    forward_only = bool(kwargs.get("forward_only", False))
    return ScheduleCall(
        schedule=schedule,
        models=models,
        micro_batches=number,
        seq_length=kwargs.get("seq_length"),
        micro_batch_size=kwargs.get("micro_batch_size"),
        forward_only=forward_only,
        stage=stage,
        stages=stages,
        pipeline=pipeline,
        virtual_stages=virtual_stages,
        group_size=group_size,
        cap=now.max_inflight,
        passes=lambda: _passes(stage, (stages, virtual_stages, number), group_size, *limits, forward_only),
        arguments=kwargs,
    )


def _pipeline(schedule: str, kwargs: Mapping[str, Any]) -> Any:
    """The ranks of this one's pipeline, stage by stage; None where there is none."""
    if schedule == "forward_backward_no_pipelining":
        return None
    group = getattr(kwargs.get("p2p_communicator"), "pp_group", None)
    return sys.modules["megatron.core.parallel_state"].get_pipeline_model_parallel_group() if group is None else group


def _model_chunks(schedule: str, models: Sequence[Any]) -> tuple[int, int | None]:
    """The number of virtual stages, and how many micro-batches run on one in a row."""
    if not schedule.endswith("with_interleaving"):
        return 1, None
    config = sys.modules["megatron.core.utils"].get_model_config(models[0])
    return len(models), config.microbatch_group_size_per_vp_stage


@functools.lru_cache(maxsize=16)
def _passes(
    stage: int,
    sizes: tuple[int, int, int],
    group_size: int | None,
    cap: int | None,
    split: bool,
    v: bool,
    forward_only: bool,
) -> Sequence[Pass] | None:
    """The order of this stage; None for sizes that the pure function does not know."""
    split, v = split and sizes[0] > 1, v and sizes[0] > 1  # else Megatron's loop runs
    try:
        found = order(*sizes, group_size=group_size, cap=cap, split=split, v=v, forward_only=forward_only)[stage]
        return [work for work in found if work[0] != WEIGHT]
    except (ScheduleError, TypeError):
        return None

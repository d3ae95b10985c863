"""megatron.training.training: what the engine and the chunks did goes into Megatron-LM's own TensorBoard and W&B logs.

Why here: ``training_log`` is where Megatron writes its own scalars, on the one rank that has the writers, which these
figures are of. How often, and whether at all, stays Megatron's. Not in the megatron-core wheel. MindSpeed-LLM has a
function of its own, or, before 2.3, a copy of Megatron's.
"""

from __future__ import annotations

import inspect

from mindspeed_mem.patching import around
from mindspeed_mem.report.scalars import Scalars

_scalars: list[Scalars] = []


@around("megatron.training.training:training_log")
@around("mindspeed_llm.training.training:training_log", optional=True)
def training_log(original, *args, **kwargs):
    result = original(*args, **kwargs)
    if getattr(original, "_declared_by", None) == __name__:
        return result  # a copy of Megatron's
    from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

    # its place among the arguments differs between versions
    iteration = inspect.signature(original).bind(*args, **kwargs).arguments["iteration"]
    if not _scalars:
        _scalars.append(Scalars(iteration - 1))
    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    if writer and iteration % get_args().tensorboard_log_interval == 0:
        figures = _scalars[0].take(iteration)
        for name, value in figures.items():
            writer.add_scalar(name, value, iteration)
        if wandb and figures:
            wandb.log(figures, iteration)
    return result

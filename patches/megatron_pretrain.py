"""megatron.training.training: what the engine did is reported when Megatron-LM's ``pretrain`` ends.

Why here: after ``pretrain`` nothing collective follows, and all ranks get there together, also when Megatron leaves by
``sys.exit(0)`` at an exit interval. An error is none of our business: no report then. Not in the megatron-core wheel.
The scripts of MindSpeed-LLM call a ``pretrain`` of its own, or, for what follows pretraining, its trainers.
"""

from __future__ import annotations

from collections.abc import Callable

from mindspeed_mem.patching import around

when_finished: Callable[[], object] = tuple
"""Called on every rank; the adaptor puts its own function here."""


@around("megatron.training.training:pretrain")
@around("mindspeed_llm.training.training:pretrain", optional=True)
@around("mindspeed_llm.tasks.posttrain.launcher:AutoTrainer.train", optional=True)
def pretrain(original, *args, **kwargs):
    try:
        result = original(*args, **kwargs)
    except SystemExit as leaving:
        if leaving.code in (None, 0):
            when_finished()
        raise
    when_finished()
    return result

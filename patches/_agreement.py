"""All ranks make the plan together, for those of our patches that see a call of a schedule begin. No patch itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from mindspeed_mem.activation import regions
from mindspeed_mem.activation.stacks import mark_static
from mindspeed_mem.ranks import gather, is_initialized

if TYPE_CHECKING:
    from mindspeed_mem.activation.engine import Engine


def partners() -> set[int]:
    """Global ranks of the groups whose collectives run inside layers: tensor, context and expert parallel."""
    state = sys.modules["megatron.core.parallel_state"]
    getters = ("tensor_model_parallel", "context_parallel", "expert_tensor_and_model_parallel")
    found: set[int] = set()
    for name in getters if is_initialized() else ():
        try:
            group = getattr(state, f"get_{name}_group")()
        except AssertionError:  # not set up
            continue
        found.update(dist.get_process_group_ranks(group))
    return found


def agree(engine: Engine, models: Sequence[nn.Module]) -> None:
    """Once for each model, on all ranks: make the plan together, and never move what the models hold."""
    new = [model for model in models if model not in engine.models]
    if new or not engine.in_force.agreed:
        mark_static(models)
        if not engine.models:
            engine.in_force.stacks.clear()
        sizes: dict[str, int] = {}
        for theirs in gather(regions.stacks_in(models)):  # a stage need not have all of them
            sizes.update(theirs)
        engine.in_force.count_on(models, sizes)
        engine.resolve(gather, partners())
        engine.models.update(new)

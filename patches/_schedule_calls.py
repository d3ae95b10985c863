"""What Megatron's three schedule functions are called with, and the ranks around this one, for our patches on them.

No patch: what several patch files need and nobody else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mindspeed_mem.activation import regions
from mindspeed_mem.activation.stacks import mark_static

if TYPE_CHECKING:
    from mindspeed_mem.activation.engine import Engine


def gather(mine: Any) -> list[Any]:
    """Collect an object from all ranks, on all of them."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [mine]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def to_first(mine: Any) -> list[Any]:
    """Collect an object from all ranks on rank 0; empty elsewhere. For what would be large if every rank had it."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [mine]
    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone, dst=0)
    return everyone or []


def partners() -> set[int]:
    """Global ranks of the groups whose collectives run inside layers: tensor, context and expert parallel."""
    state = sys.modules["megatron.core.parallel_state"]
    getters = ("tensor_model_parallel", "context_parallel", "expert_tensor_and_model_parallel")
    found = set()
    for name in getters if dist.is_available() and dist.is_initialized() else ():
        try:
            group = getattr(state, f"get_{name}_group")()
        except AssertionError:  # not set up
            continue
        found.update(dist.get_process_group_ranks(group))
    return found


def models_of(kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """The model chunks."""
    models = kwargs["model"]
    return models if isinstance(models, list | tuple) else [models]


def stage_of(schedule: str, kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """This rank's pipeline stage, and how many there are."""
    if schedule == "forward_backward_no_pipelining":
        return 0, 1
    communicator = kwargs.get("p2p_communicator")
    state = sys.modules["megatron.core.parallel_state"]
    group = state.get_pipeline_model_parallel_group() if communicator is None else communicator.pp_group
    return group.rank(), group.size()


def chunks_of(schedule: str, models: Sequence[Any]) -> tuple[int, int | None]:
    """The number of virtual stages, and how many micro-batches run on one in a row."""
    if not schedule.endswith("with_interleaving"):
        return 1, None
    config = sys.modules["megatron.core.utils"].get_model_config(models[0])
    return len(models), config.microbatch_group_size_per_vp_stage


def _tell_stacks_apart(engine: Engine, models: Sequence[Any]) -> None:
    if not engine.models:
        engine.in_force.stacks.clear()
    sizes: dict[str, int] = {}
    for theirs in gather(regions.stacks_in(models)):  # a stage need not have all of them
        sizes = {**sizes, **theirs}
    engine.in_force.count_on(models, sizes)


def agree(engine: Engine, models: Sequence[Any]) -> None:
    """Once for each model, on all ranks: make the plan together, and never move what the models hold."""
    new = [model for model in models if model not in engine.models]
    if new or not engine.in_force.agreed:
        mark_static(models)
        _tell_stacks_apart(engine, models)
        engine.resolve(gather, partners())
        engine.models.update(new)

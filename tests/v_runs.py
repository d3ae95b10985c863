"""Training steps under --pipeline-schedule v, and what Megatron's own pipeline makes of the same model.

Import this where the CPU patches are applied: in functions that `tests.worlds.on_ranks` runs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from mindspeed_mem import features
from mindspeed_mem.schedule import order
from tests.worlds import applied, parallel, seed_tracker


@contextlib.contextmanager
def in_a_v(cap: int | None = None, **layout: Any) -> Iterator[None]:
    """The patches are applied and the setting in force, and the layout's pipeline is a V."""
    settings = features.Settings(max_inflight=cap, zero_bubble=True, v_placement=True)
    with applied("pipeline_cap", "pipeline_split", "pipeline_delayed", "pipeline_v") as [module, *_]:
        sys.modules[module]._said.clear()
        features.put_into_force(settings)
        try:
            with parallel(**{"vpp": 2, **layout}):
                yield
        finally:
            features.put_into_force(features.Settings())


def trained(kind: str, model: dict[str, Any], micro_batches: int, steps: int = 2, evaluate: bool = False) -> tuple:
    """Losses of each call, and parameters and gradients of the whole model by name, after some steps of a new model;
    with the passes of the last step on this rank.

    Gradients are left out where ranks have the sums of their shards only. They are not clipped: their norm is added up
    rank by rank.
    """
    from tests.capped_runs import recorded
    from tests.models import build_gpt, build_optimizer, global_parameters, train_step

    seed_tracker(1234)
    chunks = build_gpt(kind, **model)
    optimizer = build_optimizer(chunks, clip_grad=0.0)
    sharded = chunks[0].ddp_config.use_distributed_optimizer
    losses: list[list[float]] = []
    for step in range(steps):
        if evaluate and step == steps - 1:
            result = train_step(chunks, micro_batches=micro_batches, micro_batch_size=1, forward_only=True)
            losses.append([float(one) for one in result.losses])
        with recorded() as ran:
            result = train_step(chunks, micro_batches=micro_batches, micro_batch_size=1, step=step, optimizer=optimizer)
        losses.append([float(one) for one in result.losses])
    for chunk in chunks if chunks[0].ddp_config.overlap_param_gather else ():
        chunk.start_param_sync(force_sync=True)  # the next step's first forward would ask for it
    found = [(name, parameter.detach().clone()) for name, parameter in global_parameters(chunks)]
    if not sharded:
        found += [(f"gradient of {name}", one.main_grad.clone()) for name, one in global_parameters(chunks)]
    return losses, found, ran


def whole(found: list[tuple[str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """What all ranks of this pipeline have found, by name, and what is there twice and not the same."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    gathered: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(gathered, found, group=group)
    by_name: dict[str, torch.Tensor] = {}
    wrong = []
    for name, value in (pair for of_rank in gathered for pair in of_rank):
        if not torch.equal(by_name.setdefault(name, value), value):
            wrong.append(f"{name} differs where it is twice")
    return by_name, wrong


def departures(
    kind: str,
    layout: dict[str, Any],
    model: dict[str, Any],
    cases: list[tuple[int | None, int]],
    parts: str | None = None,
    **more: Any,
) -> list[str]:
    """What differs in any bit between 1F1B and a V, and orders that are not those of `mindspeed_mem.schedule.order`.
    ``cases``: (cap, micro-batches of all data-parallel ranks). ``parts``: Megatron's layout of those of the V.
    ``more``: of `trained`."""
    from megatron.core import parallel_state

    found: list[str] = []
    for cap, number in cases:
        with parallel(**layout):
            plain_losses, plain, _ = trained(kind, model, number, **more)
            plain_whole, _ = whole(plain)
        with in_a_v(cap, **layout):
            given = {} if parts is None else {"pipeline_model_parallel_layout": parts}
            losses, ours, ran = trained(kind, {**model, **given}, number, **more)
            ours_whole, wrong = whole(ours)
            sizes = layout["pp"], 2, number // parallel_state.get_data_parallel_world_size()
            stage = parallel_state.get_pipeline_model_parallel_rank()
        what = f"cap {cap}, {number} micro-batches"
        found += [f"{what}: {one}" for one in wrong]
        if losses != plain_losses:
            found.append(f"{what}: losses {losses}, {plain_losses}")
        if ran != order(*sizes, cap=cap, split=True, v=True)[stage]:
            found.append(f"{what}: ran {ran}")
        if ours_whole.keys() != plain_whole.keys():
            found.append(f"{what}: names {ours_whole.keys() ^ plain_whole.keys()}")
            continue
        found += [f"{what}: {name}" for name, one in ours_whole.items() if not torch.equal(one, plain_whole[name])]
    return found


def stored(chunks: list, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    """What a distributed checkpoint of these has, as Megatron-LM names it."""
    from megatron.core import parallel_state

    metadata = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
    }
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    found = {
        name: chunk.module.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks, strict=True)
    }
    found["optimizer"] = optimizer.sharded_state_dict(dict(found), is_loading=is_loading, metadata=metadata)
    return found


def moved(folders: dict[str, str], layout: dict[str, Any], model: dict[str, Any]) -> list[str]:
    """Checkpoints that are saved under one placement ("straight": 1F1B, "v") and loaded under the other, in a new
    folder for each: what differs in any bit in the step after, and what a checkpoint of one lacks of the other's."""
    from megatron.core import dist_checkpointing

    from tests.models import build_gpt, build_optimizer, global_parameters, train_step

    def placed(name: str):
        return parallel(**layout) if name == "straight" else in_a_v(**layout)

    def step(chunks: list, optimizer: Any, number: int) -> None:
        train_step(chunks, micro_batches=4, micro_batch_size=1, step=number, optimizer=optimizer)

    after, found = {}, []
    for name, folder in folders.items():
        with placed(name):
            chunks = build_gpt("dense", **model)
            optimizer = build_optimizer(chunks, clip_grad=0.0)
            step(chunks, optimizer, 0)
            dist_checkpointing.save(stored(chunks, optimizer, False), folder)
            step(chunks, optimizer, 1)
            after[name], wrong = whole([(one, p.detach().clone()) for one, p in global_parameters(chunks)])
            found += wrong
    keys = [set(dist_checkpointing.load_tensors_metadata(folder)) for folder in folders.values()]
    found += [f"only one has {key}" for key in keys[0] ^ keys[1]]
    for name, other in zip(folders, reversed(folders), strict=True):
        with placed(name):
            chunks = build_gpt("dense", **model)
            optimizer = build_optimizer(chunks, clip_grad=0.0)
            with torch.no_grad():
                for chunk in chunks:
                    for parameter in chunk.parameters():
                        parameter.fill_(7)
            state = dist_checkpointing.load(stored(chunks, optimizer, True), folders[other])
            for number, chunk in enumerate(chunks):
                chunk.module.load_state_dict(state["model" if len(chunks) == 1 else f"model{number}"])
            optimizer.load_state_dict(state["optimizer"])
            step(chunks, optimizer, 1)
            ours, wrong = whole([(one, p.detach().clone()) for one, p in global_parameters(chunks)])
        found += wrong + [f"{name}: {one}" for one, value in ours.items() if not torch.equal(value, after[other][one])]
    return found

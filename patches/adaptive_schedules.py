"""megatron.core.pipeline_parallel.schedules: tell the adaptive engine when a training call begins and ends.

Why here: between two training calls no activation is alive, so that another plan can come into force. Outermost of our
patches on these three functions but `first_step`: a call that survival repeats is one call.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from importlib.metadata import version

import torch
import torch.distributed as dist

from mindspeed_mem import __version__
from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation import regions
from mindspeed_mem.adaptive.run.adaptation import Call, Ranks
from mindspeed_mem.adaptive.run.engine import AdaptiveEngine
from mindspeed_mem.chunk import settings as chunk_settings
from mindspeed_mem.optimizer_parallel import settings as optimizer_settings
from mindspeed_mem.patches import _schedule_calls as calls
from mindspeed_mem.patching import REGISTRY, around
from mindspeed_mem.schedule import settings


def _schedule(original, **kwargs):
    engine = engines.current()
    if not isinstance(engine, AdaptiveEngine) or kwargs.get("forward_only", False):
        return original(**kwargs)
    models = calls.models_of(kwargs)
    stage, stages = calls.stage_of(original.__name__, kwargs)
    chunks, group = calls.chunks_of(original.__name__, models)
    cap = settings.current().max_inflight
    sizes = (kwargs["seq_length"], kwargs["micro_batch_size"], kwargs["num_microbatches"])
    call = Call(stages, chunks, group, cap, *sizes)
    calls.agree(engine, models)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    ranks = Ranks(rank, stage, calls.gather, calls.to_first, calls.partners())
    engine.begin_training_call(call, ranks, lambda: _facts(engine, models, call))
    completed = False
    try:
        result = original(**kwargs)
        completed = True
        return result
    finally:
        engine.end_training_call(completed)


for _name in ("no_pipelining", "pipelining_with_interleaving", "pipelining_without_interleaving"):
    around("megatron.core.pipeline_parallel.schedules:forward_backward_" + _name)(_schedule)


def _config(models):
    return sys.modules["megatron.core.utils"].get_model_config(models[0])


def _facts(engine, models, call):
    """What a plan depends on, as plain values with names. Collective: stages have layers and sizes of their own."""
    state, config = sys.modules["megatron.core.parallel_state"], _config(models)
    getters = ("tensor_model_parallel", "context_parallel", "expert_model_parallel", "data_parallel")
    layers = {layer: sorted(paths) for layer, paths in sorted(regions.tagged_layers().items())}
    parameters = [(str(one.dtype), one.numel(), one.requires_grad) for model in models for one in model.parameters()]
    limits = {"device_limit": engine.backend.nominal_limit(), "host_limit": engine.mover.slabs.limit_bytes}
    mine = _digest(layers, parameters, regions.places(), _plain(getattr(models[0], "ddp_config", None)), limits)
    patches = sorted({patch.declared_by for patch in REGISTRY.patches if patch.status == "applied"})
    device = engine.backend.describe()
    chunks = dataclasses.replace(chunk_settings.current(), backend=None)
    return {
        **call._asdict(),
        **{f"{name}_size": getattr(state, f"get_{name}_world_size")() for name in getters},
        **limits,
        "device": f"{device['type']} {device.get('device', '')}".strip(),
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "layers": engine.num_layers,
        "hidden_size": config.hidden_size,
        "dtype": str(config.params_dtype),
        "model": _digest(_plain(config)),
        "chunk_zero_stage": chunks.stage,
        "states_are_split": getattr(getattr(models[0], "ddp_config", None), "use_distributed_optimizer", False),
        "placement": chunks.placement.policy,
        "states": _digest(repr(chunks), optimizer_settings.mode()),
        "stages_and_sizes": _digest(calls.gather(mine)),
        "patches": _digest(patches),
        "torch": torch.__version__,
        "megatron_core": version("megatron-core"),
        "mindspeed_mem": __version__,
    }


def _plain(config):
    """The fields of a dataclass that have plain values."""
    values = {} if config is None else {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    return {name: str(value) for name, value in values.items() if isinstance(value, _PLAIN)}


_PLAIN = (bool, int, float, str, list, tuple, type(None), torch.dtype)


def _digest(*values):
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]

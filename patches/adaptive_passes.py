"""Tells the adaptive engine when a training call begins and ends, and what a kept plan must have been made for."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mem import __version__, features, ranks
from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation import regions
from mindspeed_mem.activation.engine import Engine, FollowsCalls
from mindspeed_mem.adaptive.run.adaptation import Ranks
from mindspeed_mem.adaptive.run.kept_plan import digest
from mindspeed_mem.adaptive.run.training_call import Call
from mindspeed_mem.passes import Listener, Precedence, ScheduleCall
from mindspeed_mem.patches import _agreement
from mindspeed_mem.patching import REGISTRY, join


class AdaptivePasses(Listener):
    precedence = Precedence.ADAPTIVE

    def __init__(self) -> None:
        self._following: list[FollowsCalls | None] = []  # of the calls that run: a step may contain an evaluation

    def begin_call(self, call: ScheduleCall) -> None:
        engine = engines.current()
        adaptation = None if engine is None or call.forward_only else engine.adaptation
        if adaptation is not None and adaptation.is_over:
            adaptation = None
        if engine is not None and adaptation is not None:
            self._begin(engine, adaptation, call)
        self._following.append(adaptation)

    def _begin(self, engine: Engine, adaptation: FollowsCalls, call: ScheduleCall) -> None:
        models = call.models
        _agreement.agree(engine, models)
        mine = call.arguments["seq_length"], call.arguments["micro_batch_size"], call.micro_batches
        length, size, number = _largest(mine, engine.backend.tensor_type)
        what = Call(call.stages, call.virtual_stages, call.group_size, call.cap, length, size, number, *_order(call))
        here = Ranks(ranks.number(), call.stage, ranks.gather, ranks.to_first, _agreement.partners())
        adaptation.begin(what, here, lambda: _facts(engine, models, what))

    def end_call(self, call: ScheduleCall, completed: bool) -> None:
        if (adaptation := self._following.pop()) is not None:
            adaptation.end(completed)


join("mindspeed_mem.passes:LISTENERS", AdaptivePasses(), declared_by=__name__)


def _largest(sizes: Sequence[int | None], device_type: str) -> list[Any]:
    """The largest on any rank, of each: what one of them alone is given would be another call on that rank alone, and
    all have to follow calls alike. Collective."""
    world = dist.group.WORLD if ranks.is_initialized() else None
    most = ranks.combined([int(size or 0) for size in sizes], dist.ReduceOp.MAX, world, device_type)
    return [largest or size for largest, size in zip(most, sizes, strict=True)]


def _order(call: ScheduleCall) -> tuple[str, bool]:
    """The schedule that runs, and whether it has gradients of weights put off within the backward of their pass."""
    now = features.in_force()
    if now.zero_bubble:  # without a pipeline Megatron's own loop runs, and puts nothing off
        return ("v" if now.v_placement else "zb") if call.stages > 1 else "1f1b", False
    return "1f1b", "--split-backward" in now.on


def _facts(engine: Engine, models: Sequence[nn.Module], call: Call) -> dict[str, Any]:
    """What a plan depends on, as plain values with names. Collective: stages have layers and sizes of their own."""
    state = sys.modules["megatron.core.parallel_state"]
    config = sys.modules["megatron.core.utils"].get_model_config(models[0])
    sizes = ("tensor_model", "context", "data", "expert_model", "expert_tensor")
    layers = {layer: sorted(paths) for layer, paths in sorted(regions.tagged_layers().items())}
    parameters = [(str(one.dtype), one.numel(), one.requires_grad) for model in models for one in model.parameters()]
    limits = {"device_limit": engine.backend.nominal_limit(), "host_limit": engine.mover.slabs.limit_bytes}
    mine = digest(layers, parameters, regions.places(), _plain(getattr(models[0], "ddp_config", None)), limits)
    patches = sorted({patch.declared_by for patch in REGISTRY.patches if patch.status in ("applied", "resting")})
    device = engine.backend.describe()
    return {
        **call._asdict(),
        **{f"{name}_parallel_size": getattr(state, f"get_{name}_parallel_world_size")() for name in sizes},
        **limits,
        **features.plan_facts(features.in_force()),
        "device": f"{device['type']} {device.get('device', '')}".strip(),
        "ranks": ranks.count(),
        "layers": engine.in_force.num_layers,
        "hidden_size": config.hidden_size,
        "sequence_parallel": config.sequence_parallel,
        "dtype": str(config.params_dtype),
        "model": digest(_plain(config)),
        "states_are_split": getattr(getattr(models[0], "ddp_config", None), "use_distributed_optimizer", False),
        "stages_and_sizes": digest(ranks.gather(mine)),
        "patches": digest(patches),
        "torch": torch.__version__,
        "megatron_core": version("megatron-core"),
        "mindspeed_mem": __version__,
    }


def _plain(config: Any) -> dict[str, str]:
    """The fields of a dataclass that have plain values."""
    values = {} if config is None else {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    return {name: str(value) for name, value in values.items() if isinstance(value, _PLAIN)}


_PLAIN = (bool, int, float, str, list, tuple, type(None), torch.dtype)

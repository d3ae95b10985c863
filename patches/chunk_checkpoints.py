"""State dicts and checkpoints of models whose parameters are kept as shards (stage 3).

Why here: torch's Module.state_dict and _load_from_state_dict are what every plain state dict goes through, on whichever
module it is called; sharded_state_dict is each Megatron class's own, so it is wrapped on the classes that a model has.
Formats and the optimizer's state stay Megatron's. What these formats cannot do is refused before anything is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from mindspeed_mem.patches import _async_saves
from mindspeed_mem.patching import REGISTRY, around
from mindspeed_mem.zero.buffers import gathered_states, runtime, whole_states
from mindspeed_mem.zero.core.shard_memory import rests_on_host

_MODULE = "torch.nn.modules.module:Module."
_DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel."
_SERIALIZATION = "megatron.core.dist_checkpointing.serialization:"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer."
_BUCKET = re.compile(r"(?P<buffer>.*)\.bucket_idx_(?P<bucket>\d+)\.param")
_Sizes = dict[tuple[str, int], int]


@around(_MODULE + "state_dict")
def state_dict(original, self, *args, **kwargs):
    with whole_states.completing(_backend()) as copies:
        state = original(self, *args, **kwargs)
        for name, value in state.items():
            if copies is not None and isinstance(value, torch.Tensor):
                state[name] = copies.of(value)
    return state


@around(_MODULE + "_load_from_state_dict")
def load_from_state_dict(original, self, state_dict, prefix, local_metadata, *args, **kwargs):
    own = list(self.parameters(recurse=False))
    if local_metadata.get("assign_to_params_buffers") and whole_states.sharded(own):
        raise whole_states.ChunkStateError(
            "load_state_dict(assign=True) would take the parameters out of their chunks (--chunk-zero-stage 3). "
            "Load without assign"
        )
    with whole_states.written(own):
        original(self, state_dict, prefix, local_metadata, *args, **kwargs)


def sharded_state_dict(original, self, *args, **kwargs):
    """Inside, Megatron works with the parameters themselves; what comes out are copies."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    with whole_states.completing(_backend()) as copies:
        state = original(self, *args, **kwargs)
        if copies is None:
            return state

        def complete(value):
            if isinstance(value, torch.Tensor):
                return copies.of(value)
            if isinstance(value, ShardedBase) and isinstance(value.data, torch.Tensor):
                value.data = copies.of(value.data)
            return value

        return dict_list_map_inplace(complete, state)


@around(_DDP + "__init__")
def ddp_init(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    now = runtime.current()
    if now is None or now.settings.stage < 3:
        return
    for cls in dict.fromkeys(type(module) for module in self.modules()):
        if hasattr(cls, "sharded_state_dict"):
            REGISTRY.apply_method(cls, "sharded_state_dict", sharded_state_dict, __name__)


@around(_OPTIMIZER + "__init__")
def optimizer_init(original, self, *args, **kwargs):
    """Upstream counts a group's masters in the buffers' order, but keeps those of fp32 parameters first.

    So a checkpoint of a model with both kinds takes one parameter's master for another's, or fails at its shape.
    """
    original(self, *args, **kwargs)
    if self.is_stub_optimizer:
        return
    for group, of_kind in enumerate(zip(self.model_fp32_groups, self.model_float16_groups, strict=True)):
        for order, param in enumerate(param for params in of_kind for param in params):
            self.model_param_group_index_map[param] = group, order


@around(_OPTIMIZER + "sharded_state_dict")
def optimizer_sharded_state_dict(original, self, model_sharded_state_dict={}, *args, **kwargs):  # noqa: B006
    """Upstream finds a parameter's entry by the parameter itself, which the model's state dict has a copy of."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    def with_parameter(value):
        if not isinstance(value, ShardedBase) or not isinstance(value.data, torch.Tensor):
            return value
        param = whole_states.parameter_of(value.data)
        return value if param is None else replace(value, data=param)

    return original(self, dict_list_map_outplace(with_parameter, model_sharded_state_dict), *args, **kwargs)


@around(_OPTIMIZER + "sharded_param_state_fully_reshardable", since="0.15")
def sharded_param_state_fully_reshardable(original, self, *args, **kwargs):
    self.gathers_for_parameters = True
    try:
        return original(self, *args, **kwargs)
    finally:
        del self.gathers_for_parameters


@around(_OPTIMIZER + "get_parameter_state_dp_zero")
def get_parameter_state_dp_zero(original, self, *args, **kwargs):
    state = original(self, *args, **kwargs)
    if state is None or not getattr(self, "gathers_for_parameters", False):
        return state
    return gathered_states.with_padding(state, self.buffers)


@around(_SERIALIZATION + "save")
def save(original, *args, **kwargs):
    """What rests on the host may be written while the next steps change it."""
    return _async_saves.save(original, rests_on_host, *args, **kwargs)


@around(_SERIALIZATION + "load")
def load(original, sharded_state_dict, checkpoint_dir, *args, **kwargs):
    """Upstream says that the shape of one tensor is wrong, and of which."""
    from megatron.core.dist_checkpointing import load_tensors_metadata
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    asked = [value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor)]
    wanted = _of_buckets({value.key: value.global_shape for value in asked})
    if wanted:
        there = load_tensors_metadata(str(checkpoint_dir))
        saved = _of_buckets({key: value.global_shape for key, value in there.items()})
        wrong = _difference(saved, wanted)
        if wrong:
            raise CheckpointingException(f"{checkpoint_dir}: {wrong}")
    return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)


@around("megatron.training.checkpointing:save_checkpoint")
def save_checkpoint(original, iteration, model, *args, **kwargs):
    """The format "torch" asks one rank of each data-parallel group for the model: the others are gone by then."""
    from megatron.training.global_vars import get_args

    if get_args().ckpt_format != "torch":
        return original(iteration, model, *args, **kwargs)
    with whole_states.copied_ahead(model if isinstance(model, list) else [model], _backend()):
        return original(iteration, model, *args, **kwargs)


def _backend():
    now = runtime.current()
    return None if now is None else now.backend


# ---- optimizer states that follow Megatron's buckets: another stage, chunk size or model order has others


def _of_buckets(shapes: Mapping[str, Sequence[int]]) -> _Sizes:
    """Elements of each bucket, by buffer and number, in tensors that a checkpoint holds or is asked for."""
    found = ((_BUCKET.fullmatch(key), shape) for key, shape in shapes.items())
    return {(match["buffer"], int(match["bucket"])): int(shape[0]) for match, shape in found if match}


def _difference(saved: _Sizes, wanted: _Sizes) -> str | None:
    """Why a checkpoint with the buckets `saved` does not fit one that asks for `wanted`; None if it does."""
    buffers = {buffer for buffer, _ in wanted}
    saved = {place: size for place, size in saved.items() if place[0] in buffers}
    if saved == wanted:
        return None
    first = min(place for place in {**saved, **wanted} if saved.get(place) != wanted.get(place))
    return (
        "the optimizer's state was saved bucket by bucket (dp_reshardable), and this run has other buckets: "
        f"{len(saved)} there and {len(wanted)} here, bucket {first[1]} of {saved.get(first, 0)} elements there and "
        f"{wanted.get(first, 0)} here. Buckets follow from --chunk-zero-stage, --min-chunk-size-mib, "
        "--chunk-search-range-mib and --chunk-hidden-dim; without chunks from --overlap-grad-reduce and "
        "--ddp-bucket-size. Load with those it was saved with, save again with --dist-ckpt-optim-fully-reshardable "
        "(distrib_optim_sharding_type: fully_reshardable), and load that; or leave the optimizer out (--no-load-optim)"
    )

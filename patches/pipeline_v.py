"""--pipeline-schedule v: Megatron builds, numbers, ties and feeds the parts of a model where a V has them.

The second chunk of a pipeline rank is the one that Megatron has on the rank as far from the end: so whatever of it
depends on a rank is asked for that one. All parts stay what they are in Megatron's interleaved schedule, with the
same layers under the same numbers: checkpoints have the same names.

Why here: `get_num_layers_to_build` and `get_transformer_layer_offset` decide which layers a chunk has, for models,
specs and checkpoints alike; `is_pp_last_stage` and `is_pipeline_last_stage`, asked with a virtual stage, who has output
layer, loss and labels. The order of passes, and what ranks send, is `pipeline_cap`'s; it hands the losses to the last
rank, where scripts look for them.

Embedding and output layer lie in two chunks of the first rank. Tied, they are two parameters as in Megatron's own
pipelines, and what Megatron does with them between ranks, a copy at the beginning and a sum of gradients, is done here.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from mindspeed_mem import features
from mindspeed_mem.patching import around

_STATE = "megatron.core.parallel_state"
_LAYOUT = "megatron.core.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout."
_first_embedding: list[weakref.ref[torch.Tensor]] = []
"""Of the first part that was built last."""


def _in_v() -> bool:
    """Whether this process' pipeline is a V."""
    return features.in_force().v_placement and sys.modules[_STATE].get_pipeline_model_parallel_world_size() > 1


def _counterpart(vp_stage: int | None, pp_rank: int | None) -> int | None:
    """The rank on which Megatron has what is the chunk ``vp_stage`` of this rank (None: of this process') in a V."""
    if not vp_stage or not _in_v():
        return pp_rank
    state = sys.modules[_STATE]
    rank = state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
    return state.get_pipeline_model_parallel_world_size() - 1 - rank


@around(_STATE + ":initialize_model_parallel", since="0.16")
def initialize_model_parallel(original, *args, **kwargs):
    given = inspect.signature(original).bind(*args, **kwargs)
    if not features.in_force().v_placement or given.arguments.get("pipeline_model_parallel_size", 1) == 1:
        return original(*args, **kwargs)
    virtual_stages = given.arguments.get("virtual_pipeline_model_parallel_size")
    if virtual_stages != 2:
        raise features.FeatureError(
            [
                "--pipeline-schedule v needs two virtual stages, one on the way down and one back, but there are "
                f"{virtual_stages or 'none'}: give --num-virtual-stages-per-pipeline-rank 2, or another schedule"
            ]
        )
    given.arguments["get_embedding_ranks"] = lambda ranks: ranks[:1]
    return original(*given.args, **given.kwargs)


@around("megatron.core.transformer.transformer_layer:get_transformer_layer_offset", since="0.16")
def get_transformer_layer_offset(original, config, vp_stage=None, pp_rank=None):
    if not config.pipeline_model_parallel_layout:  # which is asked for the counterpart by itself
        pp_rank = _counterpart(vp_stage, pp_rank)
    return original(config, vp_stage, pp_rank)


@around("megatron.core.transformer.transformer_block:get_num_layers_to_build", since="0.16")
def get_num_layers_to_build(original, config, vp_stage=None, pp_rank=None):
    if _in_v() and getattr(config, "mtp_num_layers", None):  # asked on every rank
        raise features.FeatureError(
            ["--pipeline-schedule v cannot be combined with mtp_num_layers: not supported yet. Leave one of them out"]
        )
    if not config.pipeline_model_parallel_layout:
        pp_rank = _counterpart(vp_stage, pp_rank)
    return original(config, vp_stage, pp_rank)


def _of_layout(original: Callable[..., int], self: Any, *args: Any, **kwargs: Any) -> int:
    given = inspect.signature(original).bind(self, *args, **kwargs)
    given.apply_defaults()
    given.arguments["pp_rank"] = _counterpart(given.arguments["vp_stage"], given.arguments["pp_rank"])
    return original(*given.args, **given.kwargs)


for _name in ("get_num_layers_to_build", "get_layer_offset"):
    around(_LAYOUT + _name, since="0.16")(_of_layout)


@around("megatron.core.pipeline_parallel.utils:is_pp_last_stage", since="0.16")
def is_pp_last_stage(original, pp_group):
    """Asked together with whether a chunk is the last of its rank."""
    return sys.modules[original.__module__].is_pp_first_stage(pp_group) if _in_v() else original(pp_group)


@around(_STATE + ":is_pipeline_last_stage", since="0.16")
def is_pipeline_last_stage(original, ignore_virtual=True, vp_stage=None):
    if ignore_virtual or vp_stage is None or not _in_v():
        return original(ignore_virtual, vp_stage)
    return vp_stage == 1 and sys.modules[_STATE].get_pipeline_model_parallel_rank() == 0


@around(
    "megatron.core.models.common.language_module.language_module:LanguageModule.setup_embeddings_and_output_layer",
    since="0.16",
)
def setup_embeddings_and_output_layer(original, self):
    original(self)
    if not _in_v():
        return
    if self.share_embeddings_and_output_weights and self.pre_process:
        _first_embedding[:] = [weakref.ref(self.shared_embedding_or_output_weight())]
    elif self.share_embeddings_and_output_weights and self.post_process:
        weight = self.shared_embedding_or_output_weight()
        first = _first_embedding[0]() if _first_embedding else None
        if first is None or first.shape != weight.shape:
            raise RuntimeError("the last part of a model in a V was built before its first: its embedding is missing")
        weight.data.copy_(first.data)


@around("megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads", since="0.16")
def allreduce_word_embedding_grads(original, model, config, *args, **kwargs):
    original(model, config, *args, **kwargs)
    if not _in_v() or sys.modules[_STATE].get_pipeline_model_parallel_rank() != 0:
        return
    upstream = sys.modules[original.__module__]
    ends = [upstream.get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True) for chunk in model]
    if not ends[0].share_embeddings_and_output_weights:
        return
    weights = [end.shared_embedding_or_output_weight() for end in (ends[0], ends[-1])]
    first, last = (getattr(weight, upstream._get_main_grad_attr(weight)) for weight in weights)
    if first is not None and last is not None:  # or the embedding is frozen
        first.add_(last)
        last.copy_(first)


def _whole_batch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The first rank needs tokens and labels, as if it predicted more than the next token."""
    given = inspect.signature(original).bind(*args, **kwargs)
    if _in_v() and sys.modules[_STATE].get_pipeline_model_parallel_rank() == 0:
        given.arguments["mtp_on_this_rank"] = True
    return original(*given.args, **given.kwargs)


around("megatron.training.utils:get_batch_on_this_tp_rank", since="0.16", before="0.18")(_whole_batch)
around("megatron.core.utils:get_batch_on_this_tp_rank", since="0.18")(_whole_batch)

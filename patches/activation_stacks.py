"""megatron.core's stacks of layers: name the operators of every layer when it is built.

Why here: a stack knows its layers' global numbers for any pipeline split. That of a hybrid model has state-space,
attention, MLP and expert layers; that of multi-token prediction has layers around a layer of the usual kind.
"""

from __future__ import annotations

import sys

from mindspeed_mem.activation.stacks import tag_stack
from mindspeed_mem.patching import around


@around("megatron.core.transformer.transformer_block:TransformerBlock.__init__")
def block_init(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    tag_stack(self, getattr(self, "final_layernorm", None), self.config.num_layers, _place(self), __name__)


@around("megatron.core.ssm.mamba_block:MambaStack.__init__", optional=True, before="0.18")
@around("megatron.core.models.hybrid.hybrid_block:HybridStack.__init__", optional=True, since="0.18")
def hybrid_init(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    group = getattr(self, "pp_group", None)  # since 0.13
    place = _place(self) if group is None else (group.rank(), 0)
    tag_stack(self, getattr(self, "final_norm", None), self.config.num_layers, place, __name__)


@around("megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock.__init__")
def prediction_init(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    repeated = getattr(self.config, "mtp_use_repeated_layer", False)
    number = 1 if repeated else self.config.mtp_num_layers
    tag_stack(self, None, number, _place(self), __name__, inner=("transformer_layer", "mtp_model_layer"))


def _place(stack):
    """Its pipeline stage and virtual stage."""
    groups = getattr(stack, "pg_collection", None) or getattr(stack, "model_comm_pgs", None)  # since 0.15, or 0.13
    part = getattr(stack, "vp_stage", None)
    if groups is None:
        state = sys.modules["megatron.core.parallel_state"]
        part = state.get_virtual_pipeline_model_parallel_rank() if part is None else part
        return state.get_pipeline_model_parallel_rank(), part or 0
    stages = getattr(groups, "pp", None)
    return stages.rank() if stages is not None else 0, part or 0

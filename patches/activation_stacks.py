"""megatron.core's stacks of layers: name the operators of every layer when it is built.

Why here: a stack knows its layers' global numbers for any pipeline split, and layers that are not a stack's
(multi-token prediction) are left alone. That of a hybrid model has state-space, attention, MLP and expert layers.
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
    tag_stack(self, getattr(self, "final_norm", None), self.config.num_layers, (self.pp_group.rank(), 0), __name__)


def _place(stack):
    """Its pipeline stage and virtual stage."""
    groups = getattr(stack, "pg_collection", None) or getattr(stack, "model_comm_pgs", None)  # since 0.15, or 0.13
    if groups is None:
        state = sys.modules["megatron.core.parallel_state"]
        return state.get_pipeline_model_parallel_rank(), state.get_virtual_pipeline_model_parallel_rank() or 0
    stages = getattr(groups, "pp", None)
    return stages.rank() if stages is not None else 0, stack.vp_stage or 0

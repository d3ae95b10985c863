"""megatron.core's stacks of layers: name the operators of every layer when it is built.

Why here: a stack knows its layers' global numbers for any pipeline split, and layers that are not a stack's
(multi-token prediction) are left alone. That of a hybrid model has state-space, attention, MLP and expert layers.
"""

from __future__ import annotations

from mindspeed_mem.activation.stacks import tag_stack
from mindspeed_mem.patching import around


@around("megatron.core.transformer.transformer_block:TransformerBlock.__init__")
def block_init(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    stages = getattr(self.pg_collection, "pp", None)
    place = (stages.rank() if stages is not None else 0, self.vp_stage or 0)
    tag_stack(self, getattr(self, "final_layernorm", None), self.config.num_layers, place, __name__)


@around("megatron.core.ssm.mamba_block:MambaStack.__init__", optional=True)
def mamba_init(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    tag_stack(self, getattr(self, "final_norm", None), self.config.num_layers, (self.pp_group.rank(), 0), __name__)

"""megatron.core.transformer.transformer_block: name the operators of every decoder layer when it is built.

Why here: the block knows its layers' global numbers for any pipeline split, and layers that are not the block's
(multi-token prediction) are left alone.
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

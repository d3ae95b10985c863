"""megatron.core.ssm.mamba_block: name the operators of a hybrid model's layers, as those of a TransformerBlock.

Why here: the stack builds state-space, attention, MLP and expert layers, each with its global number.
"""

from __future__ import annotations

from mindspeed_mem.activation.stacks import tag_stack
from mindspeed_mem.patching import around


@around("megatron.core.ssm.mamba_block:MambaStack.__init__", optional=True)
def stack_init(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    place = (self.pp_group.rank(), 0)
    tag_stack(self, getattr(self, "final_norm", None), self.config.num_layers, place, __name__)

"""megatron.core.transformer.moe: an expert layer that runs again leaves statistics alone.

Why here: Megatron counts a checkpointed router's losses and tokens in its second run, since its first has gradients
off. Here the first run counts, as without recompute, and the second must not.
"""

from __future__ import annotations

from mindspeed_mem.activation import replay
from mindspeed_mem.patching import around


@around("megatron.core.transformer.moe.moe_utils:save_to_aux_losses_tracker")
def save_to_aux_losses_tracker(original, *args, **kwargs):
    if not replay.running():
        original(*args, **kwargs)


@around("megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias")
def apply_expert_bias(original, self, *args, **kwargs):
    if not replay.running():
        original(self, *args, **kwargs)

"""Multi-latent attention without TransformerEngine, which --sdpa-attention makes possible, under tensor parallelism."""

from __future__ import annotations

from mindspeed_mem.patching import around
from mindspeed_mem.sdpa import share_last_channels


@around("megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors")
def _get_query_key_value_tensors(original, self, *args, **kwargs):
    """The rotary part of the key is one for all heads, so its gradient must be summed over the ranks that share them.

    With the local spec the down projection's output is gathered from the ranks, and going backward only split again.
    Without an error: each rank's part of its weight lacks what the other ranks' heads contribute.
    """
    query, key, *others = original(self, *args, **kwargs)
    rotary = self.config.qk_pos_emb_head_dim
    split = self.linear_kv_down_proj.weight.shape[0] != self.config.kv_lora_rank + rotary
    if split and key.requires_grad:
        key = share_last_channels(key, rotary, self.tp_group)
    return query, key, *others

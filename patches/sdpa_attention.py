"""--sdpa-attention: Megatron's local core attention computes through mindspeed_mem.sdpa.

The methods of DotProductAttention, not the class: layer specs hold the class. Parameters (it has none), checkpoints and
what is around it stay Megatron's. The default recomputation and swap policies then find the operator that flash
attention would be. Multi-latent attention runs without TransformerEngine then, which needs a repair of its own.
"""

from __future__ import annotations

import contextlib

from mindspeed_mem.patching import around
from mindspeed_mem.sdpa import SdpaError, core_attention, share_last_channels

_CLASS = "megatron.core.transformer.dot_product_attention:DotProductAttention"


@around(f"{_CLASS}.__init__")
def _init(original, self, *args, k_channels=None, v_channels=None, **kwargs):
    """Multi-latent attention gives numbers of channels, which are read from the tensors here. Says what cannot be."""
    original(self, *args, **kwargs)
    problems = []
    softmax = getattr(self.config, "softmax_type", "vanilla")
    if softmax != "vanilla":
        problems.append(f"softmax_type {softmax!r}: only 'vanilla' (--softmax-type vanilla)")
    if getattr(self.scale_mask_softmax, "window_size", None) is not None:
        problems.append(f"window_size {self.config.window_size}: no sliding windows (leave --window-size out)")
    if problems:
        raise SdpaError(_refusal(self, problems))


@around(f"{_CLASS}.forward")
def _forward(
    original,
    self,
    query,
    key,
    value,
    attention_mask,
    attn_mask_type=None,
    attention_bias=None,
    packed_seq_params=None,
):
    """As upstream: a mask that is given counts, and without one the type chosen at construction (not the argument)."""
    problems = []
    if packed_seq_params is not None:
        problems.append("packed sequences: not supported; give each sequence its own row, or use TransformerEngine")
    if attention_bias is not None:
        problems.append("an attention bias: not supported")
    if problems:
        raise SdpaError(_refusal(self, problems))
    dropout = self.attention_dropout.p if self.training else 0.0
    with _random_numbers(self.config) if dropout else contextlib.nullcontext():
        return core_attention(
            query,
            key,
            value,
            attention_mask,
            causal=attention_mask is None and self.attn_mask_type.name == "causal",
            # With --apply-query-key-layer-scaling the products are divided by the layer's number, then multiplied.
            scale=self.softmax_scale * (self.scale_mask_softmax.scale or 1.0),
            dropout=dropout,
        )


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
        key = share_last_channels(key, rotary, self.linear_kv_up_proj.tp_group)
    return query, key, *others


def _random_numbers(config):
    """Where dropout draws from; as upstream."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return contextlib.nullcontext() if config.sequence_parallel else get_cuda_rng_tracker().fork()


def _refusal(attention, problems):
    return f"--sdpa-attention, layer {attention.layer_number}: " + "; ".join(problems)

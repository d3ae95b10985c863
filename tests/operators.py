"""Operators of a transformer layer, for the tests of plans: what Megatron's dense local layer is made of."""

DENSE = (
    "input_layernorm",
    "self_attention",
    "self_attention.linear_qkv",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "pre_mlp_layernorm",
    "mlp",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)

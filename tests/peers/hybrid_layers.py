"""State-space, attention and MLP layers of megatron-core without TransformerEngine: `--spec hybrid_layers stack`."""

from __future__ import annotations

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

try:
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
except ImportError:  # before 0.18
    from megatron.core.ssm.mamba_block import MambaStack as HybridStack
    from megatron.core.ssm.mamba_block import MambaStackSubmodules as HybridStackSubmodules


class Mixer(torch.nn.Module):
    """Stands in for the state-space mixer, whose kernels are CUDA's."""

    def __init__(self, config, d_model, **more):
        super().__init__()
        self.into, self.out = torch.nn.Linear(d_model, 2 * d_model), torch.nn.Linear(d_model, d_model)

    def forward(self, hidden_states, **more):
        gate, value = self.into(hidden_states).chunk(2, -1)
        return self.out(torch.nn.functional.silu(gate) * value), None


_attention = SelfAttentionSubmodules(
    linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
)
stack = ModuleSpec(
    HybridStack,
    submodules=HybridStackSubmodules(
        mamba_layer=ModuleSpec(
            MambaLayer,
            submodules=MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=Mixer, mamba_bda=get_bias_dropout_add),
        ),
        attention_layer=ModuleSpec(
            TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=WrappedTorchNorm,
                self_attention=ModuleSpec(
                    SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=_attention
                ),
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        mlp_layer=ModuleSpec(
            MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm,
                mlp=ModuleSpec(
                    MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
                ),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
    ),
)

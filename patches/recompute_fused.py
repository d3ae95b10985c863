"""Megatron's fused functions inside inline operators: run again as a whole.

Why here: they are compiled or call kernels of their own, so the operations they are made of cannot be recorded. Each
is called by this name from the code between two markers (activation, bias-dropout-add, rotary embedding).
"""

from __future__ import annotations

import torch

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.patching import Direct, around

_ACTIVATIONS = (
    "megatron.core.activations:squared_relu",
    "megatron.core.activations:quick_gelu",
    "megatron.core.activations:fast_gelu",
    "megatron.core.fusions.fused_bias_geglu:quick_gelu",
)
"""What configurations and layers keep; layers compare what they keep with it."""
_FUSED = (
    "megatron.core.fusions.fused_bias_gelu:bias_gelu_impl",
    "megatron.core.fusions.fused_bias_geglu:bias_geglu_impl",
    "megatron.core.fusions.fused_bias_geglu:weighted_bias_quick_geglu_impl",
    "megatron.core.fusions.fused_bias_swiglu:bias_swiglu_impl",
    "megatron.core.fusions.fused_bias_swiglu:weighted_bias_swiglu_impl",
    "megatron.core.fusions.fused_bias_dropout:bias_dropout_add_fused_train",
    "megatron.core.fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy",
    "megatron.core.fusions.fused_weighted_squared_relu:weighted_squared_relu_impl",
    "megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb",
)


def _fused(original):
    compiling = torch.compiler.is_compiling

    def call(*args, **kwargs):
        engine = engines.in_use
        if engine is None or compiling():
            return original(*args, **kwargs)
        return engine.run_fused(original, args, kwargs)

    return call


for _names, _rest in ((_FUSED, True), (_ACTIVATIONS, False)):
    _around_each = Direct(_fused, _rest)
    for _name in _names:
        around(_name, optional=True)(_around_each)

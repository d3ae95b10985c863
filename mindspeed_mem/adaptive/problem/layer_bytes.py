"""What each operator of Megatron-core's GPT layer produces and backward keeps, in bytes by storage.

Read off the library's own census of the real layer (`python -m mindspeed_mem ops`), which a test compares with these
formulas exactly. With t = tokens of a micro-batch, E = 2 bytes, TP ranks dividing heads and ffn, and sequence
parallelism dividing what stands between the blocks:

| operator | keeps | for |
|---|---|---|
| the layer before (its mlp_bda) | t h E | the input norm |
| input_layernorm, pre_mlp_layernorm | t h E + statistics | itself, the next linear |
| self_attention.linear_qkv | t (q + 2 k) E: one storage, whatever views of it are saved | core attention |
| self_attention.rotary_pos_emb | t (q + k) E + 4 tables s d E | core attention, itself |
| self_attention.core_attention | t q E + 4 t heads (flash) | itself, linear_proj |
| the same, unfused | t q E + t s heads E; with dropout another E and a mask of 1 | itself, linear_proj |
| self_attn_bda | t h E; with dropout a mask of t h | the second norm, itself |
| mlp_bda | with dropout a mask of t h | itself |
| mlp.linear_fc1 | t f E, twice with a gate | the activation function |
| mlp.activation_func | t ffn E | linear_fc2 |

Without fusion of bias and activation the activation function keeps its own intermediates instead of fc1's output (GELU)
or besides it (gated). torch's RMSNorm on the CPU computes in fp32 and keeps two fp32 tensors, but not its input.
"""

from __future__ import annotations

from mindspeed_mem.adaptive.problem.shape import ELEMENT, Degrees, Shape
from mindspeed_mem.plan import operators as op


def layer_bytes(shape: Shape, split: Degrees) -> dict[str, int]:
    """The bytes that each operator produces for backward, for one micro-batch on one rank; 0 for those that keep
    nothing. `INPUT` is what the layer before leaves: its output where backward keeps that, and its last mask."""
    tokens, tensor, norm = shape.tokens, split.tensor, norm_bytes(shape, split)
    handed = stream_bytes(shape, split) * (not _decomposed(shape)) + mask_bytes(shape, split)
    return {
        op.INPUT: handed,
        op.INPUT_NORM: norm,
        op.QKV: tokens * (shape.query_width + 2 * shape.key_width) * ELEMENT // tensor,
        op.ROTARY: _rotary_bytes(shape, tensor) * shape.rope,
        op.CORE: _core_bytes(shape, tensor),
        op.PROJ: 0,
        op.ATTENTION_ADD: handed,
        op.MLP_NORM: norm,
        **_mlp_bytes(shape, tokens * shape.ffn_hidden_size * ELEMENT // tensor),
        op.FC2: 0,
    }


def stream_bytes(shape: Shape, split: Degrees) -> int:
    """What one layer hands to the next."""
    return shape.tokens * shape.hidden_size * ELEMENT // _between(split)


def mask_bytes(shape: Shape, split: Degrees) -> int:
    """What dropout keeps of the numbers that one layer hands to the next."""
    return stream_bytes(shape, split) // ELEMENT * shape.mask_element * shape.hidden_dropout


def norm_bytes(shape: Shape, split: Degrees) -> int:
    """What a norm produces for backward: its output, statistics per token, and where no kernel does it in one, fp32
    tensors."""
    rows, output = shape.tokens // _between(split), stream_bytes(shape, split)
    if _decomposed(shape):
        return output + rows * (2 * shape.hidden_size + 1) * 4
    statistics = 2 if shape.normalization == "LayerNorm" else 1
    return output + rows * statistics * (ELEMENT if shape.cpu else 4)


def _between(split: Degrees) -> int:
    """How many ranks share what stands between the blocks."""
    return split.tensor if split.sequence_parallel else 1


def _decomposed(shape: Shape) -> bool:
    return shape.cpu and shape.normalization == "RMSNorm"


def _rotary_bytes(shape: Shape, tensor: int) -> int:
    rotated = shape.tokens * (shape.query_width + shape.key_width) * ELEMENT // tensor
    return rotated + 4 * shape.seq_length // shape.context * shape.kv_channels * ELEMENT


def _core_bytes(shape: Shape, tensor: int) -> int:
    output = shape.tokens * shape.query_width * ELEMENT // tensor
    heads = shape.num_attention_heads // tensor
    if shape.flash:
        return output + shape.tokens * heads * 4
    scores = shape.tokens * shape.seq_length * heads
    output += scores * (ELEMENT + shape.mask_element) * shape.attention_dropout  # what is left of them, and the mask
    if shape.cpu:  # softmax in fp32, then bf16; and the causal mask
        kept = 4 if shape.attention_dropout else 4 + ELEMENT
        return output + scores * kept + shape.seq_length**2
    return output + scores * ELEMENT


def _mlp_bytes(shape: Shape, hidden: int) -> dict[str, int]:
    if shape.swiglu:
        return {op.FC1: 2 * hidden, op.ACTIVATION: hidden if shape.fused else 3 * hidden}
    return {op.FC1: hidden if shape.fused else 0, op.ACTIVATION: hidden if shape.fused else 2 * hidden}

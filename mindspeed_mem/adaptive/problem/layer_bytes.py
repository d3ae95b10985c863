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
| self_attention.q_layernorm, k_layernorm | as a norm; not rotated also its output | itself, core attention |
| self_attention.core_attention | t q E + 4 t heads (flash) | itself, linear_proj |
| the same, unfused | t q E + t s heads E; with dropout another E and a mask of 1 | itself, linear_proj |
| self_attn_bda | t h E; with dropout a mask of t h | the second norm, itself |
| mlp_bda | with dropout a mask of t h | itself |
| mlp.linear_fc1 | t f E, twice with a gate | the activation function |
| mlp.activation_func | t ffn E | linear_fc2 |

| self_attention, latent, in all | t (latents + positions) E, t (2 q + 2 v) E, 4 t heads | itself, linear_proj |
| mlp.router, mlp.dispatch.preprocess | t experts (4 + 4 + 1), t topk (4 + 4 + 8) | themselves |
| mlp.dispatch.postprocess | t topk (h + 1) E, what this rank's experts are given | expert_fc1, moe_act |
| expert_fc1, moe_act | as linear_fc1 and activation_func, of t topk tokens | moe_act, the second linear |

TransformerEngine's flash attention wants queries, keys and values that lie alike. Where queries and keys are rotated it
copies the values, t k E, and keeps that instead of what linear_qkv returned (its `get_qkv_layout`; counted on a GPU,
benchmarks/results/nvidia-h200-2026-11-27).

Without fusion of bias and activation the activation function keeps its own intermediates instead of fc1's output (GELU
with a bias) or besides it (gated). torch's RMSNorm on the CPU computes in fp32 and keeps two fp32 tensors, but not its
input.
"""

from __future__ import annotations

from typing import NamedTuple

from mindspeed_mem.adaptive.problem.shape import ELEMENT, Degrees, Shape
from mindspeed_mem.plan import operators as op


def layer_bytes(shape: Shape, split: Degrees, experts: bool = False) -> dict[str, int]:
    """The bytes that each operator produces for backward, for one micro-batch on one rank; 0 for those that keep
    nothing. `INPUT` is what the layer before leaves: its output where backward keeps that, and its last mask.

    experts: of a layer that has some.
    """
    tokens, tensor, norm = shape.tokens, split.tensor, norm_bytes(shape, split)
    handed = stream_bytes(shape, split) * (not _decomposed(shape)) + mask_bytes(shape, split)
    if shape.kv_lora_rank:
        attention = _latent_bytes(shape, split)
    else:
        attention = {
            op.QKV: products_bytes(shape, split),
            op.ROTARY: _rotary_bytes(shape, tensor) * shape.rope,
            op.CORE: _core_bytes(shape, tensor),
        }
        if shape.qk_layernorm:
            for name, heads in ((op.Q_NORM, shape.num_attention_heads), (op.K_NORM, shape.num_query_groups)):
                made = norm_of(shape, tokens * heads // tensor, shape.kv_channels)
                returned = tokens * heads * shape.kv_channels * ELEMENT // tensor
                attention[name] = made - returned * shape.rope  # nobody keeps what is rotated
    inner = tokens * shape.ffn_hidden_size * ELEMENT // tensor
    sizes = {
        op.INPUT: handed,
        op.INPUT_NORM: norm,
        **attention,
        op.PROJ: 0,
        op.ATTENTION_ADD: handed,
        op.MLP_NORM: norm,
        **(_expert_bytes(shape, split) if experts else _mlp_bytes(shape, inner) | {op.FC2: 0}),
    }
    if shape.fp8:
        for name in (op.INPUT_NORM, op.MLP_NORM, op.ACTIVATION, op.SHARED_ACTIVATION, op.EXPERT_ACTIVATION):
            if name in sizes:
                sizes[name] //= 2
        sizes[op.PROJ] = tokens * _output_width(shape) // tensor
    if shape.te:
        for name, after in ((op.INPUT_NORM, op.QKV), (op.MLP_NORM, op.FC1)):
            if after in sizes:
                sizes[after] += sizes[name]
                sizes[name] = 0
    if copies_values(shape):
        sizes[op.QKV] -= products_bytes(shape, split)
        sizes[op.CORE] += tokens * shape.key_width * ELEMENT // tensor
    return sizes


def copies_values(shape: Shape) -> bool:
    """Whether attention keeps a copy of the values, and nobody what linear_qkv returned."""
    return shape.te and shape.flash and shape.rope and not shape.kv_lora_rank


def products_bytes(shape: Shape, split: Degrees) -> int:
    """What linear_qkv returns: queries, keys and values."""
    return shape.tokens * (shape.query_width + 2 * shape.key_width) * ELEMENT // split.tensor


class Waiting(NamedTuple):
    """What a split backward holds of a layer until its gradients of weights are there, in bytes."""

    of_groups: dict[str, int]
    """Of what an operator produces, what linears are given,"""
    of_operators: dict[str, int]
    """and the gradients of what each linear returns."""
    weights_only: tuple[str, ...] = ()
    """Of the first, those that one linear is given, and nothing else needs."""


def waiting_bytes(shape: Shape, split: Degrees, experts: bool = False) -> Waiting:
    """What waits in a layer whose linears are all Megatron's own, or all TransformerEngine's (by its sources; nobody
    has counted them).

    What is gathered forward is held as this rank has it, and gathered again, by TransformerEngine in the backward: then
    it is held whole. So is a gradient that is gathered backward.
    """
    tokens, tensor, stream = shape.tokens, split.tensor, stream_bytes(shape, split)
    whole = tokens * shape.hidden_size * ELEMENT
    given = {op.INPUT_NORM: stream, op.CORE: tokens * _output_width(shape) * ELEMENT // tensor}
    if shape.kv_lora_rank:
        # Down to latents and up from them, without a norm between as a view of all that came down; and the output.
        latents, positions = shape.kv_lora_rank + shape.q_lora_rank, shape.qk_pos_emb_head_dim
        up = shape.num_attention_heads * (shape.qk_head_dim + shape.v_head_dim) + shape.latent_query_width
        rows = tokens // _between(split) * ELEMENT
        made = {op.ATTENTION: rows * (latents + positions) + tokens * up * ELEMENT // tensor}
        given[op.ATTENTION] = given.pop(op.CORE) + rows * (latents + positions * (not shape.qk_layernorm))
    else:
        made = {op.QKV: tokens * (shape.query_width + 2 * shape.key_width) * ELEMENT // tensor}
    made[op.PROJ] = whole

    def product(fc1: str, activation: str, fc2: str, rows: int, width: int, ranks: int, returned: int) -> None:
        given[activation] = rows * width * ELEMENT // ranks
        made[fc1], made[fc2] = shape.gates * given[activation], returned

    if not experts:
        given[op.MLP_NORM] = stream
        product(op.FC1, op.ACTIVATION, op.FC2, tokens, shape.ffn_hidden_size, tensor, whole)
        alone = (op.MLP_NORM, op.ACTIVATION, *(op.INPUT_NORM,) * (not shape.kv_lora_rank))
        return _as_engine(Waiting(given, made), shape, split) if shape.te else Waiting(given, made, alone)
    if shape.shared_expert_size:
        given[op.MLP_NORM] = stream
        names = op.SHARED_FC1, op.SHARED_ACTIVATION, op.SHARED_FC2
        product(*names, tokens, shape.shared_expert_size, tensor, whole)
    rows, ranks = received(shape, split), split.experts_split
    given[op.DISPATCH] = sent = rows * shape.hidden_size * ELEMENT
    product(op.EXPERT_FC1, op.EXPERT_ACTIVATION, op.ROUTED, rows, shape.moe_ffn_hidden_size, ranks, sent)
    alone = (op.SHARED_ACTIVATION, *(op.INPUT_NORM,) * (not shape.kv_lora_rank))
    return _as_engine(Waiting(given, made), shape, split) if shape.te else Waiting(given, made, alone)


def _as_engine(waits: Waiting, shape: Shape, split: Degrees) -> Waiting:
    """The same of TransformerEngine's layers: what norms return is inside the linears after them, and in fp8 what
    linears are given takes a byte a number."""
    given, made = dict(waits.of_groups), dict(waits.of_operators)
    for norm, linear in ((op.INPUT_NORM, op.QKV), (op.MLP_NORM, op.FC1), (op.MLP_NORM, op.SHARED_FC1)):
        if norm in given and linear in made:
            size = given.pop(norm)
            if split.sequence_parallel:
                made[linear] += size * split.tensor
            else:
                given[norm if linear == op.SHARED_FC1 else linear] = size
    return Waiting({name: size // (1 + shape.fp8) for name, size in given.items()}, made)


def received(shape: Shape, split: Degrees) -> int:
    """Tokens that experts of one rank are given, each as often as it is routed to one of them."""
    return round(shape.tokens // _between(split) * split.experts_split * shape.moe_router_topk * shape.imbalance)


def _latent_bytes(shape: Shape, split: Degrees) -> dict[str, int]:
    """Of latent attention; who makes queries, keys and values of the latents keeps them for the core attention."""
    tokens, positions = shape.tokens, shape.qk_pos_emb_head_dim
    rows = tokens // _between(split)
    of_queries = rows * shape.q_lora_rank * ELEMENT
    latents = {op.Q_LATENT: of_queries} if of_queries else {}
    latents[op.LATENT] = rows * (shape.kv_lora_rank + positions) * ELEMENT
    if shape.qk_layernorm:
        for name, width in ((op.Q_NORM, shape.q_lora_rank), (op.LATENT_NORM, shape.kv_lora_rank)):
            if width:
                latents[name] = norm_of(shape, rows, width)
        if _decomposed(shape):
            latents |= {name: 0 for name in latents if name.endswith("down_proj")}
    query = tokens * shape.latent_query_width * ELEMENT // split.tensor
    value = tokens * _output_width(shape) * ELEMENT // split.tensor
    statistics = tokens * shape.num_attention_heads * 4 // split.tensor
    tables = 4 * shape.seq_length // shape.context * positions * ELEMENT
    # torch's attention on a CPU copies what it is given, and makes values as wide as queries.
    whole = 4 * query + value if shape.cpu and query != value else 2 * query + 2 * value
    return latents | {op.ATTENTION: tables, op.CORE: whole + statistics}


def _output_width(shape: Shape) -> int:
    return shape.num_attention_heads * shape.v_head_dim if shape.kv_lora_rank else shape.query_width


def _expert_bytes(shape: Shape, split: Degrees) -> dict[str, int]:
    tokens, rows = shape.tokens // _between(split), received(shape, split)
    routed = tokens * shape.moe_router_topk
    inner = rows * shape.moe_ffn_hidden_size * ELEMENT // split.experts_split
    found = {
        op.ROUTER: tokens * shape.num_experts * 9 + routed * (4 + 4 + 8) + shape.num_experts * 8 + 4,
        op.DISPATCH: rows * (shape.hidden_size + 1) * ELEMENT,
    }
    of_all = _mlp_bytes(shape, inner)
    found |= {op.EXPERT_FC1: of_all[op.FC1], op.EXPERT_ACTIVATION: of_all[op.ACTIVATION]}
    found[op.EXPERT_ACTIVATION] += inner * (not shape.fused)  # before it is weighed
    if shape.shared_expert_size:
        shared = _mlp_bytes(shape, shape.tokens * shape.shared_expert_size * ELEMENT // split.tensor)
        found |= {op.SHARED_FC1: shared[op.FC1], op.SHARED_ACTIVATION: shared[op.ACTIVATION]}
    return found


def mtp_bytes(shape: Shape, split: Degrees) -> int:
    """What a layer of multi-token prediction keeps beside a decoder layer's operators, of which it has no `INPUT`: what
    its first norms are given, and together return, the projection, and what the last norm is given."""
    stream, rows = stream_bytes(shape, split), shape.tokens // _between(split)
    statistics = 3 * (norm_bytes(shape, split) - stream)
    return (2 if _decomposed(shape) else 6) * stream + statistics + rows * 8


class Temporary(NamedTuple):
    """The most bytes that an operator holds beyond what backward keeps."""

    forward: int
    backward: int


def temporary_bytes(shape: Shape, split: Degrees, experts: bool) -> tuple[Temporary, dict[str, Temporary]]:
    """Of most operators of a layer, and of those that hold less.

    Gradients, above all of what an MLP's first linear returns, beside those that come in and of what one layer hands to
    the next; with sequence parallelism what a linear gathers, and what it is about to scatter; with context parallelism
    keys and values on their way. Measured of a dense layer on a GPU
    (benchmarks/results/nvidia-h200-2026-11-26/adaptive.profile.json), else estimated.
    """
    stream, tensor = stream_bytes(shape, split), split.tensor
    whole = gathered_bytes(shape, split)
    inner = shape.tokens // tensor * shape.ffn_hidden_size * ELEMENT
    if experts:
        inner = received(shape, split) // split.experts_split * shape.moe_ffn_hidden_size * ELEMENT
    alone = shape.fused and not experts  # one kernel makes the activation function
    keys = 2 * shape.key_width
    if shape.kv_lora_rank:
        keys = shape.latent_query_width + shape.num_attention_heads * shape.v_head_dim
    travelling = 2 * shape.tokens * keys * ELEMENT // tensor * (shape.context > 1)
    most = max((shape.gates + 1 if alone else 2 * shape.gates) * inner + stream, travelling)
    if whole:
        most = max(most, shape.gates * inner + 2 * (stream + whole))
    if experts or shape.kv_lora_rank or travelling:
        return Temporary(most, most), {}
    # Rotated queries are made of the product's result in four steps.
    attention = shape.tokens * (5 * shape.query_width + 2 * shape.key_width) * ELEMENT // tensor
    weight = shape.ffn_hidden_size * shape.hidden_size * ELEMENT // tensor
    end = Temporary(2 * stream + whole, min(most, inner + 2 * stream + whole + weight))
    return Temporary(max(shape.gates * inner + stream + whole, attention * shape.rope), most), {
        op.FC1: Temporary(shape.gates * inner + whole, most),
        op.ACTIVATION: Temporary(inner if alone else (shape.gates + 1) * inner, most),
        op.FC2: end,
        op.MLP_ADD: end,
    }


def stream_bytes(shape: Shape, split: Degrees) -> int:
    """What one layer hands to the next."""
    return shape.tokens * shape.hidden_size * ELEMENT // _between(split)


def gathered_bytes(shape: Shape, split: Degrees) -> int:
    """The same of all ranks that share it, which sequence parallelism puts together for a product."""
    return stream_bytes(shape, split) * split.tensor * (split.sequence_parallel and split.tensor > 1)


def mask_bytes(shape: Shape, split: Degrees) -> int:
    """What dropout keeps of the numbers that one layer hands to the next."""
    return stream_bytes(shape, split) // ELEMENT * shape.mask_element * shape.hidden_dropout


def norm_bytes(shape: Shape, split: Degrees) -> int:
    """What a norm of what stands between the blocks produces for backward."""
    return norm_of(shape, shape.tokens // _between(split), shape.hidden_size)


def norm_of(shape: Shape, rows: int, width: int) -> int:
    """What a norm produces for backward: its output, statistics per token, and where no kernel does it in one, fp32
    tensors."""
    output = rows * width * ELEMENT
    if _decomposed(shape):
        return output + rows * (2 * width + 1) * 4
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
    if shape.fused or not shape.bias:
        return {op.FC1: hidden, op.ACTIVATION: hidden}
    return {op.FC1: 0, op.ACTIVATION: 2 * hidden}  # what the bias was added to

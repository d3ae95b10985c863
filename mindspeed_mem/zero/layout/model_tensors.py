"""The parameters of published models, and of the GPT that Megatron-core builds from its options.

Names, order and sizes; of a GPT also those of one tensor-parallel rank. They are all that a chunk layout depends on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_mem.model_sizes import PUBLISHED, Published
from mindspeed_mem.zero.layout.cutting import ParameterSize


def published(name: str) -> tuple[ParameterSize, ...]:
    """The parameters of the model of that name in `PUBLISHED`, as Hugging Face's transformers lists them."""
    model = PUBLISHED[name]
    return tuple(ParameterSize(*one) for one in (gpt2 if model.family == "gpt2" else llama)(model))


def gpt2(model: Published) -> Iterator[tuple[str, int]]:
    """Names and elements of GPT2LMHeadModel, whose output matrix is its word embedding."""
    hidden = model.hidden_size
    yield "transformer.wte.weight", model.vocab_size * hidden
    yield "transformer.wpe.weight", model.seq_length * hidden
    for layer in range(model.num_layers):
        for part, inputs, outputs in (
            ("ln_1", 1, hidden),
            ("attn.c_attn", hidden, 3 * hidden),
            ("attn.c_proj", hidden, hidden),
            ("ln_2", 1, hidden),
            ("mlp.c_fc", hidden, 4 * hidden),
            ("mlp.c_proj", 4 * hidden, hidden),
        ):
            yield f"transformer.h.{layer}.{part}.weight", inputs * outputs
            yield f"transformer.h.{layer}.{part}.bias", outputs
    yield "transformer.ln_f.weight", hidden
    yield "transformer.ln_f.bias", hidden


def llama(model: Published) -> Iterator[tuple[str, int]]:
    """Names and elements of LlamaForCausalLM."""
    hidden, vocabulary = model.hidden_size, model.vocab_size
    keys = hidden // model.num_attention_heads * model.num_query_groups
    yield "model.embed_tokens.weight", vocabulary * hidden
    for layer in range(model.num_layers):
        for part, width in (("q", hidden), ("k", keys), ("v", keys), ("o", hidden)):
            yield f"model.layers.{layer}.self_attn.{part}_proj.weight", hidden * width
        for part in ("gate", "up", "down"):
            yield f"model.layers.{layer}.mlp.{part}_proj.weight", hidden * model.ffn_hidden_size
        for part in ("input", "post_attention"):
            yield f"model.layers.{layer}.{part}_layernorm.weight", hidden
    yield "model.norm.weight", hidden
    yield "lm_head.weight", vocabulary * hidden


@dataclass(frozen=True, kw_only=True)
class GPTShape:
    """A dense decoder on one pipeline stage; names and meanings are those of Megatron's options."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    """After padding."""
    max_position_embeddings: int
    """0: no learned positions."""
    swiglu: bool = False
    layer_norm: bool = True
    """Norms have a bias (LayerNorm) or have none (RMSNorm)."""
    bias: bool = True
    """Linears have biases."""
    untied: bool = False
    tensor_parallel: int = 1

    def parameters(self) -> Iterator[ParameterSize]:
        """Those of one tensor-parallel rank, as Megatron-core 0.16.1 orders them with its local layers.

        (Transformer Engine's layers keep each norm in the linear after it: the same sizes, two of them moved.)
        """
        query = self.num_attention_heads * self.kv_channels
        key = self.num_query_groups * self.kv_channels
        hidden, ranks = self.hidden_size, self.tensor_parallel
        vocabulary = self.vocab_size * hidden // ranks
        yield ParameterSize("embedding.word_embeddings.weight", vocabulary)
        if self.max_position_embeddings:
            yield ParameterSize("embedding.position_embeddings.weight", self.max_position_embeddings * hidden)
        for layer in range(self.num_layers):
            at = f"decoder.layers.{layer}."
            yield from self._norm(at + "input_layernorm")
            yield from self._split_in(at + "self_attention.linear_proj", query)
            yield from self._split_out(at + "self_attention.linear_qkv", query + 2 * key)
            yield from self._norm(at + "pre_mlp_layernorm")
            yield from self._split_out(at + "mlp.linear_fc1", self.ffn_hidden_size * (2 if self.swiglu else 1))
            yield from self._split_in(at + "mlp.linear_fc2", self.ffn_hidden_size)
        yield from self._norm("decoder.final_layernorm")
        if self.untied:
            yield ParameterSize("output_layer.weight", vocabulary)

    def _norm(self, name: str) -> Iterator[ParameterSize]:
        yield ParameterSize(name + ".weight", self.hidden_size)
        if self.layer_norm:
            yield ParameterSize(name + ".bias", self.hidden_size)

    def _split_out(self, name: str, width: int) -> Iterator[ParameterSize]:
        """A linear whose outputs are split over tensor-parallel ranks."""
        yield ParameterSize(name + ".weight", self.hidden_size * width // self.tensor_parallel)
        if self.bias:
            yield ParameterSize(name + ".bias", width // self.tensor_parallel)

    def _split_in(self, name: str, width: int) -> Iterator[ParameterSize]:
        """A linear whose inputs are split; each rank has all of its bias."""
        yield ParameterSize(name + ".weight", width * self.hidden_size // self.tensor_parallel)
        if self.bias:
            yield ParameterSize(name + ".bias", self.hidden_size)

"""The model that the options of a sub-command describe: Megatron's names, defaults, padding and divisibility."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mindspeed_mem.command_line import AsGiven, as_given, flag, whole

MODEL_NUMBERS = {
    "num_layers": "decoder layers",
    "hidden_size": "width of the residual stream",
    "ffn_hidden_size": "(4 times the hidden size; with --swiglu 2/3 of that, as Megatron rounds it)",
    "num_attention_heads": "attention heads of a layer",
    "num_query_groups": "key-value heads (the number of heads; with --group-query-attention 1)",
    "kv_channels": "width of a head (hidden size / heads)",
    "vocab_size": "tokens in the vocabulary, before padding (50257)",
}
"""Whole numbers that sub-commands about a model take, with their help."""
MODEL_SWITCHES = {
    "swiglu": "gated activation function",
    "group_query_attention": "fewer key-value heads, see --num-query-groups",
    "disable_bias_linear": "linear layers without biases",
    "untie_embeddings_and_output_weights": "an output layer with weights of its own",
}
"""Switches, with their help."""
MODEL_CHOICES = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "position_embedding_type": ("learned_absolute", "rope", "none"),
}
"""Options with a few values, the first of which is Megatron's default."""


_UNKNOWN = {
    "num_experts": "MoE",
    "moe_router_topk": "MoE",
    "moe_ffn_hidden_size": "MoE",
    "moe_shared_expert_intermediate_size": "MoE",
    "moe_layer_freq": "MoE",
    "moe_grouped_gemm": "MoE",
    "expert_model_parallel_size": "MoE",
    "expert_tensor_parallel_size": "MoE",
    "multi_latent_attention": "multi-latent attention",
    "q_lora_rank": "multi-latent attention",
    "kv_lora_rank": "multi-latent attention",
    "mtp_num_layers": "multi-token prediction",
}
"""Megatron's options that make other layers than these sub-commands know, and what they are about."""


class Published(NamedTuple):
    """A published model; names are those of Megatron's options."""

    family: str
    """Whose layers it has: gpt2 or llama."""
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    num_query_groups: int
    vocab_size: int
    seq_length: int
    """The longest it was trained with."""

    def options(self) -> dict[str, object]:
        """Megatron's options for it."""
        sizes = self._asdict()
        if sizes.pop("family") == "gpt2":
            return sizes
        style = {"swiglu": True, "disable_bias_linear": True, "untie_embeddings_and_output_weights": True}
        names = {"normalization": "RMSNorm", "position_embedding_type": "rope"}
        return {**sizes, **style, **names, "attention_dropout": "0", "hidden_dropout": "0"}


def _gpt2(layers: int, hidden: int, heads: int) -> Published:
    return Published("gpt2", layers, hidden, heads, 4 * hidden, heads, 50257, 1024)


# Of the models' config.json on Hugging Face.
PUBLISHED = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-7b": Published("llama", 32, 4096, 32, 11008, 32, 32000, 2048),
    "llama-13b": Published("llama", 40, 5120, 40, 13824, 40, 32000, 2048),
    "llama-65b": Published("llama", 80, 8192, 64, 22016, 64, 32000, 2048),
    "llama2-70b": Published("llama", 80, 8192, 64, 28672, 8, 32000, 4096),
    "llama3-8b": Published("llama", 32, 4096, 32, 14336, 8, 128256, 8192),
    "llama3-70b": Published("llama", 80, 8192, 64, 28672, 8, 128256, 8192),
    "mistral-7b": Published("llama", 32, 4096, 32, 14336, 8, 32000, 8192),
}


class ModelSizes(NamedTuple):
    """What the options of a model say about its parameters, with what Megatron puts where they say nothing."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    """After padding."""
    swiglu: bool
    bias: bool
    untied: bool

    def indivisible(self, ranks: int, more: Mapping[str, int] | None = None) -> list[str]:
        """Why attention has no such groups, and `ranks` tensor-parallel ranks cannot split the model.

        more: what else they split, by its option.
        """
        heads, groups = self.num_attention_heads, self.num_query_groups
        found = [f"--num-attention-heads {heads} is no multiple of --num-query-groups {groups}"] * bool(heads % groups)
        divided = {
            "--num-attention-heads": heads,
            "--num-query-groups": groups,
            "--ffn-hidden-size": self.ffn_hidden_size,
            **(more or {}),
        }
        return found + [
            f"{option} {size} is no multiple of --tensor-model-parallel-size {ranks}"
            for option, size in divided.items()
            if size % ranks
        ]


def add_options(
    group: argparse._ArgumentGroup,
    numbers: Mapping[str, str | None],
    switches: Mapping[str, str],
    choices: Mapping[str, tuple[str, ...]],
    texts: Mapping[str, str] | None = None,
) -> None:
    """Options with Megatron's names; numbers stay text, so that all that is wrong is said at once. `texts`: others that
    are more than a number."""
    for name, text in numbers.items():
        flags = [flag(name)] + ["--layers"] * (name == "num_layers")
        group.add_argument(*flags, dest=name, metavar="N", action=AsGiven, help=text)
    for name, text in switches.items():
        group.add_argument(flag(name), action="store_true", help=text)
    for name, allowed in choices.items():
        group.add_argument(flag(name), metavar="NAME", help=f"{', '.join(allowed)} ({allowed[0]})")
    for name, text in (texts or {}).items():
        group.add_argument(flag(name), metavar="X", help=text)
    if texts is None:
        for name in _UNKNOWN:  # only there to be refused with a reason
            group.add_argument(flag(name), nargs="*", help=argparse.SUPPRESS)


def read_options(
    given: argparse.Namespace,
    numbers: Iterable[str],
    choices: Mapping[str, tuple[str, ...]],
    unknown: str | None,
    wrong: list[str],
) -> dict[str, int | None]:
    """The whole numbers by name, None where one is not given; what is wrong with them, and with choices, in `wrong`.

    unknown: why options that make other layers are refused; None: they are known.
    """
    kinds: dict[str, list[str]] = {}
    for name, kind in _UNKNOWN.items():
        if unknown is not None and getattr(given, name) is not None:
            kinds.setdefault(kind, []).append(flag(name))
    wrong += [f"{', '.join(names)} ({kind}): {unknown}" for kind, names in kinds.items()]
    sizes = {name: whole(as_given(given, flag(name)), getattr(given, name), wrong) for name in numbers}
    for name, allowed in choices.items():
        if getattr(given, name) not in (None, *allowed):
            wrong.append(f"{flag(name)} takes {', '.join(allowed)}, not {getattr(given, name)!r}")
    return sizes


def model_sizes(given: argparse.Namespace, numbers: Mapping[str, int | None], wrong: list[str]) -> ModelSizes:
    """The model that the options describe, padded for its tensor-parallel ranks.

    numbers: from `read_options`, with layers, hidden size and heads given. Notes in `wrong` a hidden size that heads do
    not divide; `ModelSizes.indivisible` says the rest.
    """
    layers, hidden, heads = (numbers[name] for name in ("num_layers", "hidden_size", "num_attention_heads"))
    assert layers is not None and hidden is not None and heads is not None
    if numbers["kv_channels"] is None and hidden % heads:
        wrong.append(f"--hidden-size {hidden} is no multiple of --num-attention-heads {heads}; give --kv-channels")
    wide, multiple = 4 * hidden, 128 * (numbers["tensor_model_parallel_size"] or 1)
    return ModelSizes(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=numbers["ffn_hidden_size"] or (wide * 2 // 3 // 64 * 64 if given.swiglu else wide),
        num_attention_heads=heads,
        num_query_groups=numbers["num_query_groups"] or (1 if given.group_query_attention else heads),
        kv_channels=numbers["kv_channels"] or max(1, hidden // heads),
        vocab_size=-(-(numbers["vocab_size"] or 50257) // multiple) * multiple,
        swiglu=given.swiglu,
        bias=not given.disable_bias_linear,
        untied=given.untie_embeddings_and_output_weights,
    )

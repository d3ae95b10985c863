"""The options of ``python -m mindspeed_mem chunks``: read from text, so that all that is wrong is said at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

from mindspeed_mem.chunk.layout import ParameterSize
from mindspeed_mem.chunk.layout_text import BF16, MIB
from mindspeed_mem.chunk.model_tensors import PUBLISHED, GPTShape, published
from mindspeed_mem.command_line import MODEL_CHOICES, MODEL_SWITCHES, check_picture, number, whole

_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
_WHOLE = {
    "num_layers": "decoder layers",
    "hidden_size": None,
    "ffn_hidden_size": "4 times the hidden size; with --swiglu 2/3 of that, as Megatron rounds it",
    "num_attention_heads": None,
    "num_query_groups": "the number of heads; with --group-query-attention 1",
    "kv_channels": "hidden size / heads",
    "vocab_size": "before padding (50257)",
    "seq_length": "see --max-position-embeddings",
    "max_position_embeddings": "learned positions (the sequence length)",
    "tensor_model_parallel_size": "ranks that split each layer (1)",
}
DEFAULT_ELEMENTS = 32 * MIB
"""Range and minimum of the search, as in ColossalAI."""


@dataclass
class Request:
    """What was asked for; `wrong` holds every reason why it cannot be done."""

    parameters: Sequence[ParameterSize] = ()
    model: str = ""
    """What it is, for people."""
    world_size: int = 1
    range_elements: int = DEFAULT_ELEMENTS
    minimum_elements: int = DEFAULT_ELEMENTS
    step_elements: int = 1
    wrong: list[str] = field(default_factory=list)


def add_arguments(command: argparse.ArgumentParser) -> None:
    names = ", ".join(PUBLISHED)
    what = f"a published model, with the tensors that Hugging Face's transformers gives it: {names}"
    command.add_argument("--model", metavar="NAME", help=what)
    model = command.add_argument_group("or a model as Megatron builds it, without pipeline stages (Megatron's options)")
    for name, text in _WHOLE.items():
        model.add_argument(_flag(name), metavar="N", help=text)
    for name, text in MODEL_SWITCHES.items():
        model.add_argument(_flag(name), action="store_true", help=text)
    for name, choices in MODEL_CHOICES.items():
        model.add_argument(_flag(name), metavar="NAME", help=f"{', '.join(choices)} ({choices[0]})")
    search = command.add_argument_group("the search")
    search.add_argument("--data-parallel-size", metavar="N", help="ranks that share each chunk (1)")
    counted = "bytes of bf16 parameters; with --compatible as ColossalAI counts, in 2^20 elements"
    search.add_argument(
        "--chunk-search-range-mib", metavar="MIB", help=f"how far above the smallest size to try (64, or 32): {counted}"
    )
    search.add_argument(
        "--min-chunk-size-mib", metavar="MIB", help="smallest size to try (64, or 32), counted in the same way"
    )
    search.add_argument("--chunk-hidden-dim", metavar="N", help="step of the sizes, in elements (the hidden size)")
    what = "chunks of equal size, which ColossalAI 0.5.0 searches, instead of Megatron's buckets"
    search.add_argument("--compatible", action="store_true", help=what)
    what = "Megatron's option of that name"
    search.add_argument("--ddp-pad-buckets-for-high-nccl-busbw", action="store_true", help=what)
    command.add_argument("--json", action="store_true", help="print one JSON object, with each parameter's place")
    command.add_argument("--picture", metavar="FILE", help="draw the chunks: .svg, .png or .pdf")


def read(given: argparse.Namespace) -> Request:
    """The model's parameters and how to search."""
    request = Request()
    wrong = request.wrong
    hidden = _published(given, request) if given.model is not None else _shape(given, request)
    request.world_size = whole("--data-parallel-size", given.data_parallel_size, wrong) or 1
    unit = MIB if given.compatible else MIB // BF16
    for name, flag in (
        ("range_elements", "--chunk-search-range-mib"),
        ("minimum_elements", "--min-chunk-size-mib"),
    ):
        size = number(flag, getattr(given, flag[2:].replace("-", "_")), wrong, least=0)
        if size is not None:
            setattr(request, name, round(size * unit))
    request.step_elements = whole("--chunk-hidden-dim", given.chunk_hidden_dim, wrong) or hidden
    if given.compatible and given.ddp_pad_buckets_for_high_nccl_busbw:
        wrong.append("--ddp-pad-buckets-for-high-nccl-busbw is about Megatron's buckets, which --compatible has not")
    check_picture("--picture", given.picture, wrong)
    return request


def _published(given: argparse.Namespace, request: Request) -> int:
    others = [name for name in (*_WHOLE, *MODEL_SWITCHES, *MODEL_CHOICES) if getattr(given, name) not in (None, False)]
    if others:
        request.wrong.append(f"--model says what {', '.join(map(_flag, others))} would; give either")
    if given.model not in PUBLISHED:
        request.wrong.append(f"--model takes {', '.join(PUBLISHED)}, not {given.model!r}")
        return 1
    model = published(given.model)
    request.parameters = model.parameters
    request.model = f"{given.model} with Hugging Face's tensors"
    return model.hidden_size


def _shape(given: argparse.Namespace, request: Request) -> int:
    wrong = request.wrong
    learned = given.position_embedding_type in (None, "learned_absolute")
    missing = [_flag(name) for name in _NEEDED if getattr(given, name) is None]
    if learned and given.max_position_embeddings is None and given.seq_length is None:
        missing.append("--max-position-embeddings (for learned positions)")
    if missing:
        wrong.append(f"{', '.join(missing)}: missing; without --model the model's shape is needed")
    sizes = {name: whole(_flag(name), getattr(given, name), wrong) for name in _WHOLE}
    for name, choices in MODEL_CHOICES.items():
        if getattr(given, name) not in (None, *choices):
            wrong.append(f"{_flag(name)} takes {', '.join(choices)}, not {getattr(given, name)!r}")
    if wrong:
        return 1
    ranks = sizes["tensor_model_parallel_size"] or 1
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    if sizes["kv_channels"] is None and hidden % heads:
        wrong.append(f"--hidden-size {hidden} is no multiple of --num-attention-heads {heads}; give --kv-channels")
    wide, multiple = 4 * hidden, 128 * ranks
    shape = GPTShape(
        num_layers=sizes["num_layers"],
        hidden_size=hidden,
        ffn_hidden_size=sizes["ffn_hidden_size"] or (wide * 2 // 3 // 64 * 64 if given.swiglu else wide),
        num_attention_heads=heads,
        num_query_groups=sizes["num_query_groups"] or (1 if given.group_query_attention else heads),
        kv_channels=sizes["kv_channels"] or max(1, hidden // heads),
        vocab_size=-(-(sizes["vocab_size"] or 50257) // multiple) * multiple,
        max_position_embeddings=(sizes["max_position_embeddings"] or sizes["seq_length"]) if learned else 0,
        swiglu=given.swiglu,
        layer_norm=given.normalization in (None, "LayerNorm"),
        bias=not given.disable_bias_linear,
        untied=given.untie_embeddings_and_output_weights,
        tensor_parallel=ranks,
    )
    if heads % shape.num_query_groups:
        wrong.append(f"--num-attention-heads {heads} is no multiple of --num-query-groups {shape.num_query_groups}")
    divided = {
        "--num-attention-heads": heads,
        "--num-query-groups": shape.num_query_groups,
        "--ffn-hidden-size": shape.ffn_hidden_size,
    }
    for flag, size in divided.items():
        if size % ranks:
            wrong.append(f"{flag} {size} is no multiple of --tensor-model-parallel-size {ranks}")
    if not wrong:
        request.parameters = tuple(shape.parameters())
        of_rank = f", on one of {ranks} tensor-parallel ranks" if ranks > 1 else ""
        request.model = f"a GPT with {shape.num_layers} layers as Megatron builds it{of_rank}"
    return hidden


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

"""The options of ``python -m mindspeed_mem chunks``: read from text, so that all that is wrong is said at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

from mindspeed_mem.command_line import check_picture, flag, instead_of, number, whole
from mindspeed_mem.model_sizes import (
    MODEL_CHOICES,
    MODEL_NUMBERS,
    MODEL_SWITCHES,
    PUBLISHED,
    add_options,
    add_unknown,
    model_sizes,
    read_options,
    refuse_unknown,
)
from mindspeed_mem.zero.layout.cutting import ParameterSize
from mindspeed_mem.zero.layout.model_tensors import GPTShape, published
from mindspeed_mem.zero.layout.shown import BF16, MIB

_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
_NUMBERS = MODEL_NUMBERS | {
    "seq_length": "see --max-position-embeddings",
    "max_position_embeddings": "learned positions (the sequence length)",
    "tensor_model_parallel_size": "ranks that split each layer (1)",
}
BOUNDS = ("--min-chunk-size-mib", "--chunk-search-range-mib", "--chunk-hidden-dim")
"""Options of the search that training has, too."""
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
    add_options(model, _NUMBERS, MODEL_SWITCHES, MODEL_CHOICES)
    add_unknown(command)
    search = command.add_argument_group("the search")
    search.add_argument("--data-parallel-size", metavar="N", help="ranks that share each chunk (1)")
    default = "(64; with --compatible 32)"
    counted = "bytes of bf16 parameters; with --compatible as ColossalAI counts, in 2^20 elements"
    search.add_argument(
        "--chunk-search-range-mib", metavar="MIB", help=f"how far above the smallest size to try {default}: {counted}"
    )
    search.add_argument(
        "--min-chunk-size-mib", metavar="MIB", help=f"smallest size to try {default}, counted in the same way"
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
    for name, option in (
        ("range_elements", "--chunk-search-range-mib"),
        ("minimum_elements", "--min-chunk-size-mib"),
    ):
        size = number(option, getattr(given, option[2:].replace("-", "_")), wrong, least=0)
        if size is not None:  # rounded as ColossalAI does it, otherwise as training does
            setattr(request, name, round(size * unit) if given.compatible else int(size * unit))
    request.step_elements = whole("--chunk-hidden-dim", given.chunk_hidden_dim, wrong) or hidden
    if given.compatible and given.ddp_pad_buckets_for_high_nccl_busbw:
        wrong.append("--ddp-pad-buckets-for-high-nccl-busbw is about Megatron's buckets, which --compatible has not")
    check_picture("--picture", given.picture, wrong)
    return request


def _published(given: argparse.Namespace, request: Request) -> int:
    instead_of("--model", given, (*_NUMBERS, *MODEL_SWITCHES, *MODEL_CHOICES), request.wrong)
    if given.model not in PUBLISHED:
        request.wrong.append(f"--model takes {', '.join(PUBLISHED)}, not {given.model!r}")
        return 1
    request.parameters = published(given.model)
    request.model = f"{given.model} with Hugging Face's tensors"
    return PUBLISHED[given.model].hidden_size


def _shape(given: argparse.Namespace, request: Request) -> int:
    wrong = request.wrong
    learned = given.position_embedding_type in (None, "learned_absolute")
    missing = [flag(name) for name in _NEEDED if getattr(given, name) is None]
    if learned and given.max_position_embeddings is None and given.seq_length is None:
        missing.append("--max-position-embeddings (for learned positions)")
    if missing:
        wrong.append(f"{', '.join(missing)}: missing; without --model the model's shape is needed")
    refuse_unknown(given, "chunks does not know its parameters; those of GPTs and of --model", wrong)
    numbers = read_options(given, _NUMBERS, MODEL_CHOICES, wrong)
    if wrong:
        return 1
    ranks = numbers["tensor_model_parallel_size"] or 1
    sizes = model_sizes(given, numbers, wrong)
    wrong += sizes.indivisible(ranks)
    if not wrong:
        shape = GPTShape(
            **sizes._asdict(),
            max_position_embeddings=(numbers["max_position_embeddings"] or numbers["seq_length"]) if learned else 0,
            layer_norm=given.normalization in (None, "LayerNorm"),
            tensor_parallel=ranks,
        )
        request.parameters = tuple(shape.parameters())
        of_rank = f", on one of {ranks} tensor-parallel ranks" if ranks > 1 else ""
        request.model = f"a GPT with {shape.num_layers} layers as Megatron builds it{of_rank}"
    return sizes.hidden_size

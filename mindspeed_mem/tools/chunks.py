"""``python -m mindspeed_mem chunks``: how large chunks should be, what lies in each, and what padding wastes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_mem.command_line import check_layers, check_picture, flag, instead_of, number, whole
from mindspeed_mem.model_sizes import (
    MODEL_CHOICES,
    MODEL_NUMBERS,
    MODEL_SWITCHES,
    PUBLISHED,
    add_options,
    model_sizes,
    read_options,
)
from mindspeed_mem.zero.layout import shown
from mindspeed_mem.zero.layout.cutting import Layout, ParameterSize, equal_chunks, megatron_buckets, sizes_of
from mindspeed_mem.zero.layout.model_tensors import GPTShape, published
from mindspeed_mem.zero.layout.shown import BF16, MIB, bf16_mib
from mindspeed_mem.zero.layout.size_search import BucketSize, ChunkSize, search_bucket_size, search_chunk_size

DESCRIPTION = """Searches the size of the chunks in which data-parallel ranks share parameters, and prints which
parameters lie in which chunk (# used, . padding). Nothing is run, and Megatron is not needed:

    python -m mindspeed_mem chunks --model llama-7b --data-parallel-size 8
    python -m mindspeed_mem chunks --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 \\
        --data-parallel-size 8 --min-chunk-size-mib 128

Chunks are Megatron's own buckets, which take parameters from the last to the first and end when they have reached the
size; among the sizes with less than 0.1 % padding the one is taken whose largest chunk is smallest. With --compatible
they have equal sizes, filled from the first parameter to the last; a parameter larger than a chunk has one of its own.
"""

_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
_NUMBERS = MODEL_NUMBERS | {
    "seq_length": "see --max-position-embeddings",
    "max_position_embeddings": "learned positions (the sequence length)",
    "tensor_model_parallel_size": "ranks that split each layer (1)",
}
_BOUNDS = ("--min-chunk-size-mib", "--chunk-search-range-mib", "--chunk-hidden-dim")
"""Options of the search that training has, too."""
_DEFAULT_ELEMENTS = 32 * MIB
"""Range and minimum of the search, as in ColossalAI."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    names = ", ".join(PUBLISHED)
    what = f"a published model, with the tensors that Hugging Face's transformers gives it: {names}"
    command.add_argument("--model", metavar="NAME", help=what)
    model = command.add_argument_group(
        "or a model as Megatron builds it, without pipeline stages (Megatron's options; defaults in parentheses)"
    )
    add_options(model, _NUMBERS, MODEL_SWITCHES, MODEL_CHOICES)
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


def main(given: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    request = _read(given)
    if request.wrong:
        print("mindspeed_mem chunks:", *(f"  {reason}" for reason in request.wrong), sep="\n", file=sys.stderr)
        return 2
    padded = given.ddp_pad_buckets_for_high_nccl_busbw
    bounds: dict[str, Any] = {
        "range_elements": request.range_elements,
        "minimum_elements": request.minimum_elements,
        "step_elements": request.step_elements,
    }
    sizes, ranks = sizes_of(request.parameters), request.world_size
    found: BucketSize | ChunkSize
    if given.compatible:
        found = size = search_chunk_size(sizes, ranks, **bounds)
        layout = equal_chunks(request.parameters, size.chunk_elements, ranks)
        first, last = _equal(size, layout, request), []
    else:
        found = bucket = search_bucket_size(sizes, ranks, **bounds, high_bandwidth_padding=padded)
        layout = megatron_buckets(request.parameters, bucket.target_elements, ranks, high_bandwidth_padding=padded)
        first = _buckets(bucket, request)
        last = _training(given, bucket)
    if given.json:
        print(json.dumps(_as_json(found, layout, request, bounds)))
    else:
        print("\n".join([_model(request), *first, "", *shown.lines(layout), "", _summary(layout, ranks), *last]))
    if given.picture:
        shown.draw(layout, given.picture, f"{_model(request)}\n{_summary(layout, ranks)}")
        print(f"drawn to {given.picture}", file=sys.stderr if given.json else sys.stdout)
    return 0


def _model(request: Request) -> str:
    sizes = sizes_of(request.parameters)
    ranks = f"{request.world_size} data-parallel rank{'s' * (request.world_size > 1)}"
    elements = sum(sizes)
    return f"{request.model}: {len(sizes)} parameters, {elements:,} elements, {bf16_mib(elements)} MiB in bf16; {ranks}"


def _buckets(found: BucketSize, request: Request) -> list[str]:
    if sum(sizes_of(request.parameters)) < request.minimum_elements:
        return [_one(request)]
    low, high = request.minimum_elements, request.minimum_elements + request.range_elements
    return [
        f"Megatron's buckets, which end when they have reached {_size(found.target_elements)}",
        f"searched from {bf16_mib(low)} to {bf16_mib(high)} MiB in steps of {request.step_elements:,} elements",
    ]


def _equal(found: ChunkSize, layout: Layout, request: Request) -> list[str]:
    if found.total_elements < request.minimum_elements:
        return [_one(request)]
    own = sum(chunk.capacity > found.chunk_elements for chunk in layout.chunks)
    larger = f"; {own} larger, for a parameter of {'its' if own == 1 else 'their'} own" if own else ""
    return [
        f"chunks of {_size(found.chunk_elements)}{larger}",
        f"searched over {bf16_mib(request.range_elements)} MiB from {bf16_mib(request.minimum_elements)} MiB or the "
        f"largest parameter scored, in steps of {request.step_elements:,} elements",
        f"ColossalAI would report {found.reported_waste_fraction:.3%} padding",
    ]


def _training(given: argparse.Namespace, found: BucketSize) -> list[str]:
    """Options with which training makes these chunks."""
    padding = " --ddp-pad-buckets-for-high-nccl-busbw" * given.ddp_pad_buckets_for_high_nccl_busbw
    options = f"--overlap-grad-reduce --ddp-bucket-size {found.target_elements}"
    lines = [f"in Megatron-LM: --use-distributed-optimizer {options}{padding}"]
    bounds = {flag: getattr(given, flag[2:].replace("-", "_")) for flag in _BOUNDS}
    asked = "".join(f" {flag} {text}" for flag, text in bounds.items() if text is not None)
    trainable = all(text is None or float(text) > 0 for text in bounds.values())  # zeros are for this command only
    if given.model is None and trainable:  # other tensors than Megatron's make other chunks
        stage = "--use-distributed-optimizer --chunk-zero-stage 3"
        lines.append(f"with this package, stage 3 or 2: {stage}{asked}{padding}")
    return lines


def _one(request: Request) -> str:
    return f"all parameters together are less than the minimum of {_size(request.minimum_elements)}: one chunk"


def _size(elements: int) -> str:
    return f"{elements:,} elements ({bf16_mib(elements)} MiB)"


def _summary(layout: Layout, ranks: int) -> str:
    chunks = f"{layout.count} chunk{'s' * (layout.count > 1)}, the largest {bf16_mib(layout.largest)} MiB"
    shard = f"{bf16_mib(layout.held_elements // ranks)} MiB of shards on each rank"
    waste = f"{layout.waste_elements:,} elements, {bf16_mib(layout.waste_elements)} MiB"
    return f"{chunks}; {shard}; padding {layout.waste_fraction:.4%} ({waste})"


def _as_json(found: BucketSize | ChunkSize, layout: Layout, request: Request, bounds: dict[str, int]) -> dict[str, Any]:
    """All numbers are elements, but for the fractions and counts."""
    return {
        "model": request.model,
        "data_parallel_size": request.world_size,
        "searched": bounds,
        "found": dataclasses.asdict(found),
        "count": layout.count,
        "largest": layout.largest,
        "held": layout.held_elements,
        "waste": layout.waste_elements,
        "waste_fraction": layout.waste_fraction,
        "chunks": [dataclasses.asdict(chunk) for chunk in layout.chunks],
    }


# ---- what the options say


@dataclass
class Request:
    """What was asked for; `wrong` holds every reason why it cannot be done."""

    parameters: Sequence[ParameterSize] = ()
    model: str = ""
    """What it is, for people."""
    world_size: int = 1
    range_elements: int = _DEFAULT_ELEMENTS
    minimum_elements: int = _DEFAULT_ELEMENTS
    step_elements: int = 1
    wrong: list[str] = field(default_factory=list)


def _read(given: argparse.Namespace) -> Request:
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
        wrong.append("--ddp-pad-buckets-for-high-nccl-busbw is about Megatron's buckets: not with --compatible")
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
    unknown = "chunks does not know its parameters; those of GPTs and of --model"
    numbers = read_options(given, _NUMBERS, MODEL_CHOICES, unknown, wrong)
    check_layers("--num-layers", numbers["num_layers"], wrong)
    if wrong:
        return 1
    ranks = numbers["tensor_model_parallel_size"] or 1
    sizes = model_sizes(given, numbers, wrong)
    wrong += sizes.indivisible(ranks)
    if not wrong:
        positions = numbers["max_position_embeddings"] or numbers["seq_length"] or 0
        shape = GPTShape(
            **sizes._asdict(),
            max_position_embeddings=positions if learned else 0,
            layer_norm=given.normalization in (None, "LayerNorm"),
            tensor_parallel=ranks,
        )
        request.parameters = tuple(shape.parameters())
        of_rank = f", on one of {ranks} tensor-parallel ranks" if ranks > 1 else ""
        request.model = f"a GPT with {shape.num_layers} layers as Megatron builds it{of_rank}"
    return sizes.hidden_size

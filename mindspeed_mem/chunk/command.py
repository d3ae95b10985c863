"""``python -m mindspeed_mem chunks``: how large chunks should be, what lies in each, and what padding wastes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from mindspeed_mem.chunk import command_options
from mindspeed_mem.chunk.command_options import BOUNDS, Request
from mindspeed_mem.zero.layout import shown
from mindspeed_mem.zero.layout.cutting import Layout, equal_chunks, megatron_buckets, sizes_of
from mindspeed_mem.zero.layout.shown import mib
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

add_arguments = command_options.add_arguments


def main(given: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    request = command_options.read(given)
    if request.wrong:
        print("mindspeed_mem chunks:", *(f"  {reason}" for reason in request.wrong), sep="\n", file=sys.stderr)
        return 2
    padded = given.ddp_pad_buckets_for_high_nccl_busbw
    bounds = {
        "range_elements": request.range_elements,
        "minimum_elements": request.minimum_elements,
        "step_elements": request.step_elements,
    }
    sizes, ranks = sizes_of(request.parameters), request.world_size
    if given.compatible:
        found = search_chunk_size(sizes, ranks, **bounds)
        layout = equal_chunks(request.parameters, found.chunk_elements, ranks)
        first, last = _equal(found, layout, request), []
    else:
        found = search_bucket_size(sizes, ranks, **bounds, high_bandwidth_padding=padded)
        layout = megatron_buckets(request.parameters, found.target_elements, ranks, high_bandwidth_padding=padded)
        first = _buckets(found, request)
        last = _training(given, found)
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
    return f"{request.model}: {len(sizes)} parameters, {sum(sizes):,} elements, {mib(sum(sizes))} MiB in bf16; {ranks}"


def _buckets(found: BucketSize, request: Request) -> list[str]:
    if sum(sizes_of(request.parameters)) < request.minimum_elements:
        return [_one(request)]
    low, high = request.minimum_elements, request.minimum_elements + request.range_elements
    return [
        f"Megatron's buckets, which end when they have reached {_size(found.target_elements)}",
        f"searched from {mib(low)} to {mib(high)} MiB in steps of {request.step_elements:,} elements",
    ]


def _equal(found: ChunkSize, layout: Layout, request: Request) -> list[str]:
    if found.total_elements < request.minimum_elements:
        return [_one(request)]
    own = sum(chunk.capacity > found.chunk_elements for chunk in layout.chunks)
    larger = f"; {own} larger, for a parameter of {'its' if own == 1 else 'their'} own" if own else ""
    return [
        f"chunks of {_size(found.chunk_elements)}{larger}",
        f"searched over {mib(request.range_elements)} MiB from {mib(request.minimum_elements)} MiB or the largest "
        f"parameter scored, in steps of {request.step_elements:,} elements",
        f"ColossalAI would report {found.reported_waste_fraction:.3%} padding",
    ]


def _training(given: argparse.Namespace, found: BucketSize) -> list[str]:
    """Options with which training makes these chunks."""
    padding = " --ddp-pad-buckets-for-high-nccl-busbw" * given.ddp_pad_buckets_for_high_nccl_busbw
    options = f"--overlap-grad-reduce --ddp-bucket-size {found.target_elements}"
    lines = [f"in Megatron-LM: --use-distributed-optimizer {options}{padding}"]
    bounds = {flag: getattr(given, flag[2:].replace("-", "_")) for flag in BOUNDS}
    asked = "".join(f" {flag} {text}" for flag, text in bounds.items() if text is not None)
    trainable = all(text is None or float(text) > 0 for text in bounds.values())  # zeros are for this command only
    if given.model is None and trainable:  # other tensors than Megatron's make other chunks
        stage = "--use-distributed-optimizer --chunk-zero-stage 3"
        lines.append(f"with this package, stage 3 or 2: {stage}{asked}{padding}")
    return lines


def _one(request: Request) -> str:
    return f"all parameters together are less than the minimum of {_size(request.minimum_elements)}: one chunk"


def _size(elements: int) -> str:
    return f"{elements:,} elements ({mib(elements)} MiB)"


def _summary(layout: Layout, ranks: int) -> str:
    chunks = f"{layout.count} chunk{'s' * (layout.count > 1)}, the largest {mib(layout.largest)} MiB"
    shard = f"{mib(layout.held_elements // ranks)} MiB of shards on each rank"
    waste = f"{layout.waste_elements:,} elements, {mib(layout.waste_elements)} MiB"
    return f"{chunks}; {shard}; padding {layout.waste_fraction:.4%} ({waste})"


def _as_json(found: BucketSize | ChunkSize, layout: Layout, request: Request, bounds: dict[str, int]) -> dict:
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

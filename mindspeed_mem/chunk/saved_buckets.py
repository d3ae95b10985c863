"""Optimizer states in checkpoints that follow Megatron's buckets: whether they fit this run, and where elements lie.

Chunks are buckets, and another stage, chunk size or model order gives other buckets. A checkpoint that is keyed by
buckets can then not be read; one that is keyed by parameters can.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch

_BUCKET = re.compile(r"(?P<buffer>.*)\.bucket_idx_(?P<bucket>\d+)\.param")
_Sizes = dict[tuple[str, int], int]


def of_buckets(shapes: Mapping[str, Sequence[int]]) -> _Sizes:
    """Elements of each bucket, by buffer and number, in tensors that a checkpoint holds or is asked for."""
    found = ((_BUCKET.fullmatch(key), shape) for key, shape in shapes.items())
    return {(match["buffer"], int(match["bucket"])): int(shape[0]) for match, shape in found if match}


def difference(saved: _Sizes, wanted: _Sizes) -> str | None:
    """Why a checkpoint with the buckets `saved` does not fit one that asks for `wanted`; None if it does."""
    buffers = {buffer for buffer, _ in wanted}
    saved = {place: size for place, size in saved.items() if place[0] in buffers}
    if saved == wanted:
        return None
    first = min(place for place in {**saved, **wanted} if saved.get(place) != wanted.get(place))
    return (
        "the optimizer's state was saved bucket by bucket (dp_reshardable), and this run has other buckets: "
        f"{len(saved)} there and {len(wanted)} here, bucket {first[1]} of {saved.get(first, 0)} elements there and "
        f"{wanted.get(first, 0)} here. Buckets follow from --chunk-zero-stage, --min-chunk-size-mib, "
        "--chunk-search-range-mib and --chunk-hidden-dim; without chunks from --overlap-grad-reduce and "
        "--ddp-bucket-size. Load with those it was saved with, save again with --dist-ckpt-optim-fully-reshardable "
        "(distrib_optim_sharding_type: fully_reshardable), and load that; or leave the optimizer out (--no-load-optim)"
    )


def with_padding(packed: torch.Tensor, spans: Iterable[tuple[int, int]]) -> torch.Tensor:
    """`packed`, the elements of all buckets one after the other, as they lie in a buffer.

    spans: of each bucket in order, its offset in the buffer and its elements without padding. What lies between is 0.
    """
    spans = list(spans)
    end = max(offset + elements for offset, elements in spans)
    if end == packed.numel():
        return packed
    padded, start = packed.new_zeros(end), 0
    for offset, elements in spans:
        padded[offset : offset + elements] = packed[start : start + elements]
        start += elements
    return padded

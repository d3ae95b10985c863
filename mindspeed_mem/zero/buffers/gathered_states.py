"""States that Megatron's distributed optimizer has gathered for a checkpoint, where its parameters are to be found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def with_padding(state: dict[int, Any], buffers: Sequence[Any]) -> dict[int, Any]:
    """What `get_parameter_state_dp_zero` returns, each tensor as long as its buffer; changed in place.

    Upstream joins buckets without the padding between them, and `sharded_param_state_fully_reshardable` then cuts
    parameters out as if it were there: without an error, behind the first bucket with padding, the masters and moments
    saved are those of other elements (megatron-core 0.16.1; where nothing is missing nothing changes).
    """
    for number, buffer in enumerate(buffers):
        spans = [(bucket.offset, bucket.numel_unpadded) for bucket in buffer.buckets]
        for tensors in state[number].values():
            for key, packed in tensors.items():
                if isinstance(packed, torch.Tensor):
                    tensors[key] = _spread(packed, spans)
    return state


def _spread(packed: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """`packed`, the elements of all buckets one after the other, as they lie in a buffer.

    spans: of each bucket in order, its offset in the buffer and its elements without padding. What lies between is 0.
    """
    end, start = max(offset + elements for offset, elements in spans), 0
    if end == packed.numel() or packed.numel() != sum(elements for _, elements in spans):
        return packed
    padded = packed.new_zeros(end)
    for offset, elements in spans:
        padded[offset : offset + elements] = packed[start : start + elements]
        start += elements
    return padded

"""What settings are called where a message names them: Megatron's and our flags, or arguments of `attach`."""

from __future__ import annotations

from typing import NamedTuple


class Wording(NamedTuple):
    """Phrases for "try: ..." and for names in a sentence."""

    planning: str
    device_memory: str
    host_memory: str
    recompute_all: str
    smaller: str
    """What makes a step smaller."""
    more_ranks: str
    split_states: str
    split_more: str
    """Gradients and parameters, too."""
    split_model: str
    smaller_planned: str
    """What makes a planned step smaller."""
    split_sequence: str
    """Between the blocks; empty: there is no such thing."""


MEGATRON = Wording(
    planning="--adaptive-memory-optimization",
    device_memory="--device-memory-gib",
    host_memory="--swap-host-memory-gib",
    recompute_all="--recompute-layers all",
    smaller="a smaller --micro-batch-size or --seq-length",
    more_ranks="more ranks for the same model (--tensor-model-parallel-size, --pipeline-model-parallel-size, "
    "--use-distributed-optimizer, --chunk-zero-stage 3)",
    split_states="split the optimizer's states over data-parallel ranks (--use-distributed-optimizer)",
    split_more="split gradients and parameters too, or keep them on the host (--chunk-zero-stage 3, "
    "--placement-policy host)",
    split_model="split the model further (--tensor-model-parallel-size, --pipeline-model-parallel-size)",
    smaller_planned="a smaller --micro-batch-size, or --context-parallel-size for long sequences",
    split_sequence="--sequence-parallel beside --tensor-model-parallel-size, which splits what stands between the "
    "blocks",
)

_SPLIT = "parameters, gradients and optimizer states split over more ranks (torch's fully_shard)"

ATTACH = Wording(
    planning="attach's plan='auto'",
    device_memory="attach's device_memory_gib",
    host_memory="attach's host_memory_gib",
    recompute_all="attach with the plan {'recompute_config': {'recompute': True}}",
    smaller="smaller micro-batches (more of them in a step give the same gradients) or shorter sequences",
    more_ranks=_SPLIT,
    split_states=_SPLIT,
    split_more="parameters and optimizer states in fewer bytes (LoRA, an optimizer with smaller states)",
    split_model="the model split further (mindspeed_mem.parallel)",
    smaller_planned="smaller micro-batches, or shorter sequences",
    split_sequence="",
)

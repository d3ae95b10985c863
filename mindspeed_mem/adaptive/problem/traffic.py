"""What travels between pipeline stages and data-parallel ranks, in seconds that computation waits for it.

Gradients are reduced once a step, and parameters that the distributed optimizer split are gathered: beside the last
backward and the first forward, but for what the first of the layers to need them waits for. Chunks of stage 3 are
gathered for each pass, of each layer while the one before computes. Chunks that rest on the host travel over its link.
"""

from __future__ import annotations

import math

from mindspeed_mem.adaptive.problem.definition import GB
from mindspeed_mem.adaptive.problem.layer_bytes import stream_bytes
from mindspeed_mem.adaptive.problem.shape import ELEMENT, Degrees, Machine, Network, Shape


def send_seconds(shape: Shape, split: Degrees, machine: Machine) -> float:
    """Of what one stage hands to the next: each tensor-parallel rank its share, which is put together again."""
    network = machine.network
    if network is None or split.pipeline == 1:
        return 0.0
    stream = stream_bytes(shape, split)
    shares = 1 if split.sequence_parallel else split.tensor
    gathered = stream * (1 - 1 / shares) / (machine.tensor_gbps * GB)
    return (stream / shares / (network.pipeline_gbps * GB) + gathered + network.latency_seconds) * (
        network.pipeline_gbps < math.inf
    )


def waits_for_sends(split: Degrees, machine: Machine) -> bool:
    """Whether a stage computes nothing while it sends and receives."""
    return machine.network is not None and (split.virtual == 1 or not machine.network.sends_overlap)


def of_chunks(
    parameters: tuple[int, int], forward: float, backward: float, split: Degrees, machine: Machine
) -> tuple[float, float]:
    """Seconds that the passes of a layer get longer where its chunks are gathered and reduced for each micro-batch.

    parameters: of the layer, without experts and of those; forward, backward: what it computes.
    """
    if split.chunk_zero_stage < 2 or machine.network is None:
        return 0.0, 0.0
    gather = 0.0
    if split.chunk_zero_stage == 3:
        gather = _collective(parameters, ELEMENT, split, machine.network)
        gather += (1 - split.on_device) * _own(parameters, split) * ELEMENT / (machine.link_gbps * GB)
    reduce = _collective(parameters, split.grad_bytes, split, machine.network) * split.reduce_each
    return machine.network.beside(gather, forward), machine.network.beside(gather + reduce, backward)


def step_seconds(
    parameters: tuple[int, int], layers: int, forward: float, backward: float, split: Degrees, machine: Machine
) -> float:
    """Seconds that a stage's step takes besides its passes: optimizer, reductions and gathers that do not hide.

    Args:
        parameters: of the stage's rank, without experts and of those.
        layers: of the stage.
        forward: of one micro-batch on the stage,
        backward: and its backward, which hide what they can.
        split: how the model is split.
        machine: how fast ranks reach each other and the host.
    """
    splits = split.distributed_optimizer or split.chunk_zero_stage > 0
    mine = _own(parameters, split) if splits else sum(parameters)
    # Gradients and states are read, states and parameters written; what rests on the host comes up, and goes back.
    step = mine * (split.grad_bytes + 2 * split.state_bytes + ELEMENT) / (machine.memory_gbps * GB)
    step += (1 - split.on_device) * mine * split.state_bytes / (machine.link_gbps * GB)
    network = machine.network
    if network is None:
        return step
    reduce = _collective(parameters, split.grad_bytes, split, network) * (1 if splits else 2)
    gather = _collective(parameters, ELEMENT, split, network) * splits
    if split.chunk_zero_stage == 3:
        gather = 0.0  # for each pass
    if split.chunk_zero_stage >= 2 and split.reduce_each:
        reduce = 0.0  # in each backward, the last one included
    if not split.overlap:
        return step + reduce + gather
    # What is left of the last layer's backward, or comes before the first one's forward, has nothing beside it.
    exposed = (
        network.beside(seconds * (1 - 1 / layers), computing) + seconds / layers
        for seconds, computing in ((reduce, backward), (gather, forward))
    )
    return step + sum(exposed)


def _collective(parameters: tuple[int, int], each: int, split: Degrees, network: Network) -> float:
    """A reduce-scatter or a gather of all of them, `each` bytes of one."""
    total = 0.0
    speeds = network.data_gbps, network.expert_data_gbps
    for count, ranks, gbps in zip(parameters, _ranks(split), speeds, strict=True):
        if count:
            total += count * each * (1 - 1 / ranks) / (gbps * GB)
            total += (ranks - 1) * network.latency_seconds * (gbps < math.inf)
    return total


def _own(parameters: tuple[int, int], split: Degrees) -> float:
    """How many of them a rank's shards hold."""
    return sum(count / ranks for count, ranks in zip(parameters, _ranks(split), strict=True))


def _ranks(split: Degrees) -> tuple[int, int]:
    return split.data * split.context, split.expert_data

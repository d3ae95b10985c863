"""Devices in nodes, and what groups of ranks reach over the links that a layout puts between them.

Ranks are numbered as Megatron numbers them: tensor-parallel ones next to each other, then context, data and pipeline;
experts' ranks apart from that, tensor, expert, data. So a group lies in a node, or is spread over nodes with as many of
its ranks in each as fit; over nodes its collectives use the network of all of these.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mindspeed_mem.adaptive.problem.shape import Degrees, Machine, Network

LATENCY = 10e-6
"""Seconds of a message, unless said."""
LARGE, OPERANDS = 1.12, 0.5
"""Products of unlimited size are faster than those of layers, for which devices' figures are, by this factor; and of
the time to read and write what a product works on half does not hide. Both from published runs, which a test has."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What there is to train on."""

    machine: Machine
    """One device. Its `tensor_gbps` are those within a node."""
    devices: int
    per_node: int
    inter_node_gbps: float
    """Of each device, to others outside its node."""
    latency_seconds: float = LATENCY
    sends_overlap: bool = True

    def machine_for(self, split: Degrees) -> Machine:
        """A device with what it reaches of others in this layout."""
        inner = split.tensor * split.context
        network = Network(
            context_gbps=self._next(split.tensor, split.context),
            expert_gbps=self._every(split.expert * split.experts_split),
            pipeline_gbps=self._next(inner * split.data, split.pipeline),
            data_gbps=self._ring(split.tensor, split.context * split.data),
            expert_data_gbps=self._ring(split.expert * split.experts_split, split.expert_data),
            latency_seconds=self.latency_seconds,
            sends_overlap=self.sends_overlap,
        )
        return dataclasses.replace(
            self.machine,
            tflops=self.machine.tflops * LARGE,
            operand_share=OPERANDS,
            tensor_gbps=self._ring(1, split.tensor),
            network=network,
        )

    def _ring(self, stride: int, size: int) -> float:
        """A collective of ranks that are so far apart."""
        if stride * size <= self.per_node:
            return self.machine.tensor_gbps
        members = max(1, self.per_node // stride)  # of one node, whose networks all serve
        return min(self.machine.tensor_gbps, members * self.inter_node_gbps)

    def _next(self, stride: int, size: int) -> float:
        """From each rank to the next."""
        return self.machine.tensor_gbps if stride * size <= self.per_node else self.inter_node_gbps

    def _every(self, size: int) -> float:
        """From each rank to each."""
        inside = min(size, self.per_node)
        if inside == size:
            return self.machine.tensor_gbps
        near = (inside - 1) / (size - 1)
        return 1 / (near / self.machine.tensor_gbps + (1 - near) / self.inter_node_gbps)

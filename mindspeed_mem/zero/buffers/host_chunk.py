"""Chunks that rest on the host, with the masters and states of an optimizer: what they take, and how they come up."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mindspeed_mem.zero.core.chunk import Chunk
from mindspeed_mem.zero.core.passes import resting_bytes
from mindspeed_mem.zero.core.shard_memory import DEVICE


@dataclass(eq=False)
class HostChunk:
    """One chunk of one optimizer on the host."""

    chunk: Chunk | None
    """None where the model keeps its parameters and gradients itself (stage 1)."""
    of_shard: bool
    """Whether masters are pieces of the chunk's own shard, as those of fp32 parameters are."""
    masters: dict[torch.nn.Parameter, torch.Tensor] = field(default_factory=dict)
    """Of this rank's pieces of the chunk's parameters."""
    on_host: bool = True

    @property
    def nbytes(self) -> int:
        """What all this takes, with a shard of parameters and one of gradients, if it has them."""
        return resting_bytes(self.chunk, self.masters.values(), self.of_shard)

    @torch.no_grad()
    def to_device(self) -> None:
        """Rest on the device from now on; between two steps. The optimizer's states follow at its next step."""
        chunk, self.on_host = self.chunk, False
        if chunk is not None:
            chunk.move(DEVICE)
        for param, master in self.masters.items():
            if self.of_shard and chunk is not None:
                master.data = chunk.own_part(param)
            else:
                master.data = torch.empty_like(master, device=param.device).copy_(master)
            master.grad = None
        if chunk is not None and chunk.shard is not None and not self.of_shard:
            chunk.follow(self.masters)

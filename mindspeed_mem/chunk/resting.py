"""Chunks that rest on the host, with the masters and states of an optimizer: what they take, and how they come up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from mindspeed_mem.chunk.chunk import Chunk
from mindspeed_mem.chunk.placed_optimizer import Place
from mindspeed_mem.chunk.stores import DEVICE

_MOMENTS = 2  # of Adam, fp32 as the masters


@dataclass
class RestingChunk:
    """One chunk of one optimizer on the host."""

    places: dict[torch.Tensor, Place]
    """Of all masters of the optimizer; those that are not in it are on the device."""
    chunk: Chunk | None
    """None where the model keeps its parameters and gradients itself (stage 1)."""
    masters: dict[torch.nn.Parameter, torch.Tensor] = field(default_factory=dict)
    """Of this rank's pieces of the chunk's parameters."""
    shards: dict[torch.Tensor, Callable[[], torch.Tensor]] = field(default_factory=dict)
    """Masters that are pieces of the chunk's own shard, with how to get these."""

    on_host: bool = True

    @property
    def nbytes(self) -> int:
        """What all this takes, with a shard of parameters and one of gradients, if it has them."""
        masters = {master: master.numel() * master.element_size() for master in self.masters.values()}
        own = sum(nbytes for master, nbytes in masters.items() if master not in self.shards)
        total = own + _MOMENTS * sum(masters.values())
        if self.chunk is not None:
            total += self.chunk.nbytes // self.chunk.group.size() if self.chunk.shard is not None else 0
            total += self.chunk.grad.numel() * self.chunk.grad.element_size() // self.chunk.group.size()
        return total

    @torch.no_grad()
    def to_device(self) -> None:
        """Rest on the device from now on; between two steps. The optimizer's states follow at its next step."""
        self.on_host = False
        if self.chunk is not None:
            self.chunk.move(DEVICE)
        for param, master in self.masters.items():
            if master in self.shards:
                master.data = self.shards[master]()
            else:
                master.data = torch.empty_like(master, device=param.device).copy_(master)
            master.grad = None
            del self.places[master]
        if self.chunk is not None and self.chunk.shard is not None and not self.shards:
            self.chunk.follow(self.masters)

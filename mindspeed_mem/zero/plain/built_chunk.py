"""One chunk of a plain torch model: built of its parameters, with its fp32 masters; read and written as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_mem.ranks import all_gather
from mindspeed_mem.zero.core.chunk import Chunk, Piece, free
from mindspeed_mem.zero.core.passes import resting_bytes
from mindspeed_mem.zero.core.shard_memory import DEVICE, Store


@dataclass(frozen=True)
class PlannedChunk:
    """Parameters that will share a chunk."""

    pieces: Mapping[torch.nn.Parameter, Piece]
    capacity: int
    """Elements, over all ranks."""
    dtype: torch.dtype
    trainable: bool


class BuiltChunk:
    """A chunk, and what its optimizer steps.

    Args:
        initial: a parameter's first value; on any device, of any floating dtype.
        sharded: whether only this rank's part of the parameters stays.
        host: the store that host memory is taken from.

    Building takes, beside what stays, one whole chunk on the device (freed at once where it is sharded) and one
    parameter's value.
    """

    @torch.no_grad()
    def __init__(
        self,
        index: int,
        plan: PlannedChunk,
        group: Any,
        device: torch.device,
        initial: Callable[[torch.nn.Parameter], torch.Tensor],
        sharded: bool = True,
        param_store: Store = DEVICE,
        master_store: Store = DEVICE,
    ) -> None:
        whole = torch.empty(plan.capacity, dtype=plan.dtype, device=device)
        gradient = None
        if plan.trainable:
            gradient = torch.empty(plan.capacity, dtype=torch.float32, device=device)
            free(gradient)
        self.chunk = chunk = Chunk(index, plan.pieces.items(), whole, gradient, group)
        self.trainable, self.sharded = plan.trainable, sharded
        self.master: torch.Tensor | None = None
        """fp32 [numel / ranks], what the optimizer steps; the shard itself where that is fp32 and in the same place."""
        self.masters: dict[torch.nn.Parameter, torch.Tensor] = {}
        """Views of `master`: this rank's piece of each parameter, perhaps empty."""
        views = {param: whole[slice(*piece)].view(param.shape) for param, piece in plan.pieces.items()}
        if sharded:
            shard = param_store.like(whole[chunk.mine], device).zero_()
            chunk.adopt_shard(shard, param_store)
        else:
            whole.zero_()
        if plan.trainable:
            same = sharded and plan.dtype is torch.float32 and param_store.on_host == master_store.on_host
            like = torch.empty(plan.capacity // group.size(), dtype=torch.float32, device="meta")
            self.master = chunk.shard if same else master_store.like(like, device).zero_()
            chunk.grad_store = master_store  # of the reduced gradients, which lie where they are needed
        for param, view in views.items():
            self.write(param, initial(param))
            param.grad, param.data = None, view  # the memory that it had is freed
            param.__dict__.pop("initial_value", None)
        self._cut_masters()

    @property
    def shard_on_host(self) -> bool:
        """Whether this rank's part of the parameters rests on the host."""
        return self.chunk.shard_store.on_host

    # ---- values

    @torch.no_grad()
    def write(self, param: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Let `value`, of the shape of `param` and the same on all ranks, be the parameter and its master."""
        chunk, value = self.chunk, value.detach().reshape(-1)
        own, mine = chunk.own_piece(param), chunk.cut_own(param, value)
        chunk.shard_store.settle()
        for target in (chunk.shard, self.master):
            if target is not None:
                target[slice(*own)].copy_(mine)
        if chunk.gathered:
            chunk.wait()
            chunk.whole[slice(*chunk.pieces[param])].copy_(value)

    @torch.no_grad()
    def publish(self) -> None:
        """The masters have been stepped: bring the parameters up to date. Collective for a chunk that stays whole.

        Masters on the host may be written to again, or freed, once the chunk's store has been settled.
        """
        chunk, master = self.chunk, self.master
        if self.sharded and master is chunk.shard:
            return
        assert master is not None, "a frozen chunk is not stepped"
        own = chunk.whole[chunk.mine] if chunk.shard is None else chunk.shard
        if not (self.sharded and self.shard_on_host):
            # and cast there: the host would hold up all that follows
            fetched = chunk.grad_store.fetch(master, own.device)
            if fetched is not None:
                master, event = fetched
                chunk.grad_store.meet(event)
        own.copy_(master)
        if not self.sharded:
            all_gather(chunk.whole, own, chunk.group)

    @torch.no_grad()
    def whole_on_host(self, part: torch.Tensor) -> torch.Tensor:
        """[numel] in host memory, of `part` [numel / ranks] of all ranks. Collective."""
        whole = torch.empty(self.chunk.whole.numel(), dtype=part.dtype, device=self.chunk.whole.device)
        all_gather(whole, part.to(whole.device), self.chunk.group)
        return whole.cpu()

    def full_values(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Each parameter's value in host memory, of its shape: fp32 from the masters, or as it is. Collective."""
        if self.master is not None:
            flat = self.whole_on_host(self.master)
        elif self.chunk.shard is not None:
            flat = self.whole_on_host(self.chunk.shard)
        else:
            flat = self.chunk.whole.to("cpu", copy=True)  # whoever changes it does not change the chunk
        return {param: flat[slice(*piece)].view(param.shape) for param, piece in self.chunk.pieces.items()}

    # ---- placement

    @property
    def nbytes(self) -> int:
        """Device memory that this rank's part takes if all of it rests there, with Adam's moments."""
        return resting_bytes(self.chunk, () if self.master is None else (self.master,), self.master is self.chunk.shard)

    @torch.no_grad()
    def to_device(self) -> None:
        """Let everything rest on the device; between two steps. The moments follow at the next step."""
        chunk, same = self.chunk, self.master is self.chunk.shard
        chunk.move(DEVICE)
        if self.master is not None:
            self.master = chunk.shard if same else self.master.to(chunk.whole.device, copy=True)
            self._cut_masters()

    def _cut_masters(self) -> None:
        if self.master is None:
            return
        for param in self.chunk.params:
            piece = self.master[slice(*self.chunk.own_piece(param))]
            if param in self.masters:
                self.masters[param].data, self.masters[param].grad = piece, None
            else:
                self.masters[param] = piece.detach()

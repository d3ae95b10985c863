"""What one rank updates of one parameter."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from mindspeed_mem.optimizer_parallel.support import OptimizerParallelError


class OptimizerPart:
    """A parameter, who updates which of its elements, and the `piece` of this rank, which its optimizer gets to see.

    Without a master, `parameter` is the model's. The piece is the parameter itself if it belongs to this rank whole,
    else a flat view of the slice. With `target`, the model's 16-bit parameter, `parameter` is its fp32 master, of
    which each rank keeps its piece only: what stays has the master's shape, takes its gradient, and holds one element.

    Elements are counted in memory order, as kernels for elementwise operations do. Of a DTensor they are those of this
    rank's part of it, which all ranks that share the work have.
    """

    def __init__(
        self, parameter: torch.Tensor, ranges: tuple[range, ...], rank: int, target: torch.Tensor | None = None
    ) -> None:
        self.parameter = parameter
        self.ranges = ranges
        """Of each rank, in elements."""
        self.own = ranges[rank]
        self.target = parameter if target is None else target
        """What all ranks get in the end."""
        self.has_master = target is not None
        here = local(parameter.detach())
        self.shape = here.shape
        self.order = memory_order(here)
        self.whole = len(self.own) == here.numel() and len(self.own) > 0
        self.piece: torch.Tensor | None = None
        """None: this rank updates nothing of the parameter."""
        if self.has_master:
            data = parameter.detach()
            if self.own:
                self.piece = self.cut(data) if self.whole else self.cut(data).clone()
            # Another way to have shape, dtype and device, which gradients are checked against, without the memory.
            parameter.data = torch.zeros((), dtype=data.dtype, device=data.device).expand(self.shape)
        elif self.whole and not isinstance(parameter, DTensor):
            self.piece = parameter
        elif self.own:
            self.piece = self.cut(here)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a tensor with the parameter's shape: itself, or a flat slice (a view if possible)."""
        if self.whole:
            return whole
        if whole.layout != torch.strided:
            raise OptimizerParallelError(["a sparse gradient cannot be sliced. Use grouping"])
        return self.flat(whole)[self.own.start : self.own.stop]

    def flat(self, whole: torch.Tensor) -> torch.Tensor:
        """A tensor with the parameter's shape in one dimension, in the parameter's memory order; a view if possible."""
        return (whole if self.order is None else whole.permute(self.order)).reshape(-1)

    def joined(self, flat: torch.Tensor) -> torch.Tensor:
        """The opposite of `flat`: in the parameter's shape, with its strides."""
        if self.order is None:
            return flat.view(self.shape)
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return flat.view([self.shape[dim] for dim in self.order]).permute(inverse)

    def take(self) -> None:
        """Point the piece to where parameter and gradient are now: both may have been replaced since the last step."""
        if self.piece is None or self.piece is self.parameter:
            return
        if not self.has_master:
            self.piece.data = self.cut(local(self.parameter.detach()))
        parameter, gradient = self.parameter, self.parameter.grad
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements)
        self.piece.grad = None if gradient is None else self.cut(local(gradient))

    def let_go(self) -> None:
        """Drop the piece's hold on the gradient."""
        if self.piece is not None and self.piece is not self.parameter:
            self.piece.grad = None

    def open(self) -> torch.Tensor:
        """All elements of the target in one dimension, the same order on all ranks; a copy if there is no such view."""
        return self.flat(local(self.target.detach()))

    def close(self, opened: torch.Tensor) -> None:
        """Write `opened` back if it was a copy."""
        target = local(self.target.detach())
        if opened.data_ptr() != target.data_ptr() and len(opened):
            target.copy_(self.joined(opened))

    def set_master(self, whole: torch.Tensor) -> None:
        """Fill this rank's piece of the master from a tensor of the parameter's shape."""
        if self.piece is not None:
            self.piece.copy_(self.cut(whole))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor this rank's part, of the same memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions of `tensor` from the outermost to the innermost in memory; None if there are gaps or overlaps."""
    order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return order if tensor.permute(order).is_contiguous() else None

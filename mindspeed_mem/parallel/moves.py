"""Bringing one tensor from where it lies to where its reader wants it, so that its gradient comes back as it lay."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from mindspeed_mem.parallel.strategy import StrategyError

Placements = tuple[Placement, ...]


class Running:
    """What this process is at: for reports and messages."""

    def __init__(self) -> None:
        self.where = ""
        """The operator whose forward runs, or the boundary."""
        self.asked = False
        """Whether a strategy, or one of our operators, asks for what is moved now."""

    @contextmanager
    def at(self, where: str) -> Iterator[None]:
        """What is moved inside is asked for by `where`."""
        before, self.where, self.asked = (self.where, self.asked), where, True
        try:
            yield
        finally:
            self.where, self.asked = before


running = Running()


def moved(x: torch.Tensor, target: Sequence[Placement], where: str) -> DTensor:
    """`x` with other placements; its gradient takes those of `x` again, whole where `x` is a sum.

    Readers that want the same of one tensor share it: one redistribution there, and one of their gradients' sum back.
    """
    assert isinstance(x, DTensor)
    target = tuple(target)
    if x.placements == target:
        if x.requires_grad and torch.is_grad_enabled() and getattr(x, _PINNED, None) != id(x):
            setattr(x, _PINNED, id(x))
            x.register_hook(functools.partial(_laid_out, gradient_like(x), where))
        return x
    if x.is_leaf:  # a parameter, which the optimizer changes
        return _Moved.apply(x, target, where)
    known = x.__dict__.setdefault(_KNOWN, {})
    found, version = known.get(target, (_gone, 0))
    shared = found()
    fits = shared is not None and shared.requires_grad == torch.is_grad_enabled() and shared._version == 0
    if not fits or x._version != version:
        shared = _Moved.apply(x, target, where)
        known[target] = weakref.ref(shared), x._version
    return shared


def _gone() -> None:
    """In place of a weak reference."""


def _laid_out(target: Placements, where: str, grad: DTensor) -> DTensor:
    if grad.placements == target:
        return grad
    with running.at(where):
        return _redistributed(grad, target)


def _redistributed(x: DTensor, target: Placements) -> DTensor:
    """Laid out in memory as its strides say: torch's are those of before, and views then fail on the parts."""
    try:
        result = x.redistribute(placements=target)
    except (AssertionError, RuntimeError) as error:
        if all(map(_is_plain, (*x.placements, *target))):
            raise
        raise StrategyError(
            f"{running.where}: torch cannot bring {x.placements} to {target} ({error}); give the operators around it "
            "inputs that are split along one axis"
        ) from error
    part = result.to_local()
    if part.is_contiguous() and result.is_contiguous():
        return result
    stride = torch.empty(result.shape, device="meta").stride()
    mesh = result.device_mesh
    return DTensor.from_local(part.contiguous(), mesh, target, run_check=False, shape=result.shape, stride=stride)


_KNOWN, _PINNED = "_mindspeed_mem_moved", "_mindspeed_mem_pinned"
"""Attributes of a tensor: weak references to it in other layouts; its id if its gradient's layout is fixed (a copy of
it takes the attribute along, but no hook)."""


def gradient_like(x: DTensor) -> Placements:
    """The placements of the gradient of `x`: its own, and whole for a sum.

    Where a view has merged dimensions that several axes split, torch cannot bring it there: whole, too.
    """
    merged = [one for one in x.placements if not _is_plain(one) and not one.is_partial()]
    return tuple(
        Replicate() if one.is_partial() or (len(merged) > 1 and one in merged) else one for one in x.placements
    )


def _is_plain(placement: Placement) -> bool:
    return type(placement) in (Shard, Replicate, Partial)


def whole(x: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that all ranks have, as a DTensor."""
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def is_plain_sum(placement: Placement) -> bool:
    """Whether sums of it are sums again; means, maxima and masked sums are not."""
    return not placement.is_partial() or type(placement) is Partial and placement.reduce_op == "sum"


def text(placements: Sequence[Placement], mesh: DeviceMesh) -> str:
    """For people: "dp:0 tp:sum"."""
    parts = []
    for name, one in zip(mesh.mesh_dim_names or (), placements, strict=True):
        if one.is_partial():
            parts.append(f"{name}:{getattr(one, 'reduce_op', 'sum')}")
        elif not one.is_replicate():
            parts.append(f"{name}:{getattr(one, 'dim', '?')}")
    return " ".join(parts) or "whole"


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, target: Placements, where: str) -> torch.Tensor:
        ctx.source, ctx.where, ctx.mesh = gradient_like(x), where, x.device_mesh
        with running.at(where):
            return _redistributed(x, target)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if not isinstance(grad, DTensor):  # zeros, of some operators
            grad = whole(grad, ctx.mesh)
        return _Moved.apply(grad, ctx.source, ctx.where), None, None

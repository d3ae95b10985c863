"""Hybrid mode: collectives along a mesh axis that carry gradients, and regions that see this rank's parts.

Each collective's backward is its transpose. On plain tensors all ranks of the axis hold the same loss, once:

| | forward | backward |
|---|---|---|
| `copy` | as it is | sum: in front of what each rank does differently with one whole tensor |
| `all_reduce` | sum | as it is: all ranks go on alike with the whole |
| `all_gather` | parts side by side | sum, and this rank's part of it; with ``alike`` no sum |
| `reduce_scatter` | sum, and this rank's part of it | parts side by side |
| `all_to_all` | rows change ranks | they go back |
| `broadcast` | that of one rank | sum, on that rank |

Inside `local` nothing depends on who goes on alike. There a whole output counts once over its ranks, each whole input's
gradient is the sum over them, and `all_reduce` is its own transpose: right for whatever the region computes.

Before anything is sent the ranks compare what they are about to do, by three numbers, in the first `meshes.COMPARED`
calls. Not only where a shape is new: a rank for which it is not would go on, and wait in another collective than one
for which it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mindspeed_mem import ranks
from mindspeed_mem.parallel.meshes import compared, mesh_in_use
from mindspeed_mem.parallel.strategy import StrategyError


class Region:
    """A run of a function on local parts: its mesh, and the axes on which ranks do different things."""

    def __init__(self, mesh: DeviceMesh, axes: set[str]) -> None:
        self.mesh = mesh
        self.axes = axes


regions: list[Region] = []
"""Those that run, innermost last."""

observers: list[Callable[[str, str, int], None]] = []
"""Told the collective, the axis and the bytes sent by this rank, of each that runs."""


def all_reduce(x: torch.Tensor, *, axis: str, mesh: DeviceMesh | None = None) -> torch.Tensor:
    """The sum of `x` over the ranks of `axis`."""
    group, inside = _group(axis, mesh)
    x = _compared(x, "all_reduce", group, axis)
    there = functools.partial(_sum, group=group, axis=axis)
    return _Moved.apply(x, there, there if inside else _same)


def copy(x: torch.Tensor, *, axis: str, mesh: DeviceMesh | None = None) -> torch.Tensor:
    """`x`, whose gradient is summed over the ranks of `axis`: for what they do differently with a whole tensor."""
    group, inside = _group(axis, mesh)
    if inside:
        return x
    return _Moved.apply(_compared(x, "copy", group, axis), _same, functools.partial(_sum, group=group, axis=axis))


def all_gather(
    x: torch.Tensor, dim: int = 0, *, axis: str, mesh: DeviceMesh | None = None, alike: bool = False
) -> torch.Tensor:
    """The parts `x` of all ranks of `axis`, equal in shape, side by side in dimension `dim`.

    alike: all ranks go on alike with the whole, as towards one loss; then its gradient is not summed.
    """
    group, inside = _group(axis, mesh)
    x = _compared(x, f"all_gather(dim={dim}, alike={alike})", group, axis, _no_dimension(x, dim))
    settings = {"dim": dim % x.dim(), "group": group, "axis": axis}
    back = _own_part if alike and not inside else _sum_part
    return _Moved.apply(x, functools.partial(_gathered, **settings), functools.partial(back, **settings))


def reduce_scatter(x: torch.Tensor, dim: int = 0, *, axis: str, mesh: DeviceMesh | None = None) -> torch.Tensor:
    """This rank's part, in dimension `dim`, of the sum of `x` over the ranks of `axis`.

    Raises StrategyError where the dimension cannot be split evenly.
    """
    group, _ = _group(axis, mesh)
    problem = _no_dimension(x, dim)
    if not problem and x.shape[dim] % group.size():
        problem = f"dimension {dim} cannot be split evenly over {group.size()} ranks"
    x = _compared(x, f"reduce_scatter(dim={dim})", group, axis, problem)
    settings = {"dim": dim % x.dim(), "group": group, "axis": axis}
    return _Moved.apply(x, functools.partial(_sum_part, **settings), functools.partial(_gathered, **settings))


def broadcast(x: torch.Tensor, source: int = 0, *, axis: str, mesh: DeviceMesh | None = None) -> torch.Tensor:
    """The tensor `x` of rank `source` of `axis` (counted along the axis), which has the same shape on all of them."""
    group, _ = _group(axis, mesh)
    problem = "" if 0 <= source < group.size() else f"there are ranks 0 to {group.size() - 1}"
    x = _compared(x, f"broadcast(source={source})", group, axis, problem)
    settings = {"source": source, "group": group, "axis": axis}
    return _Moved.apply(x, functools.partial(_of_one, **settings), functools.partial(_sum_on_one, **settings))


def all_to_all(
    x: torch.Tensor,
    sent: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
    *,
    axis: str,
    mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Rows of `x` change ranks along `axis`.

    Args:
        x: [rows, ...], in the order of the ranks that get them.
        sent: rows for each rank; None: equal parts.
        received: rows from each rank; None: as they send.

    Returns: [rows received, ...], in the order of the ranks that they come from.

    Raises StrategyError, on all ranks and before anything is sent, where the ranks' counts do not agree.
    """
    group, _ = _group(axis, mesh)
    equal, size = sent is None and received is None, group.size()
    problem = "" if x.dim() else "it has no rows"
    if equal and x.dim() and x.shape[0] % size:
        problem = f"its rows cannot be divided evenly over {size} ranks; say how many each one gets: sent=[...]"
    what = "equal parts" if equal else "rows", tuple(x.shape)[not equal :]
    x = _compared(x, "all_to_all", group, axis, problem, f"{what[0]} of {what[1]}")
    if equal:
        sent = received = [x.shape[0] // size] * size
    else:
        sent, received = _agreed(x, sent, received, group, axis)
    there = functools.partial(_exchanged, sent=sent, received=received, group=group, axis=axis)
    return _Moved.apply(x, there, functools.partial(there, sent=received, received=sent))


def _agreed(
    x: torch.Tensor, sent: Sequence[int] | None, received: Sequence[int] | None, group: Any, axis: str
) -> tuple[list[int], list[int]]:
    """What this rank sends and receives, if all ranks of `group` mean the same. Collective."""
    size = group.size()
    mine = [list(sent) if sent is not None else [x.shape[0] // size] * size, list(received or []), x.shape[0]]
    tables = ranks.gather(mine, group)
    problems = []
    for rank, (out, into, rows) in enumerate(tables):
        if len(out) != size or sum(out) != rows or min(out) < 0:
            problems.append(f"rank {rank} has {rows} rows and sends {out} to {size} ranks")
        if into and len(into) != size:
            problems.append(f"rank {rank} receives {into} from {size} ranks")
    if not problems:
        for rank, (_, into, _) in enumerate(tables):
            from_each = [tables[other][0][rank] for other in range(size)]
            if into and into != from_each:
                problems.append(f"rank {rank} receives {into}, and is sent {from_each}")
    if problems:
        raise StrategyError([f"all_to_all on axis {axis!r}: {one}" for one in problems])
    me = group.rank()
    return tables[me][0], [tables[other][0][me] for other in range(size)]


def _group(axis: str, mesh: DeviceMesh | None) -> tuple[Any, bool]:
    """The ranks of `axis`, and whether a region runs, which now knows that they do different things."""
    region = regions[-1] if regions else None
    where = region.mesh if region is not None and mesh is None else mesh_in_use(mesh)
    if axis not in (where.mesh_dim_names or ()):
        raise StrategyError(f"no mesh axis {axis!r}; there are {', '.join(where.mesh_dim_names or ())}")
    if region is not None:
        region.axes.add(axis)
    return where.get_group(axis), region is not None


def _no_dimension(x: torch.Tensor, dim: int) -> str:
    return "" if -x.dim() <= dim < x.dim() else f"it has no dimension {dim}"


def _compared(
    x: torch.Tensor, call: str, group: Any, axis: str, problem: str = "", shape: str | None = None
) -> torch.Tensor:
    """`x`, if all ranks of `group` call the same with the same `shape`, and none has a `problem`. Collective.

    Where one of them wants a gradient all have to take part in backward: then they want it here, too.
    """
    said = f"{call} of {shape or tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" + f": {problem}" * bool(problem)
    if not torch.is_grad_enabled():
        said += " without gradients"
    wants = x.requires_grad and torch.is_grad_enabled()
    found = compared(said, [group], x.device, wants)
    same, wanted = (True, torch.is_grad_enabled() and x.is_floating_point()) if found is None else found
    if not same:
        told = ranks.gather(said, group)
        raise StrategyError([f"on axis {axis!r}, rank {rank} calls {one}" for rank, one in enumerate(told)])
    if problem:
        raise StrategyError(f"on axis {axis!r}: {said}")
    return x.detach().requires_grad_() if wanted and not wants else x


class _Moved(torch.autograd.Function):
    """A linear map, with its transpose as backward; and that with the map."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Callable, back: Callable) -> torch.Tensor:
        ctx.ways = there, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        there, back = ctx.ways
        return _Moved.apply(grad, back, there), None, None


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def _tell(name: str, axis: str, sent: float) -> None:
    for observer in observers:
        observer(name, axis, int(sent))


def _sum(x: torch.Tensor, group: Any, axis: str) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    _tell("all_reduce", axis, 2 * total.nbytes * (group.size() - 1) / group.size())
    dist.all_reduce(total, group=group)
    return total


def _gathered(x: torch.Tensor, dim: int, group: Any, axis: str) -> torch.Tensor:
    x = x.contiguous()
    _tell("all_gather", axis, x.nbytes * (group.size() - 1))
    whole = x.new_empty(group.size() * x.numel())
    ranks.all_gather(whole, x.flatten(), group)
    parts = whole.view(group.size(), *x.shape)
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(), dim)


def _sum_part(x: torch.Tensor, dim: int, group: Any, axis: str) -> torch.Tensor:
    parts = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
    _tell("reduce_scatter", axis, parts.nbytes * (group.size() - 1) / group.size())
    own = torch.empty_like(parts[0])
    ranks.reduce_scatter(own.view(-1), parts.view(-1), group).wait()
    return own


def _own_part(x: torch.Tensor, dim: int, group: Any, axis: str) -> torch.Tensor:
    return x.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)


def _of_one(x: torch.Tensor, source: int, group: Any, axis: str) -> torch.Tensor:
    got = x.clone(memory_format=torch.contiguous_format)
    _tell("broadcast", axis, got.nbytes if group.rank() == source else 0)
    dist.broadcast(got, dist.get_global_rank(group, source), group=group)
    return got


def _sum_on_one(x: torch.Tensor, source: int, group: Any, axis: str) -> torch.Tensor:
    total = _sum(x, group, axis)
    return total if group.rank() == source else torch.zeros_like(total)


def _exchanged(x: torch.Tensor, sent: list[int], received: list[int], group: Any, axis: str) -> torch.Tensor:
    x = x.contiguous()
    row = x.nbytes // max(x.shape[0], 1)
    _tell("all_to_all", axis, (sum(sent) - sent[group.rank()]) * row)
    got = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(got, x, received, sent, group=group)
    return got

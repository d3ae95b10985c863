"""Hybrid regions of a model: functions that see this rank's parts and call the collectives themselves."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_flatten, tree_unflatten

from mindspeed_mem import ranks
from mindspeed_mem.parallel import report
from mindspeed_mem.parallel.collectives import Region, regions
from mindspeed_mem.parallel.meshes import agree, mesh_in_use
from mindspeed_mem.parallel.moves import Placements, gradient_like, moved, running, text, whole
from mindspeed_mem.parallel.plan import Strategies, strategies
from mindspeed_mem.parallel.strategy import StrategyError, placements


def local(
    function: Callable,
    in_strategy: Strategies = None,
    out_strategy: Strategies = None,
    *,
    mesh: DeviceMesh | None = None,
    name: str | None = None,
) -> Callable:
    """`function` on this rank's parts of its arguments: a region in which the user places the collectives.

    Args:
        function: takes and returns tensors; a module's parameters are arguments, too.
        in_strategy: what the tensors among the arguments are brought to, in order; None: as they come, sums summed up.
        out_strategy: how the parts that it returns make up the whole, for each tensor.
        mesh: None: the one made last.
        name: for reports and messages.

    Returns: a function of DTensors, or of plain tensors that all ranks have, that returns DTensors.

    Gradients are derived: that of an argument that is whole on an axis is the sum over the ranks there, wherever the
    region splits anything along it or uses a collective on it.

    Raises StrategyError, on all ranks; in the first call with tensors of these shapes also if ranks return different
    shapes, or different numbers where `out_strategy` says that they have the same, or `function` fails on another rank.
    If it fails on one rank in a later call, the others do not learn of it.
    """
    problems: list[str] = []
    called = name or str(getattr(function, "__name__", type(function).__name__))
    wanted = strategies(in_strategy, f"{called}, in_strategy", problems)
    returned = strategies(out_strategy, f"{called}, out_strategy", problems)
    if isinstance(wanted, dict) or isinstance(returned, dict):
        problems.append(f"{called}: local takes strategies in order, not by name")
    if returned is None:
        problems.append(f"{called}: local needs out_strategy, one for each tensor that it returns")
    if problems:
        raise StrategyError(problems)
    checked = {""}
    """What the tensors of calls were like, the same on all ranks; nothing where they have not compared it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        on = mesh_in_use(mesh)
        values, tree = tree_flatten((args, kwargs))
        where = [index for index, value in enumerate(values) if isinstance(value, torch.Tensor)]
        given, own = [values[index] for index in where], {}
        if isinstance(function, nn.Module):
            own = {**dict(function.named_parameters()), **dict(function.named_buffers())}
        tensors, said = _brought([*given, *own.values()], wanted, len(given), on, called)

        def call(parts: Sequence[torch.Tensor]) -> Any:
            for index, part in zip(where, parts, strict=False):
                values[index] = part
            args, kwargs = tree_unflatten(values, tree)
            if isinstance(function, nn.Module):
                parameters = dict(zip(own, parts[len(where) :], strict=True))
                return torch.func.functional_call(function, parameters, args, kwargs)
            return function(*args, **kwargs)

        check = said not in checked
        results = run_local(call, tensors, returned, Region(on, set()), called, check)
        checked.add(said)
        return results

    functools.update_wrapper(run, function, updated=())
    return run


def _brought(
    values: list[torch.Tensor], wanted: Any, count: int, mesh: DeviceMesh, name: str
) -> tuple[list[DTensor], str]:
    """The tensors as DTensors, the first `count` as the strategies `wanted` say; and what they were like, in words.

    Collective: what is wrong on one rank, or different, is raised on all.
    """
    problems: list[str] = []
    if wanted is not None and len(wanted) != count:
        problems.append(f"{name}: {len(wanted)} strategies for {count} tensors")
        wanted = None
    found, like = [], []
    for index, value in enumerate(values):
        what, given = f"{name}, input {index}", wanted[index] if wanted and index < count else None
        tensor = value if isinstance(value, DTensor) else whole(value, mesh)
        target = gradient_like(tensor)
        if given is not None:
            target = placements(given, mesh, tensor.shape, what, problems)
        like.append(f"{tuple(tensor.shape)} {tensor.dtype} {text(tensor.placements, mesh)} {tensor.requires_grad}")
        found.append((tensor, target, what))
    said = "; ".join([*like, f"gradients {torch.is_grad_enabled()}"])
    if not agree(mesh, problems, said, name):
        said = ""
    return [moved(tensor, target, what) for tensor, target, what in found], said


def run_local(
    call: Callable, tensors: Sequence[DTensor], returned: Any, region: Region, name: str, check: bool = False
) -> Any:
    """What `call` makes of the local parts of `tensors`, put together to DTensors.

    returned: strategies of the results, or the placements of all of them.
    """
    mesh = region.mesh
    names = mesh.mesh_dim_names or ()
    for tensor in tensors:
        region.axes.update(axis for axis, one in zip(names, tensor.placements, strict=True) if not one.is_replicate())
    parts = [_Entered.apply(tensor, region) for tensor in tensors]
    regions.append(region)
    try:
        with running.at(running.where or name):
            made = call(parts)
    except Exception as error:
        if check:  # the others compare next, or in a collective of theirs: they hear of it
            with contextlib.suppress(Exception):
                agree(mesh, [f"{name} failed on a rank: {type(error).__name__}: {error}"])
        raise
    finally:
        regions.pop()
    results, tree = tree_flatten(made)
    outputs = [index for index, value in enumerate(results) if isinstance(value, torch.Tensor)]
    if _are_placements(returned):
        returned = [returned] * len(outputs)
    problems: list[str] = []
    if len(outputs) != len(returned):
        problems.append(f"{name}: {len(returned)} strategies in out_strategy for {len(outputs)} tensors returned")
    targets: list[Placements] = []
    for number, (index, given) in enumerate(zip(outputs, returned, strict=False)):
        part, what = results[index], f"{name}, output {number}"
        if isinstance(part, DTensor):
            problems.append(f"{what} is a DTensor; inside local everything is this rank's part")
            continue
        given = (None,) * part.dim() if given is None else given
        target = given if _are_placements(given) else placements(given, mesh, None, what, problems)
        if not _are_placements(given) and len(given) != part.dim():
            problems.append(f"{what} has {part.dim()} dimensions, its strategy {given} {len(given)} entries")
        region.axes.update(axis for axis, one in zip(names, target, strict=True) if not one.is_replicate())
        targets.append(target)
    if check:
        agree(mesh, problems)
        for number, (index, target) in enumerate(zip(outputs, targets, strict=True)):
            problems += _differences(results[index], target, mesh, f"{name}, output {number}")
        agree(mesh, problems)
    if problems:
        raise StrategyError(problems)
    for index, target in zip(outputs, targets, strict=True):
        results[index] = _Left.apply(results[index], target, region)
        if report.is_recording():
            report.mark(results[index], running.where or name)
    return tree_unflatten(results, tree)


def _are_placements(given: Any) -> bool:
    return bool(given) and all(isinstance(one, Placement) for one in given)


def _differences(part: torch.Tensor, target: Placements, mesh: DeviceMesh, what: str) -> list[str]:
    """Why this is no part of one whole tensor, as the ranks see it together. Collective."""
    numbers = part.detach().double() if part.dtype.is_floating_point else part.detach().to(torch.float64)
    mine = tuple(part.shape), float(numbers.sum()), float(numbers.abs().sum())
    found: list[str] = []
    for index, (axis, one) in enumerate(zip(mesh.mesh_dim_names or (), target, strict=True)):
        seen = ranks.gather(mine, mesh.get_group(index))
        sums, scale = [total for _, total, _ in seen], max(size for _, _, size in seen)
        if len({shape for shape, _, _ in seen}) > 1:
            shapes = ", ".join(str(shape) for shape, _, _ in seen)
            found.append(f"{what}: the ranks of axis {axis!r} have parts of different shapes: {shapes}")
        elif one.is_replicate() and max(sums) - min(sums) > 1e-3 * scale:
            found.append(
                f"{what}: out_strategy says that it is whole on axis {axis!r}, but its ranks have different numbers; "
                f"all_reduce or all_gather it there, or name the axis in out_strategy"
            )
    return found


class _Entered(torch.autograd.Function):
    """This rank's part of a DTensor. Its gradient is one rank's share where ranks do different things."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, region: Region) -> torch.Tensor:
        ctx.placements, ctx.region, ctx.shape, ctx.stride = x.placements, region, x.shape, x.stride()
        part = x.to_local()
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        mesh, axes = ctx.region.mesh, ctx.region.axes
        target = [
            Partial() if one.is_replicate() and axis in axes else one
            for axis, one in zip(mesh.mesh_dim_names, ctx.placements, strict=True)
        ]
        return (
            DTensor.from_local(grad, mesh, target, run_check=False, shape=ctx.shape, stride=ctx.stride),
            None,
        )


class _Left(torch.autograd.Function):
    """The whole of which a rank has a part; whole ones count once over the ranks of an axis that work differently."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, target: Placements, region: Region) -> torch.Tensor:
        mesh = region.mesh
        ctx.target = tuple(Replicate() if one.is_partial() else one for one in target)
        counted = [
            mesh.size(index)
            for index, (axis, one) in enumerate(zip(mesh.mesh_dim_names or (), target, strict=True))
            if one.is_replicate() and axis in region.axes
        ]
        ctx.times = math.prod(counted)
        return DTensor.from_local(part, mesh, target, run_check=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[torch.Tensor, None, None]:
        part = grad.redistribute(placements=ctx.target).to_local()
        return part / ctx.times if ctx.times > 1 else part, None, None

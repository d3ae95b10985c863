"""How one tensor lies on the mesh: an entry for each of its dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

Entry = None | str | int | tuple[str, ...]
Strategy = tuple[Entry, ...] | None
"""For each dimension: None (whole), a mesh axis, several in mesh order, or MindSpore's number of parts (1: whole) if
it can only mean one axis. None instead of the tuple: the tensor stays as it comes."""


class StrategyError(ValueError):
    """Strategies that do not fit their tensors, the mesh or an operator; `problems` holds one entry for each reason."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("; ".join(self.problems))


class Layout:
    """MindSpore's form: ``Layout((2, 4), ("dp", "tp"))("dp", "None")`` is the strategy ``("dp", None)``.

    Args:
        device_matrix: ranks along each axis.
        alias_name: the axes' names, as many.
        rank_list: has to be None: `mesh` numbers the ranks.
    """

    def __init__(self, device_matrix: Sequence[int], alias_name: Sequence[str], rank_list: None = None) -> None:
        problems = []
        if len(device_matrix) != len(alias_name):
            problems.append(f"Layout: device_matrix {device_matrix} and alias_name {alias_name} differ in length")
        if len(set(alias_name)) < len(alias_name):
            problems.append(f"Layout: an alias occurs twice in {alias_name}")
        if "interleaved_parallel" in alias_name:
            problems.append("Layout: interleaved_parallel is not supported; name axes of the mesh only")
        if rank_list is not None:
            problems.append("Layout: rank_list is not supported; give the ranks' order to DeviceMesh")
        if problems:
            raise StrategyError(problems)
        self.axes = dict(zip(alias_name, device_matrix, strict=True))

    def __call__(self, *tensor_map: str | tuple[str, ...]) -> LaidOut:
        """An alias for each dimension of a tensor, several as a tuple, "None" for a whole one."""
        return LaidOut((None if one in ("None", None) else one for one in tensor_map), self.axes)


class LaidOut(tuple):
    """A strategy that knows how many ranks its axes are said to have."""

    axes: dict[str, int]

    def __new__(cls, entries: Any, axes: dict[str, int]) -> LaidOut:
        made = super().__new__(cls, entries)
        made.axes = axes
        return made

    def __getnewargs__(self) -> tuple[tuple, dict[str, int]]:
        return tuple(self), self.axes


def placements(
    strategy: Any, mesh: DeviceMesh, shape: Sequence[int] | None, what: str, problems: list[str] | None = None
) -> tuple[Placement, ...]:
    """DTensor's placements of a strategy.

    Args:
        strategy: not None.
        shape: of the whole tensor; None: not known yet, and not checked.
        what: the tensor, for messages.
        problems: takes what is wrong, instead of an exception.

    Raises StrategyError with all that is wrong.
    """
    found: list[str] = []
    split = _split_dimensions(strategy, mesh, what, found)
    if shape is not None and not found:
        if len(strategy) != len(shape):
            found.append(
                f"{what}: the strategy {tuple(strategy)} has {len(strategy)} entries, the tensor {tuple(shape)} has "
                f"{len(shape)} dimensions; give an entry for each"
            )
        else:
            for dim, axes in split.items():
                parts = _parts(mesh, axes)
                if shape[dim] % parts:
                    found.append(
                        f"{what}: dimension {dim} of {tuple(shape)} cannot be split evenly into {parts} parts "
                        f"({' x '.join(axes)})"
                    )
    if found and problems is None:
        raise StrategyError(found)
    if problems is not None:
        problems += found
    of_axis = {axis: dim for dim, axes in split.items() for axis in axes}
    return tuple(Shard(of_axis[name]) if name in of_axis else Replicate() for name in mesh.mesh_dim_names or ())


def strategy_of(given: Sequence[Placement], mesh: DeviceMesh, dimensions: int) -> Strategy:
    """The strategy of a tensor with these placements; sums and whole axes do not show."""
    entries: list[Entry] = []
    for dim in range(dimensions):
        names = zip(mesh.mesh_dim_names or (), given, strict=True)
        axes = tuple(name for name, one in names if isinstance(one, Shard) and one.dim == dim)
        entries.append(None if not axes else axes[0] if len(axes) == 1 else axes)
    return tuple(entries)


def _split_dimensions(strategy: Any, mesh: DeviceMesh, what: str, found: list[str]) -> dict[int, tuple[str, ...]]:
    """The axes that split each dimension; appends to `found` what is wrong."""
    names = mesh.mesh_dim_names
    if names is None:
        found.append("the mesh has no axis names; make it with parallel.mesh(dp=2, tp=4)")
        return {}
    if isinstance(strategy, str) or not isinstance(strategy, Sequence):
        found.append(f"{what}: {strategy!r} is no strategy; write an entry for each dimension, such as ('dp', None)")
        return {}
    for name, size in getattr(strategy, "axes", {}).items():
        if name in names and mesh.size(names.index(name)) != size:
            found.append(f"{what}: the Layout has {size} ranks on axis {name!r}, the mesh {_sizes(mesh)}")
    split: dict[int, tuple[str, ...]] = {}
    used: dict[str, int] = {}
    for dim, entry in enumerate(strategy):
        axes = _axes(entry, mesh, names, used, f"{what}, dimension {dim} of {tuple(strategy)}", found)
        for axis in axes:
            if axis in used:
                found.append(f"{what}: axis {axis!r} splits dimensions {used[axis]} and {dim}; it can split one")
            used[axis] = dim
        if axes:
            split[dim] = axes
    return split


def _axes(
    entry: Any, mesh: DeviceMesh, names: tuple[str, ...], used: dict[str, int], where: str, found: list[str]
) -> tuple[str, ...]:
    """The axes that this entry names."""
    if isinstance(entry, bool) or not (entry is None or isinstance(entry, (str, int, Sequence))):
        found.append(f"{where}: {entry!r}; write None, an axis, a tuple of axes or a number of parts")
        return ()
    if entry is None or entry == 1:
        return ()
    if isinstance(entry, int):
        fits: list[tuple[str, ...]] = [
            (name,) for index, name in enumerate(names) if mesh.size(index) == entry and name not in used
        ]
        if not used and entry == mesh.size() and names not in fits:
            fits.append(names)
        if len(fits) == 1:
            return fits[0]
        which = " or ".join(map(repr, fits)) if fits else "nothing"
        found.append(f"{where}: {entry} parts fit {which} of the mesh {_sizes(mesh)}; name the axis")
        return ()
    axes = (entry,) if isinstance(entry, str) else tuple(entry)
    unknown = [axis for axis in axes if axis not in names]
    if unknown:
        found.append(f"{where}: no mesh axis {', '.join(map(repr, unknown))}; there are {', '.join(names)}")
        return ()
    in_order = tuple(sorted(axes, key=names.index))
    if in_order != axes:
        found.append(f"{where}: axes in another order than the mesh has; write {in_order}")
    return axes


def _parts(mesh: DeviceMesh, axes: tuple[str, ...]) -> int:
    parts = 1
    for axis in axes:
        parts *= mesh.size((mesh.mesh_dim_names or ()).index(axis))
    return parts


def _sizes(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or ()
    return ", ".join(f"{name}={mesh.size(index)}" for index, name in enumerate(names))

"""The mesh: all ranks along named axes."""

from __future__ import annotations

import atexit
import functools
import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor._redistribute as _redistribute
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from mindspeed_mem import ranks
from mindspeed_mem.device import get_backend
from mindspeed_mem.parallel.strategy import StrategyError

_latest: list[DeviceMesh] = []

COMPARED = 1000
"""How many calls along the same axes the ranks compare. Comparing stops the host: then they are taken at their word."""
_calls: Counter[tuple[str, ...]] = Counter()


def mesh(device: str | None = None, **axes: int) -> DeviceMesh:
    """A mesh over all ranks; the first axis varies slowest. Collective.

    Args:
        device: "cpu", "cuda", "npu"; None: the one in use (``MINDSPEED_MEM_DEVICE``, or the best there is).
        axes: names with the ranks along them, such as ``dp=2, tp=4``; -1 once for those left over.

    What takes a mesh and gets none uses the one made last.

    Raises StrategyError where the sizes do not multiply to the number of ranks.
    """
    count = dist.get_world_size()
    sizes = dict(axes or {"dp": -1})
    open_ones = [name for name, size in sizes.items() if size == -1]
    given = math.prod(size for size in sizes.values() if size != -1)
    if len(open_ones) == 1 and given > 0 and count % given == 0:
        sizes[open_ones[0]] = count // given
    if math.prod(sizes.values()) != count or min(sizes.values()) < 1:
        text = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise StrategyError(f"mesh({text}) does not fit {count} ranks; the sizes have to multiply to that")
    _calls.clear()
    forget_choices()  # they name the groups of an equal mesh, which may have been destroyed since
    made = init_device_mesh(get_backend(device).tensor_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if not _latest:
        atexit.register(ranks.let_gloo_finish)
    _latest[:] = [made]
    return made


def forget_choices() -> None:
    """What torch remembers of layouts, and of the way from one to another."""
    layouts = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    getattr(layouts, "cache_clear", lambda: None)()  # not in the oldest, where only collectives run
    for owner, name in ((torch._C, "_clear_DTensor_sharding_propagator_cache"), (_redistribute, _PLANS)):
        getattr(owner, name, lambda: None)()  # torch 2.11 and newer


_PLANS = "clear_redistribute_planner_cache"


def old_torch(what: str) -> list[str]:
    """Why this torch does not carry `what`, if it does not."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        return []
    return [f"{what} needs torch 2.13 or newer, this is {torch.__version__}"]


def of_other_kinds(model: Any, mesh: Any) -> list[str]:
    """What is no module and no mesh of these: nothing else can be said of them."""
    problems = []
    if not isinstance(model, torch.nn.Module):
        problems.append(f"model: got a {type(model).__name__}; allowed: a torch.nn.Module")
    if not isinstance(mesh, DeviceMesh):
        problems.append(f"mesh: got a {type(mesh).__name__}; allowed: what parallel.mesh(dp=2, tp=4) makes")
    return problems


def mesh_in_use(given: DeviceMesh | None) -> DeviceMesh:
    """`given`, or the mesh made last. Raises StrategyError if there is none."""
    if given is not None:
        return given
    if not _latest:
        raise StrategyError("there is no mesh yet: make one with parallel.mesh(dp=2, tp=4), or give mesh=")
    return _latest[0]


def everywhere(mine: Mapping[str, str], mesh: DeviceMesh) -> dict[str, set[str]]:
    """The values that the ranks of `mesh` have under each key, the same on all of them. Collective."""
    seen = {key: {value} for key, value in mine.items()}
    for axis in range(mesh.ndim):
        for other in ranks.gather(seen, mesh.get_group(axis)):
            for key, values in other.items():
                seen[key] = seen.get(key, set()) | values
    return seen


def agree(mesh: DeviceMesh, problems: Sequence[str], said: str = "", what: str = "") -> bool:
    """Raise StrategyError on all ranks of `mesh` for the problems of any, or where they do not say the same of `what`.

    Collective; three numbers along each axis where all is well. Returns whether they were `compared`.
    """
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    found = compared(said, groups, mesh.device_type, bool(problems))
    if found is None:
        if problems:
            raise StrategyError(problems)
        return False
    same, any_problem = found
    if any_problem:
        told = sorted(everywhere({"problems": "\n".join(problems)}, mesh)["problems"])
        raise StrategyError(list(dict.fromkeys(line for lines in told for line in lines.split("\n") if line)))
    if not same:
        told = sorted(everywhere({"said": said}, mesh)["said"])
        raise StrategyError(f"{what}: the ranks have different tensors: {' / '.join(told)}")
    return True


def compared(
    said: str, groups: Sequence[Any], device: torch.device | str, wants: bool = False
) -> tuple[bool, bool] | None:
    """Whether the ranks of all of `groups` say the same, and whether any of them `wants`; None after `COMPARED` calls.

    Collective, and the same call for all ranks, whatever they say: three numbers along each group.
    """
    names = tuple(group.group_name for group in groups)
    _calls[names] += 1
    if _calls[names] > COMPARED:
        return None
    mark = _mark(said)
    numbers = [mark, -mark, int(wants)]
    with _disable_current_modes():  # it is no part of what is computed, or counted
        for group in groups:
            numbers = ranks.combined(numbers, dist.ReduceOp.MAX, group, device)
    return numbers[0] == -numbers[1], bool(numbers[2])


@functools.lru_cache(4096)
def _mark(said: str) -> int:
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=7).digest(), "big")

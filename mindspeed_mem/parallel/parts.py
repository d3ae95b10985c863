"""Running an operator on the parts of its tensors, or on whole ones."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_unflatten

from mindspeed_mem.parallel.collectives import Region
from mindspeed_mem.parallel.moves import Placements, gradient_like, is_plain_sum, moved
from mindspeed_mem.parallel.regions import run_local


def settled(result: Any, where: str) -> Any:
    """`result` with its means, maxima and masked sums made whole: DTensor mixes up their gradients with sums."""
    if isinstance(result, DTensor):
        if all(map(is_plain_sum, result.placements)):
            return result
        return moved(result, [one if is_plain_sum(one) else Replicate() for one in result.placements], where)
    if type(result) in (tuple, list):
        return type(result)(settled(one, where) for one in result)
    return result


def split_in(x: DTensor, dims: Collection[int]) -> Placements:
    """The placements of `x` with the splits of these dimensions only."""
    return tuple(one if isinstance(one, Shard) and one.dim in dims else Replicate() for one in x.placements)


def all_whole(values: tuple | dict, where: str) -> Any:
    def of(value: Any) -> Any:
        return moved(value, [Replicate()] * value.device_mesh.ndim, where) if isinstance(value, DTensor) else value

    leaves, tree = tree_flatten(values)
    return tree_unflatten([of(leaf) for leaf in leaves], tree)


def no_sums(values: Any, where: str) -> Any:
    def of(value: Any) -> Any:
        return moved(value, gradient_like(value), where) if isinstance(value, DTensor) else value

    leaves, tree = tree_flatten(values)
    return tree_unflatten([of(leaf) for leaf in leaves], tree)


def first(args: tuple, kwargs: dict) -> tuple[Any, tuple[tuple, dict]]:
    """The tensor that an operator is about, and the other arguments."""
    if args:
        return args[0], (args[1:], kwargs)
    return kwargs["input"], ((), {key: value for key, value in kwargs.items() if key != "input"})


def on_parts(function: Callable, args: tuple, kwargs: dict, where: str, dims: Collection[int], alike: int = 1) -> Any:
    """`function` on local parts of its first tensors, split along some of these dimensions; all others are whole."""
    leaves, tree = tree_flatten((args, kwargs))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, DTensor)]
    target = split_in(leaves[places[0]], dims)
    everywhere = [Replicate()] * len(target)
    tensors = [moved(leaves[index], target if n < alike else everywhere, where) for n, index in enumerate(places)]

    def call(parts: Any) -> Any:
        for index, part in zip(places, parts, strict=True):
            leaves[index] = part
        args, kwargs = tree_unflatten(leaves, tree)
        return function(*args, **kwargs)

    return run_local(call, tensors, target, Region(tensors[0].device_mesh, set()), where)

"""What DTensor gets wrong before an operator runs, where it chooses layouts: ranks must choose alike, and for all dims.

Facts are of torch 2.13 and 2.14; each has a test that fails when torch does better.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mindspeed_mem.parallel.meshes import forget_choices

aten = torch.ops.aten


def _all_if_empty(place: int, given: tuple, more: dict) -> tuple[tuple, dict]:
    """For these reductions an empty list of dimensions is all of them. (For any and all it is none of them.) torch's
    rules take it for none: the parts are reduced, and the result is called split."""
    if len(given) <= place or not isinstance(given[place], (list, tuple)) or given[place]:
        return given, more
    return (*given[:place], list(range(len(given[0].shape))), *given[place + 1 :]), more


def _from_the_front(given: tuple, more: dict) -> tuple[tuple, dict]:
    """Dimensions counted from the end: torch's rules take them as they are, and find no split there."""
    _, sizes, dim = given[:3]
    return (*given[:2], dim % len(sizes), *given[3:]), more


def _kept(given: tuple, more: dict) -> tuple[tuple, dict]:
    """torch's rule looks for keepdim where it never is."""
    return given, ({**more, "keepdim": given[2]} if len(given) > 2 else more)


_CORRECTED: dict[Any, Callable[[tuple, dict], tuple[tuple, dict]]] = {
    aten.linalg_vector_norm.default: functools.partial(_all_if_empty, 2),
    aten.select_backward.default: _from_the_front,
    aten.slice_backward.default: _from_the_front,
    aten.logsumexp.default: _kept,
    **dict.fromkeys(
        (
            *(aten.sum.dim_IntList, aten.nansum.default, aten.mean.dim, aten.amax.default, aten.amin.default),
            *(aten.std.correction, aten.var.correction, aten.var_mean.correction),
        ),
        functools.partial(_all_if_empty, 1),
    ),
}
"""What torch's rule for an operator is to be asked instead."""


def correct() -> None:
    """From now on DTensor chooses as it should; where it has been corrected nothing happens."""
    from torch.distributed.tensor._ops import single_dim_strategy  # torch 2.13 and newer

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    if isinstance(propagator.decomp_strategy._get_candidate_placements, _Sorted):
        return
    for operator, correction in _CORRECTED.items():
        if rule := propagator.op_strategy_funcs.get(operator):
            propagator.op_strategy_funcs[operator] = functools.partial(_asked, rule, correction)
        if info := propagator.op_single_dim_strategy_funcs.get(operator):  # which 2.14 has for most
            more = {"func": functools.partial(_asked_of_one, info.func, correction)}
            if fits := getattr(info, "full_mesh_strategy_filter", None):
                more["full_mesh_strategy_filter"] = functools.partial(_fits, fits, correction)
            propagator.op_single_dim_strategy_funcs[operator] = dataclasses.replace(info, **more)
    propagator.decomp_strategy._get_candidate_placements = _Sorted(propagator.decomp_strategy._get_candidate_placements)
    single_dim_strategy._get_neighbor_placements = functools.partial(
        _neighbors, single_dim_strategy._get_neighbor_placements
    )
    forget_choices()


def _meant(correction: Callable, schema: Any) -> Any:
    given, more = correction(schema.args_schema, schema.kwargs_schema)
    if given is schema.args_schema and more is schema.kwargs_schema:
        return schema
    return type(schema)(schema.op, given, more, schema_info=schema.schema_info)


def _asked(rule: Callable, correction: Callable, schema: Any) -> Any:
    return rule(_meant(correction, schema))


def _asked_of_one(rule: Callable, correction: Callable, operator: Any, given: tuple, more: dict) -> Any:
    """Of one dimension of the mesh; tensors are given as their shapes."""
    return rule(operator, *correction(given, more))


def _fits(rule: Callable, correction: Callable, mesh: Any, schema: Any, *layouts: Any) -> bool:
    """Whether what was found for each dimension is right for all: parts of which a mean is made are as large."""
    return rule(mesh, _meant(correction, schema), *layouts)


class _Sorted:
    """Layouts to try for an operator without a rule, in an order of their own.

    torch's is that of a set with hashes of strings in it, which each process seeds otherwise: of two equally dear ones
    ranks then took different ones, and waited for each other.
    """

    def __init__(self, original: Callable[[Any], Iterable[Any]]) -> None:
        self.original = original

    def __call__(self, schema: Any) -> list[Any]:
        return sorted(self.original(schema), key=repr)


def _neighbors(original: Callable, splits: Iterable[Any], sums: Iterable[Any], *rest: Any) -> Any:
    """Likewise, of the layouts one step away."""
    return original(sorted(splits, key=repr), sorted(sums, key=repr), *rest)

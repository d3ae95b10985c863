"""In which layouts a call runs without communication, and what it and redistributions take."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import Placement
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import flop_registry

from mindspeed_mem.device import is_host_device
from mindspeed_mem.parallel.calls import Call

Placed = tuple[Placement, ...]
"""Of one tensor, by mesh axis."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
Link = Mapping[str, tuple[float, float]]
"""Of an axis, by collective: seconds to begin, and per byte sent; without one that the mesh has not."""
_MOST = 4000
"""Combinations of layouts that are tried for one call; with more (a cat of many), only those that are all alike."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What one rank and its links do. The figures are of an accelerator with fast links; give your own."""

    tflops: float = 200.0
    memory_gbps: float = 1500.0
    """Of device memory."""
    gbps: float | dict[str, float] = 100.0
    """Gigabytes per second that a rank sends, by mesh axis or for all."""
    latency_us: float | dict[str, float] = 10.0
    """To begin a collective, by mesh axis or for all."""
    launch_us: float = 4.0
    """To begin an operator."""
    slower: Mapping[str, float] = field(default_factory=dict)
    """How many times longer than `gbps` says a collective takes for a byte that it sends, by name; others: 1."""

    def link(self, axis: str, mesh: DeviceMesh) -> Link:
        begin, rate = (one[axis] if isinstance(one, dict) else one for one in (self.latency_us, self.gbps))
        there = COLLECTIVES[:-1] if is_host_device(mesh.device_type) else COLLECTIVES  # where torch gathers
        return {name: (begin / 1e6, self.slower.get(name, 1.0) / (rate * 1e9)) for name in there}


@dataclass(frozen=True)
class Option:
    """One way to run a call."""

    ins: tuple[Placed, ...]
    outs: tuple[Placed, ...]
    seconds: float
    """Of the forward; backward takes twice that."""
    kept: float
    """Bytes that it keeps for backward besides its inputs and outputs."""


class Asker:
    """What calls can do, as DTensor's rules say."""

    def __init__(self, mesh: DeviceMesh, machine: Machine) -> None:
        self.machine = machine
        self.sizes = tuple(mesh.size(axis) for axis in range(mesh.ndim))
        self._meshes = [mesh[name] for name in mesh.mesh_dim_names or ()]
        self._known: dict[tuple, list[Option]] = {}

    def options(self, call: Call) -> list[Option]:
        """At least one: whole everywhere."""
        described = tree_map(lambda one: str(one), [one for one in call.leaves])
        shapes = tuple((tuple(one.like.shape), one.like.dtype, one.kind == "parameter") for one in call.inputs)
        key = (call.function, tuple(described), tuple(call.places), shapes)
        if key not in self._known:
            self._known[key] = self._found(call)
        return self._known[key]

    def _found(self, call: Call) -> list[Option]:
        try:
            graph = _decomposed(call)
        except Exception as error:  # whatever torch cannot trace runs whole
            logging.getLogger(__name__).debug("%s is taken to need whole tensors: %s", call.name, error)
            graph = None
        flops, size = _work(graph) if graph is not None else (0, sum(one.bytes for one in call.inputs + call.outputs))
        seconds = max(flops / (self.machine.tflops * 1e12), size / (self.machine.memory_gbps * 1e9))
        whole = Replicate()
        ways: list[list[tuple]] = []
        of_size: dict[int, list[tuple]] = {}
        for axis in self._meshes:
            if axis.size() not in of_size:
                found = list(self._ways(call, graph, axis))
                of_size[axis.size()] = found or [((whole,) * len(call.inputs), (whole,) * len(call.outputs))]
            ways.append(of_size[axis.size()])
        options: dict[tuple, Option] = {}
        for choice in itertools.product(*ways):
            ins = tuple(tuple(way[0][k] for way in choice) for k in range(len(call.inputs)))
            outs = tuple(tuple(way[1][k] for way in choice) for k in range(len(call.outputs)))
            tensors = zip([*call.inputs, *call.outputs], ins + outs, strict=True)
            if all(self.is_even(value.like.shape, placed) for value, placed in tensors):
                share = 1.0
                for number, parts in enumerate(self.sizes):
                    if any(not placed[number].is_replicate() for placed in ins + outs):
                        share /= parts
                cost = self.machine.launch_us / 1e6 + seconds * share
                options[ins] = Option(ins, outs, cost, call.keeps_bytes * share)
        return list(options.values())

    def _ways(self, call: Call, graph: Any, mesh: DeviceMesh) -> Iterator[tuple[tuple, tuple]]:
        """The layouts of inputs on this axis alone that need no communication, and those of the outputs then."""
        metas = [_meta(one.like) for one in call.inputs]
        sets = [
            layouts(meta.shape, mesh.size(), value.kind == "made" and meta.dtype.is_floating_point)
            for meta, value in zip(metas, call.inputs, strict=True)
        ]
        if math.prod(map(len, sets)) > _MOST:
            alike = [one for one in sets[0] if all(one in others for others in sets)]
            combinations: Any = [(one,) * len(sets) for one in alike]
        else:
            combinations = itertools.product(*sets)
        for combination in combinations:
            outs = _batch_norm(call, combination)
            if outs is None and graph is not None:
                outs = _followed(graph, combination, metas, mesh)
            if outs is None or len(outs) != len(call.outputs):
                continue
            if all(one.is_replicate() for one in combination) and not all(one.is_replicate() for one in outs):
                continue
            yield tuple(combination), tuple(outs)

    def is_even(self, shape: Sequence[int], placed: Placed) -> bool:
        """Whether all ranks have parts of one size."""
        parts: dict[int, int] = {}
        for one, size in zip(placed, self.sizes, strict=True):
            if isinstance(one, Shard):
                parts[one.dim] = parts.get(one.dim, 1) * size
        return all(dim < len(shape) and shape[dim] % n == 0 for dim, n in parts.items())


def layouts(shape: Sequence[int], size: int, sums: bool) -> list[Placement]:
    """Of one tensor on an axis of this size."""
    split: list[Placement] = [Shard(dim) for dim, n in enumerate(shape) if n > 1 and n % size == 0]
    return [Replicate(), *split, *([Partial("sum")] if sums else [])]


def parts(placed: Placed, sizes: Sequence[int]) -> int:
    """In how many parts a tensor lies."""
    return math.prod(size for one, size in zip(placed, sizes, strict=True) if isinstance(one, Shard))


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


def _decomposed(call: Call) -> Any:
    """The operators that a call consists of, as dispatch sees them."""

    def run(*tensors: Any) -> Any:
        result = call.run(tensors)
        return [one for one in tree_flatten(result)[0] if isinstance(one, torch.Tensor)]

    like = [one.like.detach() for one in call.inputs]
    with torch.enable_grad():
        return make_fx(run)(*[one.requires_grad_(one.dtype.is_floating_point) for one in like]).graph


def _work(graph: Any) -> tuple[float, float]:
    """Floating-point operations, and bytes read and written by what is no view."""
    flops, size = 0.0, 0.0
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or node.target.is_view:
            continue
        args, kwargs = tree_map(_value, (node.args, dict(node.kwargs)))
        count = flop_registry.get(node.target.overloadpacket)
        if count is not None:
            flops += count(*args, **kwargs, out_val=_value(node))
        tensors = [one for one in tree_flatten((args, kwargs, _value(node)))[0] if isinstance(one, torch.Tensor)]
        size += sum(one.numel() * one.element_size() for one in tensors)
    return flops, size


def _value(one: Any) -> Any:
    return one.meta.get("val") if isinstance(one, torch.fx.Node) else one


def _followed(graph: Any, ins: Sequence[Placement], metas: Sequence[TensorMeta], mesh: DeviceMesh) -> list | None:
    """The layouts of what a graph makes; None if an operator in it would redistribute."""
    specs: dict[Any, Any] = {}
    given = iter(zip(ins, metas, strict=True))
    for node in graph.nodes:
        if node.op == "placeholder":
            placed, meta = next(given)
            specs[node] = DTensorSpec(mesh, (placed,), tensor_meta=meta)
        elif node.op == "get_attr":
            return None
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            if node.target in _OTHERWISE:
                return None
            if node.target is torch.ops.aten.detach.default:
                specs[node] = specs[node.args[0]]
                continue
            args = torch.fx.map_arg(node.args, lambda one: specs[one])
            kwargs = torch.fx.map_arg(dict(node.kwargs), lambda one: specs[one])
            specs[node] = _asked(node, args, kwargs, mesh)
            if specs[node] is None:
                return None
        elif node.op == "call_function":  # getitem
            specs[node] = specs[node.args[0]][node.args[1]]
    made = [specs[one] for one in next(iter(reversed(graph.nodes))).args[0]]
    found = [one.placements[0] if one is not None else Replicate() for one in made]
    if any(type(one) not in (Shard, Replicate, Partial) for one in found):
        return None
    # Means and the like are made whole after each call: see parts.settled.
    return [Replicate() if isinstance(one, Partial) and one.reduce_op != "sum" else one for one in found]


_OTHERWISE = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default}
"""Not run as torch's rules say: see `rules`."""


def _asked(node: Any, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = (propagator.op_to_schema_info, propagator.op_to_schema_info_for_single_dim_strategy)
    info = next((table[node.target] for table in tables if node.target in table), None)
    given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, DTensorSpec)]
    if not given:  # made here: whole
        return tree_map(lambda one: DTensorSpec(mesh, (Replicate(),), tensor_meta=_meta(one)), node.meta["val"])
    try:
        found = propagator.propagate_op_sharding_non_cached(OpSchema(node.target, tuple(args), dict(kwargs), info))
    except Exception:  # rules raise whatever they like for what they do not know
        return None
    if found.output_spec is None:
        return None
    if found.redistribute_schema is not None and found.needs_redistribute:
        # Also for views, whose sizes alone are made local: only layouts count. A whole tensor is a sum for nothing.
        wanted = found.redistribute_schema
        asked = [
            one for one in tree_flatten((wanted.args_schema, wanted.kwargs_schema))[0] if isinstance(one, DTensorSpec)
        ]
        for before, after in zip(given, asked, strict=True):
            a, b = before.placements[0], after.placements[0]
            if a != b and not (a.is_replicate() and b.is_partial()):
                return None
    many = isinstance(found.output_spec, (tuple, list))
    made = tree_flatten(node.meta["val"])[0]
    specs = list(found.output_spec) if many else [found.output_spec]
    for spec, tensor in zip(specs, made, strict=False):
        if spec is not None and isinstance(tensor, torch.Tensor):
            spec.tensor_meta = _meta(tensor)
    return specs if many else specs[0]


def _batch_norm(call: Call, ins: Sequence[Placement]) -> list | None:
    """Of a split batch: ours reduces sums of C numbers, where torch's rule gathers (see `rules`)."""
    if call.function is not F.batch_norm or ins[0] != Shard(0) or not all(one.is_replicate() for one in ins[1:]):
        return None
    return [Shard(0)]


def moving(
    size: float,
    before: Placed,
    after: Placed,
    summed: Sequence[bool],
    grad: bool,
    sizes: Sequence[int],
    links: Sequence[Link],
) -> tuple[float, float] | None:
    """Seconds forward and backward of bringing a tensor from one layout to another; None: cannot be asked for.

    Args:
        size: bytes of the whole tensor.
        summed: by axis, whether its reader leaves a sum as its gradient there.
        grad: whether there is a gradient at all.
        links: by axis.
    """
    if before != after and any(one.is_partial() for one in after):
        return None
    local = size / parts(before, sizes)
    forward = backward = 0.0
    for p, q, n, is_sum, link in zip(before, after, sizes, summed, links, strict=True):
        sent = local * (n - 1) / n
        if p.is_shard() and q.is_replicate():
            forward += _takes(link, "all_gather", sent * n)
            backward += _takes(link, "reduce_scatter", sent * n) if is_sum else 0.0  # or a slice
            local *= n
        elif p.is_replicate() and q.is_shard():
            backward += _takes(link, "all_gather", sent)
            local /= n
        elif p.is_shard() and q.is_shard() and p != q:
            exchange = _takes(link, *(("all_to_all", sent) if "all_to_all" in link else ("all_gather", sent * n)))
            forward += exchange
            backward += exchange
        elif p.is_partial() and q.is_shard():
            forward += _takes(link, "reduce_scatter", sent)
            backward += _takes(link, "all_gather", sent)
            local /= n
        elif p.is_partial() and q.is_replicate():
            forward += _takes(link, "all_reduce", 2 * sent)
            backward += _takes(link, "all_reduce", 2 * sent) if is_sum else 0.0
        elif p.is_replicate() and q.is_replicate() and is_sum:
            backward += _takes(link, "all_reduce", 2 * sent)
    return forward, backward if grad else 0.0


def _takes(link: Link, name: str, sent: float) -> float:
    begin, per_byte = link[name]
    return begin + sent * per_byte

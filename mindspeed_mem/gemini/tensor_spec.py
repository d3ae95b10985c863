"""What ColossalAI's scripts say of a parameter: over which ranks it is split, and how its layer computes with a part.

    with ColoInitContext(default_pg=ProcessGroup(tp_degree=2)):
        model = build()
    model.fc1.weight.set_tensor_spec(ShardSpec([0], [2]), ComputeSpec(ComputePattern.TP1D))
    model = GeminiDDP(model)        # here each rank takes its part: see `layer_parallel`

Specs only say so: until the model is wrapped a parameter has its whole shape, and, built lazily, no memory.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_mem.gemini.groups import ProcessGroup
from mindspeed_mem.gemini.lazy import lazy_init
from mindspeed_mem.gemini.options import OptionError, refuse, refuse_unknown, say_once


@dataclass(frozen=True)
class ReplicaSpec:
    """Whole on each tensor-parallel rank."""


class ShardSpec:
    """Split along one dimension: `dims` is [dimension], `num_partitions` [the number of tensor-parallel ranks].

    Raises OptionError with all that is wrong.
    """

    def __init__(self, dims: Sequence[int], num_partitions: Sequence[int]) -> None:
        wrong = []
        for name, given, least in (("dims", dims, None), ("num_partitions", num_partitions, 1)):
            whole = isinstance(given, (list, tuple)) and len(given) == 1 and isinstance(given[0], int)
            if not whole or (least is not None and given[0] < least):
                wrong.append(f"ShardSpec: {name} is a list of one whole number, not {given!r}")
        refuse(wrong)
        self.dims, self.num_partitions = tuple(dims), tuple(num_partitions)

    def __repr__(self) -> str:
        return f"ShardSpec({list(self.dims)}, {list(self.num_partitions)})"


class ComputePattern(enum.Enum):
    """How layers compute with parts; there is one way."""

    TP1D = "1D"


class ComputeSpec:
    """How the layer of a split parameter computes.

    output_replicate: whether ranks bring their parts of its output together; if not, the next layer takes the part.
    """

    def __init__(self, compute_pattern: ComputePattern) -> None:
        if not isinstance(compute_pattern, ComputePattern):
            raise OptionError(f"ComputeSpec: compute_pattern is ComputePattern.TP1D, not {compute_pattern!r}")
        self.compute_pattern, self.output_replicate = compute_pattern, True

    def set_output_replicate(self, flag: bool = True) -> None:
        self.output_replicate = bool(flag)


class ColoParameter(torch.nn.Parameter):
    """A parameter that can be told how it is split. `ColoInitContext` makes all parameters of a model such ones."""

    dist_spec: ReplicaSpec | ShardSpec = ReplicaSpec()
    compute_spec: ComputeSpec | None = None
    process_group: ProcessGroup | None = None

    def set_process_group(self, pg: ProcessGroup) -> None:
        """`pg` has the ranks that it is split over."""
        if not isinstance(pg, ProcessGroup):
            raise OptionError(f"set_process_group takes a ProcessGroup, not {pg!r}")
        self.process_group = pg

    def get_process_group(self) -> ProcessGroup | None:
        return self.process_group

    def get_tp_world_size(self) -> int:
        """How many ranks it can be split over."""
        return 1 if self.process_group is None else self.process_group.tp_world_size()

    def set_dist_spec(self, dist_spec: ReplicaSpec | ShardSpec) -> None:
        """Whether and how it is split. Raises OptionError where it cannot be."""
        if isinstance(dist_spec, ShardSpec):
            [dim], [parts] = dist_spec.dims, dist_spec.num_partitions
            if not -self.dim() <= dim < self.dim() or self.shape[dim] % parts:
                raise OptionError(f"{dist_spec} does not divide a parameter of shape {tuple(self.shape)}")
        elif not isinstance(dist_spec, ReplicaSpec):
            raise OptionError(f"set_dist_spec takes a ShardSpec or a ReplicaSpec, not {dist_spec!r}")
        self.dist_spec = dist_spec

    def set_compute_spec(self, compute_spec: ComputeSpec) -> None:
        if not isinstance(compute_spec, ComputeSpec):
            raise OptionError(f"set_compute_spec takes a ComputeSpec, not {compute_spec!r}")
        self.compute_spec = compute_spec

    def has_compute_spec(self) -> bool:
        return self.compute_spec is not None

    def set_tensor_spec(self, dist_spec: ReplicaSpec | ShardSpec, compute_spec: ComputeSpec) -> None:
        self.set_dist_spec(dist_spec)
        self.set_compute_spec(compute_spec)

    def is_replicate(self) -> bool:
        """Whether it is whole on each rank."""
        return not self.is_sharded()

    def is_sharded(self) -> bool:
        """Whether it is split over more than one rank."""
        return isinstance(self.dist_spec, ShardSpec) and self.dist_spec.num_partitions[0] > 1


class ColoInitContext(lazy_init):
    """`lazy_init` under ColossalAI 0.1's name, for parameters that can be told how they are split.

    device has no meaning, since chunks decide where parameters are. default_pg is each parameter's process group.
    default_dist_spec has none either: it saves memory while a model is built, of which nothing is taken here.
    """

    def __init__(
        self,
        device: Any = None,
        dtype: torch.dtype | None = None,
        default_pg: ProcessGroup | None = None,
        default_dist_spec: ReplicaSpec | ShardSpec | None = None,
        **unknown: Any,
    ) -> None:
        wrong = refuse_unknown("ColoInitContext", unknown, ColoInitContext.__init__)
        if not isinstance(default_pg, (ProcessGroup, type(None))):
            wrong.append(f"default_pg is a ProcessGroup or None, not {default_pg!r}")
        if not isinstance(default_dist_spec, (ReplicaSpec, ShardSpec, type(None))):
            wrong.append(f"default_dist_spec is a ShardSpec, a ReplicaSpec or None, not {default_dist_spec!r}")
        refuse(wrong)
        super().__init__(dtype)
        self._group = default_pg
        if isinstance(default_dist_spec, ShardSpec):
            say_once("ColoInitContext: default_dist_spec has no effect: what is built here takes no memory anyway")

    def _take(self, tensor: torch.Tensor) -> None:
        super()._take(tensor)
        if type(tensor) is torch.nn.Parameter:
            tensor.__class__ = ColoParameter
        if isinstance(tensor, ColoParameter) and self._group is not None:
            tensor.process_group = self._group

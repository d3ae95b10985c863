"""What is to be planned: layers with what they keep and cost, the pipeline's stages, the link and the limits.

Everything is plain data for one rank of each stage: bytes and seconds of one micro-batch, counted by storage. Where the
figures come from, a measurement or an estimate, is not known here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from mindspeed_mem.activation.observe.rank_profile import HostCost, Outside
from mindspeed_mem.adaptive.problem.orders import Held, Order, largest, shared
from mindspeed_mem.passes import Pass
from mindspeed_mem.schedule import Placement, order

GB = 1e9
GIB = 2**30
SCHEDULES = ("1f1b", "zb", "v")


@dataclass(frozen=True, kw_only=True)
class PlannedOperator:
    """One operator of a layer, without those inside it; in the order in which they start forward."""

    name: str
    """Path in Megatron's names below the layer, as in a memory plan."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    """All of it, with gradients of weights."""
    weight_seconds: float = 0.0
    """Of these, what gradients of weights take that a split backward puts off,"""
    weight_bytes: int = 0
    """and the output gradients that it holds until then. What it holds of groups is said there."""
    gradient_bytes: int = 0
    """Of these, what may be on the host meanwhile: not of layers that put gradients off by themselves."""
    forward_temporary_bytes: int = 0
    """The most that is held while it runs beyond what backward keeps; see `Stage.operator_temporary_bytes`."""
    backward_temporary_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tensors of a layer that are kept, swapped or recomputed together: what one or a few operators produce."""

    name: str
    bytes: int
    """Of the storages that backward keeps, each counted once."""
    operators: tuple[str, ...]
    """Who produces them: what a memory plan names to swap them, and to recompute them."""
    used_by: tuple[str, ...]
    """Operators of this layer whose backward reads them: they live until the first of these, in forward order, is done
    with its backward, and are needed again for the last."""
    leaves: tuple[tuple[str, int], ...] = ()
    """What of them is done with earlier: operators of `used_by` behind the first, with the bytes that nobody needs once
    their backward is done; nothing of `weight_bytes`."""
    recompute_seconds: float | None = None
    """What making them again costs when what they are made from is there, up to the last one that backward needs (the
    second run stops early). None: they cannot be made again."""
    recompute_keeps: int = 0
    """Bytes kept where it is recomputed: inputs of the second run that are in no group."""
    recompute_temporary_bytes: int = 0
    """The most that the second run holds beyond these; see `Stage.operator_temporary_bytes`."""
    recompute_operators: tuple[str, ...] = ()
    """What a memory plan names to recompute it; empty: `operators`."""
    needs: tuple[str, ...] = ()
    """The groups that the second run reads; one of them that is recomputed as well runs again before it."""
    swappable: bool = True
    tensors: int = 1
    """How many there are: `HostCost` is for each."""
    weight_bytes: int = 0
    """Of `bytes`, what gradients of weights are made from: a split backward holds it until then, whatever it plans."""
    weights_only: bool = False
    """Nothing else needs these: swapped, they stay on the host until then, where gradients of weights are passes."""
    from_previous: bool = False
    """`operators` are those of the layer before. The first layer of a part gets them from outside (`Outside.bytes`),
    where nothing can be done about them."""

    def moved_seconds(self, host: HostCost) -> float:
        """What the engine takes of computation's time for it where it is swapped: half forward, half backward."""
        return self.tensors * host.moved_seconds

    def again_seconds(self, host: HostCost) -> float:
        """What a backward takes longer where it is recomputed."""
        reruns = len(self.recompute_operators or self.operators)
        return (self.recompute_seconds or 0.0) + reruns * host.rerun_seconds


@dataclass(frozen=True, kw_only=True)
class LayerClass:
    """Layers that are alike."""

    name: str
    operators: tuple[PlannedOperator, ...]
    groups: tuple[Group, ...]
    """What a group needs stands before it."""
    input_bytes: int = 0
    """What one such layer is handed: all that Megatron's full recomputation keeps of it."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # looked up for every layer of every plan
        return hash((self.name, self.operators, self.groups, self.input_bytes))

    @cached_property
    def index(self) -> dict[str, int]:
        """The place of each operator in forward order."""
        return {operator.name: place for place, operator in enumerate(self.operators)}

    @cached_property
    def group_index(self) -> dict[str, int]:
        return {group.name: place for place, group in enumerate(self.groups)}

    @cached_property
    def forward_seconds(self) -> float:
        return sum(operator.forward_seconds for operator in self.operators)

    @cached_property
    def backward_seconds(self) -> float:
        return sum(operator.backward_seconds for operator in self.operators)

    @cached_property
    def weight_seconds(self) -> float:
        return sum(operator.weight_seconds for operator in self.operators)

    @cached_property
    def weight_bytes(self) -> int:
        """What a layer holds from its split backward until its gradients of weights are there."""
        return sum(one.weight_bytes for one in self.operators) + sum(one.weight_bytes for one in self.groups)


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of the model that one stage runs in a row; with virtual stages a stage has several."""

    layers: tuple[str, ...]
    """The class of each layer."""
    first_layer: int
    """Global index of the first, counted from 0."""
    before: Outside = field(default_factory=Outside)
    after: Outside = field(default_factory=Outside)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One rank of a pipeline stage."""

    parts: tuple[Part, ...]
    static_bytes: int
    """Parameters, gradients, optimizer states and whatever else is there all the time."""
    temporary_bytes: int = 0
    """The most that is held on top for a short time: workspaces, gradients of activations."""
    operator_temporary_bytes: int = 0
    """How much of these is known operator by operator: while one runs that takes less by its own
    `PlannedOperator.forward_temporary_bytes`, that much less is held. 0: nobody knows, and all is held at any time."""
    step_seconds: float = 0.0
    """Once per step, outside the passes: reductions, optimizer."""
    step_bytes: int = 0
    """What the optimizer's step holds on top of `static_bytes`, when all passes are over."""

    @property
    def in_step_bytes(self) -> int:
        """Held in the optimizer's step, whatever is planned."""
        return self.static_bytes + self.step_bytes

    @property
    def fixed_bytes(self) -> int:
        """What is there whatever pass runs and whatever is planned."""
        return self.static_bytes + self.temporary_bytes - self.operator_temporary_bytes


@dataclass(frozen=True, kw_only=True)
class Link:
    """Speed of host copies in GB/s (1e9 bytes), one direction each, with all ranks of the host copying."""

    out: float
    back: float
    out_alone: float | None = None
    """While nothing is computed; a plan counts on `out` and `back`, which hold during compute."""
    back_alone: float | None = None
    blocking: bool = False
    """Computation stands still while anything is copied, as on a CPU, which copies in the computing thread: no copy
    hides behind compute."""
    slows: float = 0.0
    """Seconds that computation takes longer for each second of copies beside it, as both need device memory."""

    def scaled(self, speed: float) -> Link:
        """``speed`` times as fast, each way."""
        names = (name for name in ("out", "back", "out_alone", "back_alone") if getattr(self, name) is not None)
        return dataclasses.replace(self, **{name: speed * getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The schedule: arguments of `mindspeed_mem.schedule.order`, which gives each stage's passes."""

    micro_batches: int
    group_size: int | None = None
    cap: int | None = None
    megatron_loop: bool = False
    send_seconds: float = 0.0
    schedule: str = "1f1b"
    """``--pipeline-schedule``: with zb and v gradients of weights are passes of their own; with v parts lie in a V."""
    split_backward: bool = False
    """``--split-backward``: otherwise, too, they are put off, until the backward of their pass has ended."""

    @property
    def apart(self) -> bool:
        """Whether gradients of weights are passes of their own."""
        return self.schedule != "1f1b"

    @property
    def splits(self) -> bool:
        """Whether they are put off at all."""
        return self.apart or self.split_backward


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model on a pipeline of devices. Limits are bytes of one rank; None: the host has no limit."""

    classes: tuple[LayerClass, ...]
    stages: tuple[Stage, ...]
    pipeline: Pipeline
    link: Link
    device_limit: int
    host_limit: int | None = None
    host: HostCost = field(default_factory=HostCost)
    output_gradients: bool = False
    """Whether every plan moves those that wait for gradients of weights, see `Plan.output_gradients`."""

    @property
    def virtual_stages(self) -> int:
        return len(self.stages[0].parts)

    @property
    def num_layers(self) -> int:
        return sum(len(part.layers) for stage in self.stages for part in stage.parts)

    @cached_property
    def class_of(self) -> dict[str, LayerClass]:
        return {one.name: _same(one) for one in self.classes}

    @property
    def placement(self) -> Placement:
        """Where the parts of the model lie."""
        return Placement(len(self.stages), self.virtual_stages, self.pipeline.schedule == "v")

    @cached_property
    def orders(self) -> list[Order]:
        """The passes of each stage in the order they run."""
        return _orders(len(self.stages), self.virtual_stages, dataclasses.replace(self.pipeline, send_seconds=0.0))

    @cached_property
    def whole(self) -> list[Order]:
        """Those of the whole step, which say what is held: where only some of its micro-batches are played, an order
        that was found by simulation may hold something else."""
        return self.orders

    @property
    def passes(self) -> list[list[Pass]]:
        """The passes of each stage in the order they run."""
        return [one.passes for one in self.orders]

    @property
    def held(self) -> list[list[Held]]:
        """For each stage how many passes of each of its parts are held at once, from the forward until the backward,
        and how many of each wait for gradients of weights then: every maximum there is."""
        return [one.held for one in self.whole]

    @cached_property
    def in_flight(self) -> list[list[tuple[int, ...]]]:
        """For each stage how many passes of each of its parts are between forward and backward: every maximum there is.

        Without virtual stages that is one number; with them several combinations may be the largest.
        """
        return [sorted(largest({before for before, _ in of_stage})) for of_stage in self.held]

    @property
    def turning(self) -> list[set[int]]:
        """For each stage the parts of which a backward follows its forward with nothing but gradients of weights in
        between."""
        return [one.turning for one in self.orders]

    @cached_property
    def blocks(self) -> list[Block]:
        """All blocks, stage by stage and part by part."""
        found = []
        for stage, of_stage in enumerate(self.stages):
            for number, part in enumerate(of_stage.parts):
                for name in dict.fromkeys(part.layers):
                    places = tuple(place for place, other in enumerate(part.layers) if other == name)
                    found.append(Block(stage, number, self.class_of[name], places))
        return found

    def on_host(self, group: Group) -> int:
        """Bytes of a group that, swapped, stay on the host until gradients of weights are computed."""
        return on_host(group, self.pipeline.apart)

    def gradient_on_host(self, one: PlannedOperator | Outside) -> int:
        """Bytes of the gradient of an output that stay on the host until that of the weight is computed."""
        return gradient_on_host(one, self.output_gradients and self.pipeline.apart)

    def gradients_on_host(self, stage: int, part: int) -> int:
        """Those of a pass of a part."""
        of_part = self.stages[stage].parts[part]
        each = {name: sum(map(self.gradient_on_host, self.class_of[name].operators)) for name in set(of_part.layers)}
        return sum(each[name] for name in of_part.layers) + self.gradient_on_host(of_part.after)

    def waiting(self, stage: int, part: int) -> int:
        """Bytes that a pass of a part holds from its backward until its gradients of weights are there."""
        of_part = self.stages[stage].parts[part]
        layers = sum(self.class_of[name].weight_bytes for name in of_part.layers)
        first = self.class_of[of_part.layers[0]].groups if of_part.layers else ()
        outside = sum(group.weight_bytes for group in first if group.from_previous)  # in nobody's hands there
        whole = layers - outside + of_part.before.weight_bytes + of_part.after.weight_bytes
        return whole - self.gradients_on_host(stage, part)

    def with_limit(self, device_limit: int) -> Problem:
        """The same with another device limit."""
        return self._with(device_limit=device_limit)

    def with_output_gradients(self) -> Problem:
        """The same where every plan moves them."""
        return self._with(output_gradients=True)

    def _with(self, **fields: Any) -> Problem:
        """What is known about classes is kept, and about the schedule, unless that changes."""
        other = dataclasses.replace(self, **fields)
        of_schedule = () if "pipeline" in fields else ("orders", "whole", "in_flight")
        for name in ("class_of", "blocks", *of_schedule):
            if name in self.__dict__:
                other.__dict__[name] = self.__dict__[name]
        return other

    def without_swap(self) -> Problem:
        """The same where nothing may be swapped."""
        classes = []
        for kind in self.classes:
            groups = tuple(dataclasses.replace(group, swappable=False) for group in kind.groups)
            classes.append(dataclasses.replace(kind, groups=groups))
        return dataclasses.replace(self, classes=tuple(classes))

    def with_micro_batches(self, count: int) -> Problem:
        """The same with another number of micro-batches; with fewer, what the whole step holds is known still."""
        other = self._with(pipeline=dataclasses.replace(self.pipeline, micro_batches=count))
        if self.pipeline.apart and count < self.pipeline.micro_batches:
            other.__dict__["whole"] = self.whole
        return other

    def shared_passes(self, micro_batches: int) -> list[int]:
        """How many passes each stage begins with that run at the same times with this number of micro-batches."""
        line = dataclasses.replace(self.pipeline, send_seconds=0.0)
        return _shared(self.placement, line, dataclasses.replace(line, micro_batches=micro_batches))


def on_host(group: Group, apart: bool) -> int:
    """See `Problem.on_host`; `apart`: as in `Pipeline`."""
    return group.weight_bytes if group.weights_only and apart else 0


def gradient_on_host(one: PlannedOperator | Outside, moves: bool) -> int:
    """See `Problem.gradient_on_host`."""
    return one.gradient_bytes if moves and one.weight_seconds else 0


@dataclass(frozen=True)
class Block:
    """The layers of one class in one part of one stage: they are alike, so a plan only counts them."""

    stage: int
    part: int
    kind: LayerClass
    layers: tuple[int, ...]
    """Their places in the part."""

    def movable(self, group: Group) -> tuple[int, ...]:
        """Those of its layers in which there is something to decide about this group."""
        return tuple(layer for layer in self.layers if layer) if group.from_previous else self.layers


@lru_cache(maxsize=4096)
def _same(kind: LayerClass) -> LayerClass:
    """One object for all problems' classes that are equal: what is known of a class is then found without comparing
    all its fields."""
    return kind


@lru_cache(maxsize=64)
def _orders(stages: int, virtual_stages: int, line: Pipeline) -> list[Order]:
    passes = order(
        stages,
        virtual_stages,
        line.micro_batches,
        group_size=line.group_size,
        cap=line.cap,
        megatron_loop=line.megatron_loop,
        split=line.apart,
        v=line.schedule == "v",
    )
    return [Order(of_stage, virtual_stages) for of_stage in passes]


@lru_cache(maxsize=64)
def _shared(placement: Placement, line: Pipeline, other: Pipeline) -> list[int]:
    longer, shorter = (_orders(placement.stages, placement.virtual_stages, one) for one in (line, other))
    return shared(longer, shorter, placement)

"""All layouts of a model on a number of devices that Megatron accepts, and why it refuses the others."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from mindspeed_mem.adaptive.layout import ends
from mindspeed_mem.adaptive.layout.cluster import Cluster
from mindspeed_mem.adaptive.layout.ends import Ends
from mindspeed_mem.adaptive.problem import from_shape
from mindspeed_mem.adaptive.problem.shape import Degrees, Shape
from mindspeed_mem.schedule import problems as schedule_problems

NAMES = {
    "tp": "tensor",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
    "pp": "pipeline",
    "vpp": "virtual",
    "first": "first",
    "last": "last",
    "mbs": "micro_batch",
    "dp": "data",
    "zero": "zero",
}
"""What users call the sizes of a layout."""
_MICRO_BATCHES = (1, 2, 4, 8, 16)
_VIRTUAL = 12
"""Virtual stages at most. Others of either are tried where they are fixed."""
_SPLIT_VIRTUAL = 2
"""Virtual stages at most where the backward is split; a V has just these."""
SHARDINGS = ((0, 1.0), (1, 0.0), (2, 1.0), (2, 0.0), (3, 1.0), (3, 0.5), (3, 0.0))
"""Stages of chunks, and the share of what they split that rests on the device."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is split. Sequence parallelism comes with tensor parallelism, the distributed optimizer with data
    parallelism."""

    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    first: int = 0
    """Layers of the first pipeline stage,"""
    last: int = 0
    """and of the last one; both 0: as many as the others have."""
    micro_batch: int = 1
    zero: int = 0
    """The stage of chunks; 0: none."""
    on_device: float = 1.0
    schedule: str = "1f1b"
    """``--pipeline-schedule``: 1f1b, zb or v."""

    @property
    def ends(self) -> Ends:
        return Ends(self.first, self.last)

    def data(self, devices: int) -> int:
        return devices // (self.tensor * self.context * self.pipeline)

    def shape(self, model: Model) -> Shape:
        """The model with this micro-batch, its vocabulary padded as Megatron does."""
        return dataclasses.replace(
            model.shape,
            micro_batch_size=self.micro_batch,
            context=self.context,
            vocab_size=model.padded(self.tensor),
        )

    def split(self, model: Model, devices: int) -> Degrees:
        """What of it concerns bytes and seconds."""
        data = self.data(devices)
        micro_batches = model.batch // (data * self.micro_batch)
        counts: tuple[int, ...] = ()
        if self.ends != ends.EVEN:
            counts = ends.parts(model.shape.num_layers, self.pipeline, self.virtual, self.ends)
        return dataclasses.replace(
            model.split,
            tensor=self.tensor,
            pipeline=self.pipeline,
            virtual=self.virtual,
            stage_layers=",".join(map(str, counts)),
            data=data,
            context=self.context,
            micro_batches=micro_batches,
            sequence_parallel=self.tensor > 1,
            distributed_optimizer=data * self.context > 1 or self.zero > 0,
            expert=self.expert,
            expert_tensor=self.expert_tensor if model.shape.num_experts else 0,
            chunk_zero_stage=self.zero,
            reduce_each=self.zero > 1 and micro_batches > 1,
            on_device=self.on_device,
            schedule=self.schedule,
        )


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is to be trained."""

    shape: Shape
    """Of any micro-batch."""
    split: Degrees
    """What layouts leave as it is: bytes of gradients and states."""
    batch: int
    """Sequences of a step."""
    vocab_size: int
    """Before padding."""

    def padded(self, tensor: int) -> int:
        """The vocabulary on so many tensor-parallel ranks."""
        return -(-self.vocab_size // (128 * tensor)) * 128 * tensor


def layouts(
    model: Model,
    cluster: Cluster,
    fixed: Mapping[str, int],
    chunks: bool,
    refused: Counter[str],
    schedules: Collection[str] = ("1f1b",),
) -> Iterator[Layout]:
    """Every layout that Megatron accepts.

    Args:
        model: what is to be split.
        cluster: over these devices. Tensor-parallel ranks stay in a node.
        fixed: sizes by the names of `Layout` that others are not tried of.
        chunks: whether chunk ZeRO is tried.
        refused: counts those that are refused by reason, at the first size that is the reason.
        schedules: of pipelines, as ``--pipeline-schedule`` names them. Those with a split backward are tried on
            at most two virtual stages, which leave little idle time, and without chunk ZeRO, which is refused there.
    """
    devices, shape = cluster.devices, model.shape
    tensors = _choices(fixed, "tensor", [size for size in _divisors(devices) if size <= cluster.per_node])
    pipelines = _choices(fixed, "pipeline", _divisors(devices))
    contexts = _choices(fixed, "context", _divisors(devices))
    head = _head(model, cluster)
    for tensor, pipeline, context in itertools.product(tensors, pipelines, contexts):
        if devices % (tensor * pipeline * context):
            continue  # not so many devices: no layout at all
        reason = _indivisible(shape, tensor, context)
        splits = _splits(shape.num_layers, pipeline, head, fixed)
        if reason is None and not splits:
            reason = "layers cannot be divided so over pipeline stages and their virtual ones"
        if reason is not None:
            refused[reason] += 1
            continue
        data = devices // (tensor * pipeline * context)
        if fixed.get("data", data) != data:
            continue
        for micro_batch in _choices(fixed, "micro_batch", _MICRO_BATCHES):
            if model.batch % (data * micro_batch):
                refused["the global batch is no multiple of micro-batch times data-parallel ranks"] += 1
                continue
            count = model.batch // (data * micro_batch)
            for virtual, (first, last) in splits:
                one = Layout(
                    tensor=tensor,
                    context=context,
                    pipeline=pipeline,
                    virtual=virtual,
                    first=first,
                    last=last,
                    micro_batch=micro_batch,
                )
                for scheduled in _scheduled(one, count, schedules, refused):
                    for experts in _experts(shape, scheduled, data, fixed, refused):
                        yield from _sharded(experts, data * context, fixed, chunks)


def _head(model: Model, cluster: Cluster) -> float:
    """What the last stage has to do besides its layers, in layers: predictions, their losses, further tokens'."""
    shape = dataclasses.replace(model.shape, micro_batch_size=1, vocab_size=model.padded(1))
    problem = from_shape.problem(shape, Degrees(), cluster.machine)
    (part,) = problem.stages[0].parts
    kinds = [problem.class_of[name] for name in part.layers]
    layers = [kind.forward_seconds + kind.backward_seconds for kind in kinds]
    each = sum(layers[: shape.num_layers]) / shape.num_layers
    return (part.after.forward_seconds + part.after.backward_seconds + sum(layers[shape.num_layers :])) / each


def _splits(layers: int, pipeline: int, head: float, fixed: Mapping[str, int]) -> list[tuple[int, Ends]]:
    """Virtual stages, and the layers of the first stage and the last."""
    asked = Ends(fixed.get("first", 0), fixed.get("last", 0))
    virtuals = _choices(fixed, "virtual", range(1, 1 + (_VIRTUAL if pipeline > 1 else 1)))
    return [(virtual, one) for virtual in virtuals for one in ends.choices(layers, pipeline, virtual, head, asked)]


def _scheduled(one: Layout, count: int, schedules: Collection[str], refused: Counter[str]) -> Iterator[Layout]:
    """In each order of passes that there is for so many micro-batches."""
    for schedule in schedules:
        split, v = schedule != "1f1b", schedule == "v"
        if split and (one.pipeline == 1 or one.virtual > _SPLIT_VIRTUAL or (v and one.virtual != _SPLIT_VIRTUAL)):
            continue  # none idles, few do, or it is no V: nothing that Megatron refuses
        if v and one.ends != ends.EVEN:
            continue  # a V has the first part and the last on one stage
        if schedule_problems(one.pipeline, one.virtual, count, split=split, v=v):
            refused["virtual stages: micro-batches are no multiple of pipeline stages"] += 1
            continue
        yield dataclasses.replace(one, schedule=schedule)


def _sharded(one: Layout, ranks: int, fixed: Mapping[str, int], chunks: bool) -> Iterator[Layout]:
    for stage, on_device in SHARDINGS:
        wanted = fixed.get("zero", stage if chunks or not stage else None) == stage
        if stage and one.schedule != "1f1b":
            continue
        if wanted and (not stage or ranks > 1 or (stage, on_device) == (1, 0.0)):
            yield dataclasses.replace(one, zero=stage, on_device=on_device)


def _experts(shape: Shape, one: Layout, data: int, fixed: Mapping[str, int], refused: Counter[str]) -> Iterator[Layout]:
    """With each way to spread the experts."""
    if not shape.num_experts:
        if fixed.get("expert", 1) == 1:
            yield one
        return
    for expert in _choices(fixed, "expert", _divisors(shape.num_experts)):
        for split in _choices(fixed, "expert_tensor", sorted({1, one.tensor})):
            if shape.num_experts % expert:
                refused["experts are no multiple of expert-parallel ranks"] += 1
            elif (one.tensor * one.context * data) % (expert * split):
                refused["ranks of a pipeline stage are no multiple of those that hold each expert once"] += 1
            elif (shape.moe_ffn_hidden_size or shape.ffn_hidden_size) % split:
                refused["the experts' width is no multiple of the ranks that split each"] += 1
            else:
                yield dataclasses.replace(one, expert=expert, expert_tensor=split)


def _indivisible(shape: Shape, tensor: int, context: int) -> str | None:
    """Why Megatron refuses these sizes."""
    if shape.num_attention_heads % tensor:
        return "attention heads are no multiple of tensor-parallel ranks"
    if shape.num_query_groups % tensor:
        return "query groups are no multiple of tensor-parallel ranks"
    if shape.ffn_hidden_size % tensor or shape.shared_expert_size % tensor:
        return "the MLP's width is no multiple of tensor-parallel ranks"
    if context > 1 and not (shape.flash and shape.te):
        return "only TransformerEngine's fused attention is split over context-parallel ranks"
    if context > 1 and shape.seq_length % (2 * context):
        return "the sequence is no multiple of twice the context-parallel ranks"
    if shape.seq_length // context % tensor:
        return "a rank's sequence is no multiple of tensor-parallel ranks"
    return None


def _choices(fixed: Mapping[str, int], name: str, others: Collection[int]) -> Collection[int]:
    return [fixed[name]] if name in fixed else others


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]

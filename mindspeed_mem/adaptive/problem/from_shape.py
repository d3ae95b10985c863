"""A planning problem from a model's shape alone: bytes by formula, seconds from FLOPs and bytes moved.

Seconds are estimates. A matrix product takes its FLOPs at `Machine.tflops`, a flash attention its causal FLOPs at 0.7
of that forward and 2.5 times as many at 0.6 backward (what flash attention reaches on an H200 against 700 TFLOP/s of
matrix products), other operators what they read and write at `Machine.memory_gbps`, collectives what each rank
receives at `Machine.tensor_gbps`. A backward is twice its forward. Left out: launch gaps, copies slowing compute down,
data-parallel traffic that is not hidden.
"""

from __future__ import annotations

from mindspeed_mem.activation.observe.rank_profile import Outside
from mindspeed_mem.adaptive.problem.definition import (
    GB,
    Group,
    LayerClass,
    Link,
    Part,
    Pipeline,
    PlannedOperator,
    Problem,
    Stage,
)
from mindspeed_mem.adaptive.problem.layer_bytes import layer_bytes, mask_bytes, norm_bytes, stream_bytes
from mindspeed_mem.adaptive.problem.shape import ELEMENT, Degrees, Machine, Shape
from mindspeed_mem.plan import operators as op

FLASH_FORWARD, FLASH_BACKWARD = 0.7, 0.6
LAYER = "layer"


class Times:
    """Seconds of one layer's operators, forward and backward, for one micro-batch on one rank."""

    def __init__(self, shape: Shape, split: Degrees, machine: Machine):
        self.shape, self.split, self.machine = shape, split, machine
        tokens, tensor = shape.tokens, split.tensor
        stream = stream_bytes(shape, split)
        query, key = (tokens * width * ELEMENT / tensor for width in (shape.query_width, shape.key_width))
        fc1 = tokens * shape.fc1_width * ELEMENT / tensor
        act = tokens * shape.ffn_hidden_size * ELEMENT / tensor
        gather = tokens * shape.hidden_size * ELEMENT * (tensor - 1) / tensor / (machine.tensor_gbps * GB)
        ahead = gather if split.sequence_parallel else 0.0  # gathered before, scattered after; or reduced after
        after = gather if split.sequence_parallel else 2 * gather
        products = {
            op.QKV: self.product(shape.hidden_size, shape.query_width + 2 * shape.key_width),
            op.PROJ: self.product(shape.query_width, shape.hidden_size),
            op.FC1: self.product(shape.hidden_size, shape.fc1_width),
            op.FC2: self.product(shape.ffn_hidden_size, shape.hidden_size),
        }
        flops = 2 * tokens * shape.seq_length * shape.query_width / tensor  # two products, of which causality halves
        flash = flops / (machine.tflops * 1e12)
        moved = {
            op.INPUT_NORM: 2 * stream,
            op.ROTARY: 2 * (query + key) * shape.rope,
            op.ATTENTION_ADD: 3 * stream,
            op.MLP_NORM: 2 * stream,
            op.ACTIVATION: fc1 + act,
            op.MLP_ADD: 3 * stream,
        }
        self.forward = {name: self.move(size) for name, size in moved.items()}
        self.backward = {name: 2 * seconds for name, seconds in self.forward.items()}
        for name, seconds in products.items():
            begins = name in (op.QKV, op.FC1)  # backward, what it was given is gathered once more
            self.forward[name] = seconds + (ahead if begins else after)
            self.backward[name] = 2 * seconds + (after if begins else 0.0) + ahead
        if shape.flash:
            # Context-parallel ranks hand keys and values round while they compute; backward, their gradients too.
            ring = 2 * (shape.context - 1) * key / (machine.tensor_gbps * GB)
            self.forward[op.CORE] = max(flash / FLASH_FORWARD, ring)
            self.backward[op.CORE] = max(2.5 * flash / FLASH_BACKWARD, 2 * ring)
        else:
            scores = self.move(6 * layer_bytes(shape, split)[op.CORE])
            self.forward[op.CORE], self.backward[op.CORE] = 2 * flash + scores, 4 * flash + 2 * scores

    def product(self, inner: int, width: int) -> float:
        """A matrix product of all tokens, its weight split over the tensor-parallel ranks."""
        return 2 * self.shape.tokens * inner * width / self.split.tensor / (self.machine.tflops * 1e12)

    def move(self, nbytes: float) -> float:
        return nbytes / (self.machine.memory_gbps * GB)


def layer_class(shape: Shape, split: Degrees, machine: Machine) -> LayerClass:
    """One decoder layer."""
    times, sizes = Times(shape, split, machine), layer_bytes(shape, split)
    stream = stream_bytes(shape, split)
    dense = [one for one in op.DENSE if not (shape.flash and op.within(one.path, op.CORE))]
    paths = [one.path for one in dense]
    seconds = [(name, times.forward.get(name, 0.0), times.backward.get(name, 0.0)) for name in ("", *paths)]
    operators = [PlannedOperator(name=name, forward_seconds=f, backward_seconds=b) for name, f, b in seconds]
    given = Group(
        name=op.INPUT, bytes=sizes[op.INPUT], operators=(op.MLP_ADD,), used_by=(op.INPUT_NORM,), from_previous=True
    )
    groups = [given] if given.bytes else []
    for one in dense:
        size = sizes.get(one.path, 0)
        if not size:
            continue
        also, keeps = one.with_it, 0
        needs = tuple(other for other in one.starts_from if sizes[other])
        if one.path == op.ACTIVATION and not sizes[op.FC1]:  # nothing keeps what the activation function starts from
            also, needs = (op.FC1,), (op.MLP_NORM,)
        elif one.path in (op.INPUT_NORM, op.MLP_NORM) and not needs:
            keeps = stream
        groups.append(
            Group(
                name=one.path,
                bytes=size,
                operators=(one.path,),
                used_by=one.used_by,
                recompute_seconds=sum(times.forward.get(other, 0.0) for other in (*also, one.path)),
                recompute_keeps=keeps,
                recompute_operators=(*also, one.path) if also else (),
                needs=needs,
            )
        )
    return LayerClass(name=LAYER, operators=tuple(operators), groups=tuple(groups), input_bytes=stream)


def problem(shape: Shape, split: Degrees, machine: Machine) -> Problem:
    """The whole model: equal numbers of layers in all parts, the embedding in the first, head and loss in the last."""
    times, layer = Times(shape, split, machine), layer_class(shape, split, machine)
    return Problem(
        classes=(layer,),
        stages=tuple(_stage(number, shape, split, times, layer) for number in range(split.pipeline)),
        pipeline=Pipeline(micro_batches=split.micro_batches),
        link=Link(out=machine.link_gbps, back=machine.link_gbps),
        device_limit=machine.memory_bytes,
        host_limit=machine.host_bytes,
    )


def _stage(number: int, shape: Shape, split: Degrees, times: Times, layer: LayerClass) -> Stage:
    first, last = number == 0, number == split.pipeline - 1
    parts = split.pipeline * split.virtual
    each = shape.num_layers // parts
    logits = shape.tokens * shape.vocab_size // split.tensor
    stream = stream_bytes(shape, split)
    product = times.product(shape.hidden_size, shape.vocab_size)
    pointwise = times.move(3 * 4 * logits)
    mask = mask_bytes(shape, split)  # of the last layer's end, and of the embedding
    head = Outside(
        forward_seconds=product + pointwise,
        backward_seconds=2 * product + pointwise,
        bytes=(4 + ELEMENT) * logits + norm_bytes(shape, split) + layer_bytes(shape, split)[op.INPUT],
    )
    made = tuple(
        Part(
            layers=(layer.name,) * each,
            first_layer=(part * split.pipeline + number) * each,
            before=Outside(bytes=stream + mask * (first and part == 0)),
            after=head if last and part == split.virtual - 1 else Outside(bytes=mask),
        )
        for part in range(split.virtual)
    )
    embeddings = first + (last and (shape.untied or split.pipeline > 1))
    parameters = (
        shape.layer_parameters * each * split.virtual + embeddings * shape.embedding_parameters
    ) // split.tensor
    gradients = 2 * shape.tokens * shape.fc1_width * ELEMENT // split.tensor + stream
    travelling = 4 * shape.tokens * shape.key_width * ELEMENT // split.tensor * (shape.context > 1)  # keys and values
    return Stage(
        parts=made,
        static_bytes=round(parameters * split.bytes_per_parameter),
        temporary_bytes=max(gradients, travelling, ELEMENT * logits if last else 0),
        step_seconds=times.move(parameters * (split.bytes_per_parameter + 12)),
    )

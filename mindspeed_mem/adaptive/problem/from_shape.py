"""A planning problem from a model's shape alone: bytes by formula, seconds from FLOPs and bytes moved.

What tokens travel to experts and back takes is that of collectives; a latent attention is one operator, as nobody can
name its parts without each other.

Seconds are estimates. A matrix product takes its FLOPs at `Machine.tflops`, a flash attention its causal FLOPs at 0.7
of that forward and 2.5 times as many at 0.6 backward (what flash attention reaches on an H200 against 700 TFLOP/s of
matrix products), other operators what they read and write at `Machine.memory_gbps`, collectives what each rank
receives at `Machine.tensor_gbps`. A backward is twice its forward. Left out: launch gaps, copies slowing compute down,
data-parallel traffic that is not hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
from mindspeed_mem.adaptive.problem.layer_bytes import (
    layer_bytes,
    mask_bytes,
    mtp_bytes,
    norm_bytes,
    received,
    stream_bytes,
)
from mindspeed_mem.adaptive.problem.layer_operators import KEPT, SENT, operators
from mindspeed_mem.adaptive.problem.shape import ELEMENT, Degrees, Machine, Shape
from mindspeed_mem.plan import operators as op

FLASH_FORWARD, FLASH_BACKWARD = 0.7, 0.6
_STARTS = {
    op.ACTIVATION: (op.FC1, op.MLP_NORM),
    op.EXPERT_ACTIVATION: (op.EXPERT_FC1, op.DISPATCH),
    op.SHARED_ACTIVATION: (op.SHARED_FC1, op.MLP_NORM),
}
"""The linear before each activation function, and what that starts from."""
LAYER = "layer"
PREDICTION = "mtp"
"""What a layer of multi-token prediction has around a decoder's."""


class Times:
    """Seconds of one layer's operators, forward and backward, for one micro-batch on one rank."""

    def __init__(self, shape: Shape, split: Degrees, machine: Machine, experts: bool = False):
        self.shape, self.split, self.machine = shape, split, machine
        tokens, tensor = shape.tokens, split.tensor
        stream = stream_bytes(shape, split)
        query, key = (tokens * width * ELEMENT / tensor for width in (shape.query_width, shape.key_width))
        self.ahead, self.after = self._gathers()
        moved = {
            op.INPUT_NORM: 2 * stream,
            op.ROTARY: 2 * (query + key) * shape.rope,
            op.ATTENTION_ADD: 3 * stream,
            op.MLP_NORM: 2 * stream,
            op.MLP_ADD: 3 * stream,
            op.Q_NORM: 2 * query * shape.qk_layernorm,
            op.K_NORM: 2 * key * shape.qk_layernorm,
        }
        self.forward = {name: self.move(size) for name, size in moved.items()}
        self.backward = {name: 2 * seconds for name, seconds in self.forward.items()}
        if shape.kv_lora_rank:
            self._latent()
        else:
            self._linear(op.QKV, shape.hidden_size, shape.query_width + 2 * shape.key_width, begins=True)
            self._linear(op.PROJ, shape.query_width, shape.hidden_size)
            self._core(op.CORE, shape.query_width, shape.query_width, key)
        if experts:
            self._experts()
        else:
            self._mlp(op.FC1, op.ACTIVATION, op.FC2, shape.ffn_hidden_size)
        if shape.te:  # norms are part of the linears after them
            for name, linear in ((op.INPUT_NORM, op.QKV), (op.MLP_NORM, op.FC1)):
                if linear in self.forward:
                    self.forward[linear] += self.forward.pop(name)
                    self.backward[linear] += self.backward.pop(name)

    def _gathers(self) -> tuple[float, float]:
        """Seconds of collectives before a product and after one: gathered and scattered, or only reduced."""
        tensor = self.split.tensor
        gather = self.shape.tokens * self.shape.hidden_size * ELEMENT * (tensor - 1) / tensor
        gather /= self.machine.tensor_gbps * GB
        return (gather, gather) if self.split.sequence_parallel else (0.0, 2 * gather)

    def _linear(self, name: str, inner: int, width: int, begins: bool = False) -> None:
        """A product whose weight is split. What it is given is gathered once more backward if it `begins` a block."""
        seconds = self.product(inner, width)
        self.forward[name] = seconds + (self.ahead if begins else self.after)
        self.backward[name] = 2 * seconds + (self.after if begins else 0.0) + self.ahead

    def _core(self, name: str, query_width: int, value_width: int, key_bytes: float) -> None:
        """Attention itself: two products, of which causality halves each, or a window takes more away."""
        shape, tensor = self.shape, self.split.tensor
        seen = min(shape.window or shape.seq_length, shape.seq_length)
        share = seen * (1 - seen / (2 * shape.seq_length))  # tokens that one attends to, on average
        flops = 2 * shape.tokens * share * (query_width + value_width) / tensor
        flash = flops / (self.machine.tflops * 1e12)
        if shape.flash:
            # Context-parallel ranks hand keys and values round while they compute; backward, their gradients too.
            ring = 2 * (shape.context - 1) * key_bytes / (self.machine.tensor_gbps * GB)
            times = max(flash / FLASH_FORWARD, ring), max(2.5 * flash / FLASH_BACKWARD, 2 * ring)
        else:
            scores = self.move(6 * layer_bytes(shape, self.split)[op.CORE])
            times = 2 * flash + scores, 4 * flash + 2 * scores
        self.forward[name] = self.forward.get(name, 0.0) + times[0]
        self.backward[name] = self.backward.get(name, 0.0) + times[1]

    def _latent(self) -> None:
        shape, heads, ranks = self.shape, self.shape.num_attention_heads, self.split.tensor
        positions, latent = shape.qk_pos_emb_head_dim, shape.kv_lora_rank
        values, query = heads * shape.v_head_dim, shape.latent_query_width
        whole = shape.hidden_size * (latent + positions + shape.q_lora_rank)
        alike = ranks if shape.te and not self.split.sequence_parallel else 1  # all compute the same
        divided = (shape.q_lora_rank or shape.hidden_size) * query + latent * (heads * shape.qk_head_dim + values)
        moved = 2 * shape.tokens * (2 * query + values) * ELEMENT / ranks
        seconds = self.product(whole, alike) + self.product(divided, 1) + self.move(moved)
        self.forward[op.ATTENTION] = seconds + self.ahead
        self.backward[op.ATTENTION] = 2 * seconds + self.after + self.ahead
        self._linear(op.PROJ, values, shape.hidden_size)
        self._core(op.ATTENTION, query, values, shape.tokens * (query + values) / 2 * ELEMENT / ranks)

    def _mlp(self, fc1: str, activation: str, fc2: str, width: int) -> None:
        shape = self.shape
        self._linear(fc1, shape.hidden_size, width * shape.gates, begins=True)
        self._linear(fc2, width, shape.hidden_size)
        self._pointwise(activation, shape.tokens * width / self.split.tensor)

    def _pointwise(self, name: str, inner: float) -> None:
        self.forward[name] = self.move(inner * (self.shape.gates + 1) * ELEMENT)
        self.backward[name] = 2 * self.forward[name]

    def _experts(self) -> None:
        """Tokens go to their experts' ranks and back; router and moves by memory, products as any others."""
        shape, ranks = self.shape, self.split.experts_split
        rows = received(shape, self.split)
        sent = rows * shape.hidden_size * ELEMENT
        over = sent * (1 - 1 / (self.split.expert * ranks)) / (self.machine.tensor_gbps * GB)
        each = 2 * rows * shape.moe_ffn_hidden_size * shape.hidden_size / ranks / (self.machine.tflops * 1e12)
        times = {
            op.ROUTER: self.product(shape.hidden_size, shape.num_experts),
            op.DISPATCH: self.move(4 * sent) + over,
            op.EXPERT_FC1: each * shape.gates,
            op.ROUTED: each + self.move(4 * sent) + over,
        }
        self.forward |= times
        self.backward |= {name: seconds * (1 if name == op.DISPATCH else 2) for name, seconds in times.items()}
        self._pointwise(op.EXPERT_ACTIVATION, rows * shape.moe_ffn_hidden_size / ranks)
        if shape.shared_expert_size:
            self._mlp(op.SHARED_FC1, op.SHARED_ACTIVATION, op.SHARED_FC2, shape.shared_expert_size)

    def product(self, inner: int, width: int) -> float:
        """A matrix product of all tokens, its weight split over the tensor-parallel ranks."""
        return 2 * self.shape.tokens * inner * width / self.split.tensor / (self.machine.tflops * 1e12)

    def move(self, nbytes: float) -> float:
        return nbytes / (self.machine.memory_gbps * GB)


def layer_class(shape: Shape, split: Degrees, machine: Machine, experts: bool = False) -> LayerClass:
    """One decoder layer; `experts`: one that has some."""
    times, sizes = Times(shape, split, machine, experts), layer_bytes(shape, split, experts)
    stream = stream_bytes(shape, split)
    listed = operators(shape, experts)
    paths = [one.path for one in listed]
    seconds = [(name, times.forward.get(name, 0.0), times.backward.get(name, 0.0)) for name in ("", *paths)]
    planned = [PlannedOperator(name=name, forward_seconds=f, backward_seconds=b) for name, f, b in seconds]
    for name in [name for name in sizes if name not in paths and name != op.INPUT]:  # one with an operator around it
        around = next((path for path in paths if op.within(name, path)), None)
        if around is not None:
            sizes[around] = sizes.get(around, 0) + sizes.pop(name)
    first = op.INPUT_NORM if op.INPUT_NORM in paths else op.QKV
    given = Group(name=op.INPUT, bytes=sizes[op.INPUT], operators=(op.MLP_ADD,), used_by=(first,), from_previous=True)
    groups = [given] if given.bytes else []
    for one in listed:
        size = sizes.get(one.path, 0)
        if not size:
            continue
        also, keeps = one.with_it, 0
        needs = tuple(other for other in one.starts_from if sizes.get(other))
        if (
            one.path in _STARTS and shape.bias and not (shape.fused or shape.swiglu)
        ):  # nothing keeps what it starts from
            linear, before = _STARTS[one.path]
            also, needs = (linear,), (before if before in paths else op.ATTENTION_ADD,)
        elif one.path in (op.INPUT_NORM, op.MLP_NORM) and not needs:
            keeps = stream
        again = sum(times.forward.get(other, 0.0) for other in (*also, one.path))
        can = one.path not in (*KEPT, *SENT)
        groups.append(
            Group(
                name=one.path,
                bytes=size,
                operators=(one.path,),
                used_by=one.used_by or (one.path,),
                recompute_seconds=again if can else None,
                recompute_keeps=keeps,
                recompute_operators=(*also, one.path) if also else (),
                needs=needs if can else (),
                swappable=one.path not in KEPT,
            )
        )
    name = f"{LAYER} with experts" if experts else LAYER
    return LayerClass(name=name, operators=tuple(planned), groups=tuple(groups), input_bytes=stream)


def prediction_class(kind: LayerClass, shape: Shape, split: Degrees, times: Times) -> LayerClass:
    """One layer of multi-token prediction: a decoder layer (`kind`), with what is around it kept, as nobody is able to
    name it alone."""
    stream = stream_bytes(shape, split)
    project = times.product(2 * shape.hidden_size, shape.hidden_size) + times.move(10 * stream)
    around = PlannedOperator(name=PREDICTION, forward_seconds=project, backward_seconds=2 * project)
    kept = Group(
        name=PREDICTION,
        bytes=mtp_bytes(shape, split),
        operators=(PREDICTION,),
        used_by=(PREDICTION,),
        swappable=False,
    )
    return LayerClass(
        name=f"{kind.name} of multi-token prediction",
        operators=(kind.operators[0], around, *kind.operators[1:]),
        groups=(kept, *(_without(one, op.INPUT) for one in kind.groups if one.name != op.INPUT)),
        input_bytes=kind.input_bytes,
    )


def _without(group: Group, name: str) -> Group:
    return dataclasses.replace(group, needs=tuple(one for one in group.needs if one != name))


def problem(shape: Shape, split: Degrees, machine: Machine) -> Problem:
    """The whole model: the embedding in the first part, head and loss in the last."""
    times = Times(shape, split, machine)
    kinds = [shape.has_experts(layer) for layer in range(shape.num_layers + shape.mtp_num_layers)]
    of_kind = {experts: layer_class(shape, split, machine, experts) for experts in sorted(set(kinds))}
    layers = [of_kind[experts] for experts in kinds[: shape.num_layers]]
    ahead = [prediction_class(of_kind[kinds[-1]], shape, split, times)] * shape.mtp_num_layers
    return Problem(
        classes=tuple({one.name: one for one in (*layers, *ahead)}.values()),
        stages=tuple(_stage(number, shape, split, times, layers, ahead) for number in range(split.pipeline)),
        pipeline=Pipeline(micro_batches=split.micro_batches),
        link=Link(out=machine.link_gbps, back=machine.link_gbps),
        device_limit=machine.memory_bytes,
        host_limit=machine.host_bytes,
    )


def _stage(
    number: int,
    shape: Shape,
    split: Degrees,
    times: Times,
    layers: Sequence[LayerClass],
    ahead: Sequence[LayerClass],
) -> Stage:
    first, last = number == 0, number == split.pipeline - 1
    logits = shape.tokens * shape.vocab_size // split.tensor
    stream = stream_bytes(shape, split)
    product = times.product(shape.hidden_size, shape.vocab_size)
    pointwise = times.move(3 * 4 * logits)
    mask = mask_bytes(shape, split)  # of the last layer's end, and of the embedding
    handed = layer_bytes(shape, split)[op.INPUT]
    heads = 1 + len(ahead)
    head = Outside(
        forward_seconds=heads * (product + pointwise),
        backward_seconds=heads * (2 * product + pointwise),
        bytes=heads * (4 + ELEMENT) * logits + norm_bytes(shape, split) + handed + len(ahead) * stream,
    )
    of_parts = split.parts(shape.num_layers)[number :: split.pipeline]
    mine = [layer for part in of_parts for layer in part]
    made = []
    for part, those in enumerate(of_parts):
        ends = last and part == split.virtual - 1
        names = [one.name for one in (*layers[those.start : those.stop], *(ahead if ends else ()))]
        made.append(
            Part(
                layers=tuple(names),
                first_layer=those.start,
                before=Outside(bytes=stream + mask * (first and part == 0)),
                after=head if ends else Outside(bytes=mask),
            )
        )
    mine += [*range(shape.num_layers, shape.num_layers + len(ahead))] * last
    parameters, routed = _parameters(mine, shape, split, first, last)
    state = parameters * split.bytes_per_parameter + routed * split.bytes_on(split.expert_data)
    copies = 2 * (parameters + routed) * (shape.fp8 and not shape.fp8_params)  # for products forward and backward
    rows, width = shape.tokens // split.tensor, shape.fc1_width
    if any(map(shape.has_experts, mine)):
        rows, width = received(shape, split) // split.experts_split, shape.moe_ffn_hidden_size * shape.gates
    gradients = 2 * rows * width * ELEMENT + stream
    keys = 2 * shape.key_width
    if shape.kv_lora_rank:
        keys = shape.latent_query_width + shape.num_attention_heads * shape.v_head_dim
    travelling = 2 * shape.tokens * keys * ELEMENT // split.tensor * (shape.context > 1)  # keys and values
    # With parameters in chunks those of a layer are whole, and the next ones meanwhile.
    largest = max(sum(shape.parameters(split, shape.has_experts(layer))) for layer in mine)
    gathered = 2 * largest * ELEMENT * (split.chunk_zero_stage == 3)
    return Stage(
        parts=tuple(made),
        static_bytes=round(state + copies),
        temporary_bytes=max(gradients, travelling, ELEMENT * logits if last else 0) + gathered,
        step_seconds=times.move(state + (parameters + routed) * split.state_bytes),
    )


def _parameters(layers: Sequence[int], shape: Shape, split: Degrees, first: bool, last: bool) -> tuple[int, int]:
    """Of one rank with these layers: without experts, and those."""
    dense, routed = 0, 0
    for layer in layers:
        own, experts = shape.parameters(split, shape.has_experts(layer))
        dense, routed = dense + own, routed + experts
    norm = shape.hidden_size * (2 if shape.normalization == "LayerNorm" else 1)
    tables = int(first)
    if last:
        dense += norm + shape.mtp_num_layers * (2 * shape.hidden_size**2 + 3 * norm)
        tables += shape.untied or split.pipeline > 1
        # Who predicts ahead looks words up once more.
        tables += bool(shape.mtp_num_layers) and shape.untied and split.pipeline > 1
    return dense + tables * shape.embedding_parameters // split.tensor, routed

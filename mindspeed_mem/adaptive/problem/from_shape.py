"""A planning problem from a model's shape alone: bytes by formula, seconds from FLOPs and bytes moved.

What tokens travel to experts and back takes is that of collectives; a latent attention is one operator, as nobody can
name its parts without each other.

Seconds are estimates. A matrix product takes its FLOPs at `Machine.tflops`, a flash attention its causal FLOPs at 0.7
of that forward and 2.5 times as many at 0.6 backward (what flash attention reaches on an H200 against 700 TFLOP/s of
matrix products), other operators what they read and write at `Machine.memory_gbps`, collectives what each rank
receives at `Machine.tensor_gbps`, or what `Machine.network` says, which adds what travels between pipeline stages and
data-parallel ranks (traffic.py). A backward is twice its forward. Left out: launch gaps, copies slowing compute down.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from mindspeed_mem.activation.observe.rank_profile import Outside
from mindspeed_mem.adaptive.problem import traffic
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
    copies_values,
    gathered_bytes,
    layer_bytes,
    mask_bytes,
    mtp_bytes,
    norm_bytes,
    products_bytes,
    received,
    stream_bytes,
    temporary_bytes,
    waiting_bytes,
)
from mindspeed_mem.adaptive.problem.layer_operators import KEPT, SENT, operators
from mindspeed_mem.adaptive.problem.shape import ELEMENT, Degrees, Machine, Shape
from mindspeed_mem.plan import operators as op
from mindspeed_mem.schedule import Placement

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
        self.weight: dict[str, float] = {}
        """Of each linear's backward, what the gradient of its weight takes, with the gather that comes before it, if
        that is not in the backward as in TransformerEngine's."""
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
        gather = self.travel(gather, self.machine.tensor_gbps, tensor - 1)
        return (gather, gather) if self.split.sequence_parallel else (0.0, 2 * gather)

    def _linear(self, name: str, inner: int, width: int, begins: bool = False) -> None:
        """A product whose weight is split. What it is given is gathered once more backward if it `begins` a block."""
        seconds = self.product(inner, width, by_columns=begins)
        self.forward[name] = seconds + (self.ahead if begins else self.after)
        self.backward[name] = 2 * seconds + (self.after if begins else 0.0) + self.ahead
        self.weight[name] = seconds + (self.ahead if begins and not self.shape.te else 0.0)

    def _core(self, name: str, query_width: int, value_width: int, key_bytes: float) -> None:
        """Attention itself: two products, of which causality halves each, or a window takes more away."""
        shape, tensor = self.shape, self.split.tensor
        seen = min(shape.window or shape.seq_length, shape.seq_length)
        share = seen * (1 - seen / (2 * shape.seq_length))  # tokens that one attends to, on average
        flops = 2 * shape.tokens * share * (query_width + value_width) / tensor
        self.attention = flash = flops / (self.machine.tflops * 1e12)
        if shape.flash:
            # Context-parallel ranks hand keys and values round while they compute; backward, their gradients too.
            handed = 2 * (shape.context - 1) * key_bytes
            network = self.machine.network
            gbps = self.machine.tensor_gbps if network is None else network.context_gbps
            ring = self.travel(handed, gbps, shape.context - 1)
            # What each piece of the sequence returns is written, and all are put together.
            pieces = self.move(2 * shape.context * shape.tokens * value_width * ELEMENT / tensor) * (shape.context > 1)
            of_flash = flash / FLASH_FORWARD, 2.5 * flash / FLASH_BACKWARD
            handed_on = (max(0.0, ring - of_flash[0]), max(0.0, 2 * ring - of_flash[1]))
            if network is not None:
                handed_on = network.beside(ring, of_flash[0]), network.beside(2 * ring, of_flash[1])
            times = of_flash[0] + handed_on[0] + pieces, of_flash[1] + handed_on[1] + pieces
        else:
            kept, plain = (
                layer_bytes(one, self.split)[op.CORE]
                for one in (shape, dataclasses.replace(shape, attention_dropout=False))
            )
            # Of each score and its gradient products and the softmax read or write 4 and 7 times what is kept of it;
            # dropout reads, writes and masks it once more each way.
            dropped = self.move((kept - plain) * 5 / 3)
            times = 2 * flash + self.move(4 * plain) + dropped, 4 * flash + self.move(7 * plain) + dropped
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
        products = self.product(whole, alike) + self.product(divided, 1)
        self.weight[op.ATTENTION] = products + self.ahead
        seconds = products + self.move(moved)
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
        network, others = self.machine.network, self.split.expert * ranks - 1
        gbps = self.machine.tensor_gbps if network is None else network.expert_gbps
        over = self.travel(sent * others / (others + 1), gbps, others)
        each = 2 * rows * shape.moe_ffn_hidden_size * shape.hidden_size / ranks / (self.machine.tflops * 1e12)
        times = {
            op.ROUTER: self.product(shape.hidden_size, shape.num_experts),
            op.DISPATCH: self.move(4 * sent) + over,
            op.EXPERT_FC1: each * shape.gates,
            op.ROUTED: each + self.move(4 * sent) + over,
        }
        self.forward |= times
        self.weight |= {op.EXPERT_FC1: times[op.EXPERT_FC1], op.ROUTED: each}
        self.backward |= {name: seconds * (1 if name == op.DISPATCH else 2) for name, seconds in times.items()}
        self._pointwise(op.EXPERT_ACTIVATION, rows * shape.moe_ffn_hidden_size / ranks)
        if shape.shared_expert_size:
            self._mlp(op.SHARED_FC1, op.SHARED_ACTIVATION, op.SHARED_FC2, shape.shared_expert_size)

    def product(self, inner: int, width: int, by_columns: bool = True) -> float:
        """A matrix product of all tokens, its weight split over the tensor-parallel ranks, by columns or by rows."""
        tokens, tensor = self.shape.tokens, self.split.tensor
        seconds = 2 * tokens * inner * width / tensor / (self.machine.tflops * 1e12)
        if self.machine.operand_share:
            whole, divided = (inner, width) if by_columns else (width, inner)
            moved = tokens * whole + (tokens + whole) * divided / tensor
            seconds += self.machine.operand_share * self.move(moved * ELEMENT)
        return seconds

    def move(self, nbytes: float) -> float:
        return nbytes / (self.machine.memory_gbps * GB)

    def travel(self, nbytes: float, gbps: float, messages: int = 1) -> float:
        """Bytes that a rank receives, in so many messages after each other."""
        latency = 0.0 if self.machine.network is None else self.machine.network.latency_seconds
        return nbytes / (gbps * GB) + messages * latency * (gbps < math.inf)


def forward_flops(shape: Shape) -> float:
    """Of one micro-batch's forward: products, and of attention what is before each token; as Megatron counts them."""
    ideal = Machine(memory_bytes=0, tflops=1e-12, memory_gbps=math.inf, tensor_gbps=math.inf)
    shape = dataclasses.replace(shape, context=1, imbalance=1.0, flash=True)
    of_kind = {
        experts: Times(shape, Degrees(), ideal, experts) for experts in (False, True)[: 1 + bool(shape.num_experts)]
    }
    each = {
        experts: sum(times.forward.values()) - times.attention * (1 / FLASH_FORWARD - 1)
        for experts, times in of_kind.items()
    }
    ahead = shape.mtp_num_layers
    head = (1 + ahead) * of_kind[False].product(shape.hidden_size, shape.vocab_size)
    head += ahead * of_kind[False].product(2 * shape.hidden_size, shape.hidden_size)
    return head + sum(each[shape.has_experts(layer)] for layer in range(shape.num_layers + ahead))


def layer_class(shape: Shape, split: Degrees, machine: Machine, experts: bool = False) -> LayerClass:
    """One decoder layer; `experts`: one that has some."""
    times, sizes = Times(shape, split, machine, experts), layer_bytes(shape, split, experts)
    stream = stream_bytes(shape, split)
    listed = operators(shape, experts)
    paths = [one.path for one in listed]
    chunks = traffic.of_chunks(
        shape.parameters(split, experts), sum(times.forward.values()), sum(times.backward.values()), split, machine
    )
    times.forward[""], times.backward[""] = chunks
    seconds = [(name, times.forward.get(name, 0.0), times.backward.get(name, 0.0)) for name in ("", *paths)]
    waits = waiting_bytes(shape, split, experts)
    usual, temporary = temporary_bytes(shape, split, experts)
    planned = [
        PlannedOperator(
            name=name,
            forward_seconds=f,
            backward_seconds=b,
            forward_temporary_bytes=temporary.get(name, usual).forward,
            backward_temporary_bytes=temporary.get(name, usual).backward,
            weight_seconds=times.weight.get(name, 0.0) if name in waits.of_operators else 0.0,
            weight_bytes=waits.of_operators.get(name, 0),
            gradient_bytes=0 if shape.te else waits.of_operators.get(name, 0),
        )
        for name, f, b in seconds
    ]
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
        elif one.path in (op.ROTARY, op.CORE) and copies_values(shape):
            keeps = products_bytes(shape, split)
        again = sum(times.forward.get(other, 0.0) for other in (*also, one.path))
        can = one.path not in (*KEPT, *SENT) and keeps <= size
        groups.append(
            Group(
                name=one.path,
                bytes=size,
                operators=(one.path,),
                used_by=one.used_by or (one.path,),
                recompute_seconds=again if can else None,
                recompute_keeps=keeps * can,
                recompute_temporary_bytes=temporary.get(one.path, usual).forward * can,
                recompute_operators=(*also, one.path) if also else (),
                needs=needs if can else (),
                swappable=one.path not in KEPT,
                weight_bytes=min(size, waits.of_groups.get(one.path, 0)),
                weights_only=one.path in waits.weights_only,
            )
        )
    name = f"{LAYER} with experts" if experts else LAYER
    return LayerClass(name=name, operators=tuple(planned), groups=tuple(groups), input_bytes=stream)


def prediction_class(kind: LayerClass, shape: Shape, split: Degrees, times: Times) -> LayerClass:
    """One layer of multi-token prediction: a decoder layer (`kind`), with what is around it kept, as nobody is able to
    name it alone."""
    stream = stream_bytes(shape, split)
    project = times.product(2 * shape.hidden_size, shape.hidden_size) + times.move(10 * stream)
    around = PlannedOperator(
        name=PREDICTION,
        forward_seconds=project,
        backward_seconds=2 * project,
        forward_temporary_bytes=kind.operators[0].forward_temporary_bytes,
        backward_temporary_bytes=kind.operators[0].backward_temporary_bytes,
        weight_seconds=times.product(2 * shape.hidden_size, shape.hidden_size),
        weight_bytes=shape.tokens * shape.hidden_size * ELEMENT,
        gradient_bytes=0 if shape.te else shape.tokens * shape.hidden_size * ELEMENT,
    )
    kept = Group(
        name=PREDICTION,
        bytes=mtp_bytes(shape, split),
        operators=(PREDICTION,),
        used_by=(PREDICTION,),
        swappable=False,
        weight_bytes=2 * stream,
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
    ahead = [prediction_class(of_kind[kinds[-1]], shape, split, times) for _ in range(shape.mtp_num_layers)]
    each = {experts: shape.parameters(split, experts) for experts in of_kind}
    sizes = [each[experts] for experts in kinds]
    send, waits = traffic.send_seconds(shape, split, machine), traffic.waits_for_sends(split, machine)
    return Problem(
        classes=tuple({one.name: one for one in (*layers, *ahead)}.values()),
        stages=tuple(_stage(number, shape, split, times, layers, ahead, sizes) for number in range(split.pipeline)),
        pipeline=Pipeline(
            micro_batches=split.micro_batches,
            send_seconds=0.0 if waits else send,
            schedule=split.schedule,
            cap=split.cap,
            split_backward=split.split_backward,
        ),
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
    sizes: Sequence[tuple[int, int]],
) -> Stage:
    """sizes: parameters of each layer on a rank, without experts and of those."""
    placement = Placement(split.pipeline, split.virtual, split.schedule == "v")
    places = [placement.part(number, chunk) for chunk in range(split.virtual)]
    first, last = 0 in places, placement.parts - 1 in places
    logits = shape.tokens * shape.vocab_size // split.tensor
    stream = stream_bytes(shape, split)
    product = times.product(shape.hidden_size, shape.vocab_size)
    pointwise = times.move(3 * 4 * logits)
    mask = mask_bytes(shape, split)  # of the last layer's end, and of the embedding
    handed = layer_bytes(shape, split)[op.INPUT]
    whole = gathered_bytes(shape, split)
    heads = 1 + len(ahead)
    # With several tokens to predict the output layer's weight is used several times: it takes its gradients at once.
    later = heads == 1
    head = Outside(
        weight_seconds=product * later,
        weight_bytes=(ELEMENT * logits + stream) * later,
        gradient_bytes=ELEMENT * logits * later,
        forward_seconds=heads * (product + pointwise),
        backward_seconds=heads * (2 * product + pointwise),
        forward_temporary_bytes=whole,
        backward_temporary_bytes=whole,
        bytes=heads * (4 + ELEMENT) * logits + norm_bytes(shape, split) + handed + len(ahead) * stream,
    )
    send = traffic.send_seconds(shape, split, times.machine) * traffic.waits_for_sends(split, times.machine)
    every = split.parts(shape.num_layers)
    of_parts = [every[place] for place in places]
    mine = [layer for part in of_parts for layer in part]
    made: list[Part] = []
    kinds: dict[str, LayerClass] = {}
    forward = backward = 0.0
    for place, those in zip(places, of_parts, strict=True):
        begins, ends = place == 0, place == placement.parts - 1
        ours = [*layers[those.start : those.stop], *(ahead if ends else ())]
        kinds |= {one.name: one for one in ours}
        forward += sum(one.forward_seconds for one in ours)
        backward += sum(one.backward_seconds for one in ours)
        made.append(
            Part(
                layers=tuple(one.name for one in ours),
                first_layer=those.start,
                before=Outside(
                    forward_seconds=send * (not begins),
                    backward_seconds=send * (not begins),
                    forward_temporary_bytes=2 * stream * begins,
                    bytes=stream + mask * begins,
                ),
                after=head if ends else Outside(bytes=mask),
            )
        )
    mine += [*range(shape.num_layers, shape.num_layers + len(ahead))] * last
    parameters, routed = _parameters([sizes[layer] for layer in mine], shape, split, first, last)
    state = parameters * split.bytes_per_parameter + routed * split.bytes_on(split.expert_data)
    widened = parameters * split.widened_on(split.data * split.context) + routed * split.widened_on(split.expert_data)
    copies = 2 * (parameters + routed) * (shape.fp8 and not shape.fp8_params)  # for products forward and backward
    running: list[PlannedOperator | Outside] = [one for kind in kinds.values() for one in kind.operators]
    running += [end for part in made for end in (part.before, part.after)]
    temporary = max(max(one.forward_temporary_bytes, one.backward_temporary_bytes) for one in running)
    # With parameters in chunks those of a layer are whole, and the next ones meanwhile.
    largest = max(map(sum, {sizes[layer] for layer in mine}))
    gathered = 2 * largest * ELEMENT * (split.chunk_zero_stage == 3)
    step = traffic.step_seconds((parameters, routed), len(mine), forward, backward, split, times.machine)
    return Stage(
        parts=tuple(made),
        static_bytes=round(state + copies),
        temporary_bytes=temporary + gathered,
        operator_temporary_bytes=temporary,
        step_seconds=step,
        step_bytes=round(widened),
    )


def _parameters(
    layers: Sequence[tuple[int, int]], shape: Shape, split: Degrees, first: bool, last: bool
) -> tuple[int, int]:
    """Of one rank with layers of so many: without experts, and those."""
    dense, routed = sum(own for own, _ in layers), sum(experts for _, experts in layers)
    norm = shape.hidden_size * (2 if shape.normalization == "LayerNorm" else 1)
    tables = int(first)
    if last:
        dense += norm + shape.mtp_num_layers * (2 * shape.hidden_size**2 + 3 * norm)
        tables += shape.untied or split.pipeline > 1
        # Who predicts ahead looks words up once more.
        tables += bool(shape.mtp_num_layers) and shape.untied and split.pipeline > 1
    return dense + tables * shape.embedding_parameters // split.tensor, routed

"""Where the time of a planned layout goes, and what it makes of the devices."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from mindspeed_mem.adaptive.layout import closed_form
from mindspeed_mem.adaptive.layout.enumeration import Model
from mindspeed_mem.adaptive.layout.search import LayoutSearch, Planned
from mindspeed_mem.adaptive.problem import from_shape
from mindspeed_mem.adaptive.problem.shape import Machine
from mindspeed_mem.adaptive.search.baselines import keep_all
from mindspeed_mem.adaptive.search.decisions import KEEP, NOTHING, RECOMPUTE, SWAP


class Seconds(NamedTuple):
    """What a step's seconds are for; together they are the step."""

    compute: float
    """Layers and head, once, on the stage that has most to do."""
    bubble: float
    """Waiting while the pipeline fills and empties."""
    tensor: float
    context: float
    expert: float
    pipeline: float
    data: float
    optimizer: float
    recompute: float
    stalls: float
    """Waiting for copies to the host and back."""


class Shares(NamedTuple):
    """Of the bytes that plans decide about, what is done, from 0 to 1."""

    keep: float
    swap: float
    recompute: float


def seconds(one: Planned, search: LayoutSearch) -> Seconds:
    """Each way of ranks to each other is worth what the step would be shorter without it."""
    model, cluster = search.model, search.cluster
    split, shape = one.layout.split(model, cluster.devices), one.layout.shape(model)
    machine = cluster.machine_for(split)

    def takes(machine: Machine) -> float:
        return closed_form.seconds(search.estimate(shape, split, machine))

    total, ways = takes(machine), []
    kept = total
    network = machine.network
    assert network is not None
    for names in (("context_gbps",), ("expert_gbps",), ("pipeline_gbps",), ("data_gbps", "expert_data_gbps"), ()):
        without: dict[str, Any] = dict.fromkeys(names, math.inf)
        network = dataclasses.replace(network, **without)
        machine = dataclasses.replace(machine, network=network, tensor_gbps=machine.tensor_gbps if names else math.inf)
        left = takes(machine)
        ways.append(total - left)
        total = left
    context, expert, pipeline, data, tensor = ways
    problem = search.estimate(shape, split, machine)
    count = problem.pipeline.micro_batches
    compute = count * max(
        sum(closed_form.part_seconds(problem, part) for part in stage.parts) for stage in problem.stages
    )
    optimizer = max(stage.step_seconds for stage in problem.stages)
    if problem.pipeline.apart or split.stage_layers:  # others than all alike in order idle more than the bound says
        idle = keep_all(one.found.problem).seconds - kept
        kept, total = kept + idle, total + idle
    more = one.seconds - kept
    stalls = min(max(one.found.simulated.stalls), more)
    return Seconds(
        compute=compute,
        bubble=total - compute - optimizer,
        tensor=tensor,
        context=context,
        expert=expert,
        pipeline=pipeline,
        data=data,
        optimizer=optimizer,
        recompute=more - stalls,
        stalls=stalls,
    )


def shares(one: Planned) -> Shares:
    """What the plan does with activations, all stages together."""
    problem, plan = one.found.problem, one.found.plan
    total = dict.fromkeys((KEEP, SWAP, RECOMPUTE, NOTHING), 0)
    for stage, decided in zip(problem.stages, plan.stages, strict=True):
        for part, texts in zip(stage.parts, decided.parts, strict=True):
            for name, text in zip(part.layers, texts, strict=True):
                for group, letter in zip(problem.class_of[name].groups, text, strict=True):
                    total[letter] += group.bytes
    whole = max(1, total[KEEP] + total[SWAP] + total[RECOMPUTE])
    return Shares(total[KEEP] / whole, total[SWAP] / whole, total[RECOMPUTE] / whole)


def model_flops(model: Model) -> float:
    """Of a step, as Megatron logs them: three forwards, whatever is recomputed."""
    shape = dataclasses.replace(model.shape, micro_batch_size=1, vocab_size=model.padded(1))
    return 3 * model.batch * from_shape.forward_flops(shape)

"""Planning problems from what is observed of real models, and what plans for them take on the real engine.

Import this where the CPU patches are applied: in functions that `tests.worlds.on_ranks` runs.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation.engine import Engine
from mindspeed_mem.activation.observe.meter import ActivationMeter
from mindspeed_mem.activation.observe.rank_profile import (
    ChunkProfile,
    OperatorProfile,
    Outside,
    RankProfile,
)
from mindspeed_mem.activation.operator_runs import OperatorRuns
from mindspeed_mem.activation.storage.ledger import LEDGER
from mindspeed_mem.adaptive import Plan, StagePlan
from mindspeed_mem.adaptive.problem import from_profile
from mindspeed_mem.adaptive.problem.definition import Pipeline, Problem
from mindspeed_mem.adaptive.search.decisions import is_valid
from mindspeed_mem.device import get_backend
from mindspeed_mem.device.link_speed import LinkSpeed
from mindspeed_mem.plan import load_memory_config
from tests.models import build_gpt, forget_routing, global_parameters
from tests.swap_runs import SWAP, one_forward, patched, swap

LINK = LinkSpeed(out=1.0, back=1.0, out_alone=1.0, back_alone=1.0)


def listed(engine: Engine) -> list[tuple[int, str]]:
    """The operators that start from now on, as (layer, path)."""
    started = []

    class Listed(OperatorRuns):
        __slots__ = ()

        def _start(self, layer: int, path: str, marker: bool) -> None:
            started.append((layer, path))
            super()._start(layer, path, marker)

    engine.operators.__class__ = Listed
    return started


def profile(model: dict[str, Any], layers: int) -> RankProfile:
    """What one forward shows; seconds are made up from FLOPs."""
    with patched(SWAP):
        engine = engines.start(load_memory_config({}), get_backend("cpu"), watch_only=True)
        started = listed(engine)
        try:
            one_pass(engine, model, layers)
        finally:
            engines.stop()
    return rank_profile(engine, started, [range(layers)])


def rank_profile(
    engine: Engine, started: list[tuple[int, str]], layers_of_chunks: list[range], stage: int = 0
) -> RankProfile:
    """What an engine has counted."""
    chunks = []
    for number, layers in enumerate(layers_of_chunks):
        storages, dataflow = engine.observation.census.storages(number), engine.observation.census.dataflow(number)
        flops = {(row["layer"], row["op"]): row["flops"] for row in dataflow["operators"]}
        nodes = [node for node in dict.fromkeys(started) if node[0] in layers]
        seconds = {node: 1e-6 + 1e-12 * flops.get(node, 0) for node in nodes}
        chunks.append(
            ChunkProfile(
                layers=tuple(layers),
                operators=tuple(
                    OperatorProfile(layer=layer, op=op, forward_seconds=time, backward_seconds=2 * time)
                    for (layer, op), time in seconds.items()
                ),
                storages=tuple(storages),
                dataflow=dataflow,
                before=Outside(bytes=sum(row["bytes"] for row in storages if row["layer"] < 0)),
                after=Outside(bytes=sum(row["bytes"] for row in storages if row["layer"] > layers[-1])),
            )
        )
    return RankProfile(
        stage=stage, chunks=tuple(chunks), static_bytes=0, temporary_bytes=0, step_seconds=0.0, link=LINK
    )


def problem_of(model: dict[str, Any], layers: int) -> Problem:
    return from_profile.problem([profile(model, layers)], Pipeline(micro_batches=1), 10**12)


def with_head(problem: Problem, nbytes: int) -> Problem:
    """The same whose head and loss keep so many bytes more."""
    [stage] = problem.stages
    [chunk] = stage.parts
    after = dataclasses.replace(chunk.after, bytes=chunk.after.bytes + nbytes)
    chunk = dataclasses.replace(chunk, after=after)
    return dataclasses.replace(problem, stages=(dataclasses.replace(stage, parts=(chunk,)),))


def random_plan(problem: Problem, chance: random.Random, distance: int, inputs_move: bool) -> Plan:
    """Any letters that can be carried out."""
    [stage] = problem.stages
    [chunk] = stage.parts
    rows = []
    for layer, name in enumerate(chunk.layers):
        kind, text = problem.class_of[name], ""
        for place, group in enumerate(kind.groups):
            rest = "K" * (len(kind.groups) - place - 1)
            letters = ["-"] if group.from_previous and not layer else chance.sample("KSR", 3)
            text += next(one for one in letters if one == "-" or is_valid(kind, text + one + rest, inputs_move))
        rows.append(text)
    return Plan(stages=(StagePlan(parts=(tuple(rows),), distance=distance),), inputs_move=inputs_move)


def single_plans(problem: Problem) -> dict[tuple[str, str], Plan]:
    """For each group and letter that can be carried out a plan that gives it to this group, in all layers."""
    [stage], [kind] = problem.stages, problem.classes
    layers, plans = len(stage.parts[0].layers), {}
    for group in kind.groups:
        for letter in "SR":
            text = "".join(letter if other is group else "K" for other in kind.groups)
            if is_valid(kind, text, False):
                first = "".join("-" if g.from_previous else one for g, one in zip(kind.groups, text, strict=True))
                chunk = (first, *(text,) * (layers - 1))
                plans[group.name, letter] = Plan(stages=(StagePlan(parts=(chunk,)),))
    return plans


def in_early_layers(problem: Problem, distance: int) -> Plan:
    """The largest group swapped in all layers but the last two."""
    [stage], [kind] = problem.stages, problem.classes
    layers = len(stage.parts[0].layers)
    largest = max((group for group in kind.groups if group.swappable), key=lambda group: group.bytes)
    rows = []
    for layer in range(layers):
        texts = ("-" if one.from_previous and not layer else "S" if one is largest else "K" for one in kind.groups)
        rows.append("".join(texts) if layer < layers - 2 else "K" * len(kind.groups))
    return Plan(stages=(StagePlan(parts=(tuple(rows),), distance=distance),))


def one_pass(engine: Engine, model: dict[str, Any], layers: int) -> tuple[int, dict[str, torch.Tensor]]:
    """The most bytes of activations held in one forward and backward of a new model, and its gradients."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    chunks = build_gpt(**model, layers=layers)
    before = LEDGER.held.now
    LEDGER.reset_peak()
    with ActivationMeter(engine.backend):
        loss = one_forward(engine, chunks)
        engine.passes.begin_backward(loss)
        loss.mean().backward()
        engine.passes.end_backward()
    most = LEDGER.held.peak - before
    gradients = {name: parameter.main_grad.clone() for name, parameter in global_parameters(chunks)}
    forget_routing(chunks)
    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # schedules want it in another shape
    return most, gradients


def executed(configs: list[dict[str, Any]], model: dict[str, Any], layers: int) -> tuple[list[int], list[str]]:
    """The most bytes held under each configuration, and which gradients differ from those of the first in any bit."""
    from megatron.core import tensor_parallel

    peaks, differ, first = [], [], None
    for number, config in enumerate(configs):
        tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)  # dropout draws the same masks
        with swap(config) as engine:
            most, gradients = one_pass(engine, model, layers)
        peaks.append(most)
        first = first or gradients
        differ += [f"{number}: {name}" for name in first if not torch.equal(first[name], gradients[name])]
    return peaks, differ

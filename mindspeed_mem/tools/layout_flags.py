"""A layout as Megatron's options, and as a script that trains with them."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

from mindspeed_mem.adaptive.layout import ends
from mindspeed_mem.adaptive.layout.enumeration import Layout, Model
from mindspeed_mem.command_line import flag
from mindspeed_mem.tools import plan_options

SEARCHED = (
    *("tensor_model_parallel_size", "sequence_parallel", "context_parallel_size", "pipeline_model_parallel_size"),
    *("num_layers_per_virtual_pipeline_stage", "pipeline_stages", "expert_model_parallel_size"),
    *("expert_tensor_parallel_size", "micro_batch_size", "data_parallel_size", "use_distributed_optimizer"),
    *("chunk_zero_stage", "placement_policy", "chunk_reduce_each_microbatch"),
)
"""Options of `plan` that a layout decides."""
_OURS = ("expert_imbalance",)
"""Those that Megatron does not know."""


def of_model(given: argparse.Namespace, model: Model) -> list[str]:
    """What is trained, in words: what was said of it, and what Megatron needs to be told besides."""
    words: list[str] = []
    for name in (*plan_options.NUMBERS, *plan_options.SWITCHES, *plan_options.CHOICES, *plan_options.TEXTS):
        value = getattr(given, name)
        if name in (*SEARCHED, *_OURS) or value in (None, False) or (name == "fp8_format" and value == "none"):
            continue
        if name == "num_query_groups" and not given.group_query_attention:
            words.append("--group-query-attention")
        words += [flag(name)] if value is True else [flag(name), str(value)]
    if given.vocab_size is None:
        words += ["--vocab-size", str(model.vocab_size)]
    if given.attention_backend is None:
        words += ["--attention-backend", "flash"]
    half = given.megatron is not None and "--fp16" in shlex.split(given.megatron)
    if half and "--grad-reduce-in-bf16" in words:
        words.remove("--grad-reduce-in-bf16")  # what that stood for: gradients of 2 bytes
    return [
        *words,
        *("--max-position-embeddings", str(model.shape.seq_length)),
        *(("--moe-token-dispatcher-type", "alltoall") if model.shape.num_experts else ()),
        "--fp16" if half else "--bf16",
    ]


def of_layout(layout: Layout, model: Model, devices: int) -> list[str]:
    """How it is split, in words."""
    split = layout.split(model, devices)
    words = ["--tensor-model-parallel-size", str(layout.tensor)]
    words += ["--sequence-parallel"] * split.sequence_parallel
    words += ["--pipeline-model-parallel-size", str(layout.pipeline)]
    if layout.ends != ends.EVEN:
        words += ends.words(model.shape.num_layers, layout.pipeline, layout.virtual, layout.ends)
    elif layout.virtual > 1:
        each = model.shape.num_layers // layout.pipeline // layout.virtual
        words += ["--num-layers-per-virtual-pipeline-stage", str(each)]
    if layout.schedule != "1f1b":
        words += ["--pipeline-schedule", layout.schedule]
    words += ["--context-parallel-size", str(layout.context)]
    if model.shape.num_experts:
        words += ["--expert-model-parallel-size", str(layout.expert)]
        words += ["--expert-tensor-parallel-size", str(layout.expert_tensor)]
    words += ["--micro-batch-size", str(layout.micro_batch)]
    if split.distributed_optimizer:
        words.append("--use-distributed-optimizer")
    if split.data * split.context > 1:
        words += ["--overlap-grad-reduce", "--overlap-param-gather"]
    if layout.zero:
        words += ["--chunk-zero-stage", str(layout.zero)]
        words += ["--chunk-reduce-each-microbatch"] * split.reduce_each
        words += ["--placement-policy", placement(layout)] * (layout.on_device < 1)
    return words


def placement(layout: Layout) -> str:
    """Where its chunks rest."""
    share = 1 - layout.on_device
    return "device" if not share else "host" if share == 1 else f"static:{share:g}"


def needs_us(layout: Layout, plan: str | None) -> bool:
    """Whether Megatron cannot train with it by itself."""
    return bool(layout.zero) or layout.schedule != "1f1b" or plan is not None


def script(
    model: Sequence[str], layout: Sequence[str], *, devices: int, per_node: int, ours: bool, remarks: Sequence[str]
) -> str:
    """A script for bash that trains; its arguments are passed on: data, tokenizer, learning rate, iterations.

    Args:
        model: options in words.
        layout: options in words, with those of the plan.
        devices: of the job.
        per_node: of each node.
        ours: whether it is trained with this package.
        remarks: lines that say what this is.
    """
    nodes = -(-devices // per_node)
    lines = ["#!/usr/bin/env bash", *(f"# {line}".rstrip() for line in remarks), "set -euo pipefail"]
    lines.append(f"LAUNCH=(--nproc-per-node {min(devices, per_node)})")
    if nodes > 1:
        lines.append(
            f'LAUNCH+=(--nnodes {nodes} --node-rank "${{NODE_RANK:?}}" --master-addr "${{MASTER_ADDR:?}}" '
            '--master-port "${MASTER_PORT:-29500}")'
        )
    sizes = dict(zip(layout, [*layout[1:], ""], strict=True))
    if any(sizes.get(name, "1") != "1" for name in ("--tensor-model-parallel-size", "--context-parallel-size")):
        # Megatron wants it on devices before Blackwell; swap would wait in one queue with what is computed on others.
        lines.append("export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}")
    lines += [f"MODEL=({shlex.join(model)})", f"LAYOUT=({shlex.join(layout)})"]
    start = "-m mindspeed_mem run pretrain_gpt.py" if ours else "pretrain_gpt.py"
    lines.append(f'exec torchrun "${{LAUNCH[@]}}" {start} "${{MODEL[@]}}" "${{LAYOUT[@]}}" "$@"')
    return "\n".join(lines) + "\n"

"""THE table of features: what each flag switches on, what it needs, and what it cannot run beside (incompatible.py)."""

from __future__ import annotations

from mindspeed_mem.device import device_names
from mindspeed_mem.features import incompatible
from mindspeed_mem.features.readers import (
    above_zero,
    at_least_one,
    by_pattern,
    layer_list,
    new_file,
    new_folder,
    source,
    step_range,
    whole_numbers,
    zero_stage,
)
from mindspeed_mem.features.rows import Feature
from mindspeed_mem.optimizer_parallel.assignment import MODES
from mindspeed_mem.zero.core.placement import placement

MEMORY_PATCHES = ("activation_*",)
RECOMPUTE_PATCHES = ("recompute_*",)
V_PATCHES = ("pipeline_v",)
"""Of --pipeline-schedule v alone."""

FEATURES = (
    Feature(
        flag="--device",
        choices=("auto", *sorted(device_names())),
        default="auto",
        help="device to train on; auto (default) takes the one that MINDSPEED_MEM_DEVICE names, else the first "
        f"present of {', '.join(device_names())}. With cpu, megatron-core trains on host memory with gloo",
        same_plan="the device that was chosen is compared by itself",
        each_rank=True,
    ),
    Feature(
        flag="--max-inflight-microbatches",
        read=at_least_one,
        metavar="N",
        help="micro-batches (with virtual stages: passes of one chunk) whose activations a pipeline stage may hold; "
        "fewer than the schedule would hold make stages idle longer",
        patches=("pipeline_cap",),
        since="0.14",
        before_that="its passes do not take the number of a virtual stage",
        bars=incompatible.INFLIGHT_CAP,
        same_plan="the cap is compared as part of the shape of a call",
    ),
    Feature(
        flag="--split-backward",
        read=bool,
        default=False,
        help="linear layers compute the gradients of their weights apart from the backward pass; by itself, this only "
        "moves them to right after the backward of the pass",
        patches=("pipeline_split", "pipeline_delayed"),
        since="0.14",
        before_that="its linear layers do not know their process groups",
        bars=incompatible.SPLIT_BACKWARD,
        same_plan="it is compared as part of the shape of a call",
    ),
    Feature(
        flag="--pipeline-schedule",
        choices=("1f1b", "zb", "v"),
        default="1f1b",
        help="1f1b (default): Megatron's own; zb: weight gradients, put off as with --split-backward, are computed "
        "where a pipeline stage would idle, with as many micro-batches in flight as there are stages, or as "
        "--max-inflight-microbatches allows; v: the same with two virtual stages, the second placed in reverse, so "
        "that the first rank has the first and the last part of the model",
        patches=("pipeline_cap", "pipeline_split", "pipeline_delayed"),
        since="0.14",
        before_that="its passes do not take the number of a virtual stage",
        bars=incompatible.ZERO_BUBBLE,
        same_plan="the schedule is compared as part of the shape of a call",
    ),
    Feature(
        flag="--memory-config",
        read=source,
        metavar="FILE",
        help="YAML file naming the layers and operators whose activations are swapped to host memory (swap_config) or "
        "computed again in backward (recompute_config), with MindFormers' field names",
        patches=MEMORY_PATCHES,
        bars=incompatible.MEMORY,
        recompute_bars=incompatible.RECOMPUTE,
        each_rank=True,
    ),
    Feature(
        flag="--recompute-layers",
        read=layer_list,
        metavar="LAYERS",
        help="layers whose forward runs again in backward, counted from 0 over the whole model: 0,3-5 or all; or in "
        "the stacks of a model that has several: encoder:0,decoder:1-3",
        section="recompute",
        patches=(*MEMORY_PATCHES, *RECOMPUTE_PATCHES),
        bars=incompatible.RECOMPUTING,
        each_rank=True,
    ),
    Feature(
        flag="--select-recompute",
        read=by_pattern,
        many=True,
        metavar="PATTERN[=LAYERS]",
        help=r"operators whose forward runs again in backward, with their layers (none named: all), such as "
        r"'mlp=0,3' 'self_attention\.core_attention'",
        section="select_recompute",
        patches=(*MEMORY_PATCHES, *RECOMPUTE_PATCHES),
        bars=incompatible.RECOMPUTING,
        each_rank=True,
    ),
    Feature(
        flag="--select-comm-recompute",
        read=by_pattern,
        many=True,
        metavar="PATTERN[=LAYERS]",
        help=r"the same as --select-recompute, for operators that communicate and the norms that feed them, such as "
        r"'.*\.norm'",
        section="select_comm_recompute",
        patches=(*MEMORY_PATCHES, *RECOMPUTE_PATCHES),
        bars=incompatible.RECOMPUTING,
        each_rank=True,
    ),
    Feature(
        flag="--swap-host-memory-gib",
        read=above_zero,
        metavar="GIB",
        help="host memory that each rank may fill with swapped activations; beyond it an activation stays on the "
        "device (default: no limit)",
        needs_features=("--memory-config", "--survive-oom", "--adaptive-memory-optimization"),
        same_plan="the limit is compared by itself",
        each_rank=True,
    ),
    Feature(
        flag="--device-memory-gib",
        read=above_zero,
        metavar="GIB",
        help="device memory that each rank may use (default: all there is; on cpu, where that is the host's, no limit)",
        needs_features=("--survive-oom", "--adaptive-memory-optimization", "--placement-policy"),
        same_plan="the limit that the device has in the end is compared by itself",
        each_rank=True,
    ),
    Feature(
        flag="--chunk-zero-stage",
        read=zero_stage,
        metavar="STAGE",
        help="what to split over the data-parallel ranks, in chunks: 1 optimizer states, 2 gradients too, 3 parameters "
        "too",
        patches=("chunk_*",),
        since="0.14",
        before_that="its reduction of gradients takes no process groups",
        needs=(incompatible.of_megatron_lm("--use-distributed-optimizer", "its buckets are the chunks"),),
        bars=incompatible.CHUNKS,
    ),
    Feature(
        flag="--placement-policy",
        read=placement,
        metavar="POLICY",
        help="where chunks rest: device (default), host, static:FRACTION (this share of them on the host), or auto (as "
        "much on the device as fits, by a measured step); device:BYTES, host:BYTES and auto:BYTES (2GiB) say how many "
        "bytes of parameters may be gathered at once with stage 3 (default: what one module needs, and the next chunk)",
        needs_features=("--chunk-zero-stage",),
    ),
    Feature(
        flag="--host-optimizer-step",
        choices=("device", "host"),
        help="where the optimizer updates chunks that rest on the host: device (default) copies their states to the "
        "device and keeps its arithmetic; host runs Adam on the host's cores",
        needs_features=("--chunk-zero-stage",),
    ),
    Feature(
        flag="--chunk-reduce-each-microbatch",
        read=bool,
        default=False,
        help="with stages 2 and 3, reduce gradients in every micro-batch, so that only few chunks have whole "
        "gradients at a time; gradients are then summed in another order than Megatron's",
        needs_features=("--chunk-zero-stage",),
    ),
    Feature(
        flag="--chunk-host-memory-gib",
        read=above_zero,
        metavar="GIB",
        help="host memory that the chunks of each rank may take (default: what the host has free)",
        needs_features=("--chunk-zero-stage",),
        each_rank=True,
    ),
    Feature(
        flag="--min-chunk-size-mib",
        read=above_zero,
        metavar="MIB",
        help="smallest chunk size to try, in MiB of bf16 parameters (default: 64; every type counts as 2 bytes per "
        "element)",
        needs_features=("--chunk-zero-stage",),
    ),
    Feature(
        flag="--chunk-search-range-mib",
        read=above_zero,
        metavar="MIB",
        help="how far above the minimum chunk sizes are tried, in MiB (default: 64)",
        needs_features=("--chunk-zero-stage",),
    ),
    Feature(
        flag="--chunk-hidden-dim",
        read=at_least_one,
        metavar="N",
        help="step between the chunk sizes that are tried, in elements (default: the model's hidden size)",
        needs_features=("--chunk-zero-stage",),
    ),
    Feature(
        flag="--survive-oom",
        read=bool,
        default=False,
        help="when device memory runs out in the middle of a step, move activations to the host and go on, whatever "
        "the memory plan says",
        patches=(*MEMORY_PATCHES, "recompute_distributed", "recompute_fused", "recompute_random", "survive_*"),
        bars=incompatible.SURVIVE,
        same_plan="whoever finds a plan survives in any case",
    ),
    Feature(
        flag="--adaptive-memory-optimization",
        read=bool,
        default=False,
        help="survive the first steps as with --survive-oom, profile them, find out what to keep, swap and recompute "
        "for the shortest step that fits the device's memory, and go on with that plan",
        patches=(*MEMORY_PATCHES, *RECOMPUTE_PATCHES, "survive_*", "adaptive_*"),
        bars=incompatible.ADAPTIVE,
        same_plan="without it there is none",
    ),
    Feature(
        flag="--adaptive-plan-file",
        read=new_file,
        metavar="FILE",
        help="file to keep the plan of --adaptive-memory-optimization in; the same job uses it again, and it can be "
        "read and edited as a --memory-config (default: the plan is not kept)",
        needs_features=("--adaptive-memory-optimization",),
        same_plan="where a plan is kept changes nothing about it",
        each_rank=True,
    ),
    Feature(
        flag="--memory-trace",
        read=new_file,
        metavar="FILE",
        help="write a timeline of a few steps for Perfetto or chrome://tracing: trace.json becomes trace.rank0.json "
        "and so on (python -m mindspeed_mem trace merges them); the last step is also written for torch's memory "
        "viewer",
        patches=MEMORY_PATCHES,
        bars=incompatible.MEMORY,
        same_plan="looking on changes nothing",
        each_rank=True,
    ),
    Feature(
        flag="--memory-trace-steps",
        read=step_range,
        metavar="STEPS",
        help="training steps of this run to trace, counted from 1: one, or a range (default: 5-7, and three more once "
        "an adaptive plan is settled on)",
        needs_features=("--memory-trace", "--memory-report"),
        same_plan="looking on changes nothing",
        each_rank=True,
    ),
    Feature(
        flag="--memory-report",
        read=new_folder,
        metavar="DIR",
        help="make a page about the run, DIR/index.html: memory over a step, the plan, copies, the pipeline, "
        "figures and settings; a few steps are traced for it",
        patches=MEMORY_PATCHES,
        bars=incompatible.MEMORY,
        same_plan="looking on changes nothing",
        each_rank=True,
    ),
    Feature(
        flag="--optimizer-parallel",
        choices=MODES,
        help="each data-parallel rank keeps the optimizer states of its part only, updates that part and sends it "
        "to the others: grouping gives each rank whole parameters, sharding a slice of each",
        patches=("optimizer_parallel",),
        bars=incompatible.OPTIMIZER_PARALLEL,
    ),
    Feature(
        flag="--sdpa-attention",
        read=bool,
        default=False,
        help="compute core attention in the local layer spec with torch's scaled_dot_product_attention",
        patches=("sdpa_*",),
        needs=(
            incompatible.of_core(
                "--transformer-impl", "the other layer specs bring their own attention", value="local"
            ),
        ),
    ),
    Feature(
        flag="--pipeline-stages",
        read=whole_numbers,
        metavar="COUNTS",
        help="layers of each pipeline stage, such as 3,5,5,3 (with virtual stages one count for each chunk, in the "
        "model's order), or the stage of each layer, such as 0,0,0,1,1,1,1,1",
        patches=("pipeline_stages",),
        since="0.14",
        before_that="it has no --pipeline-model-parallel-layout",
        bars=incompatible.PIPELINE_STAGES,
    ),
)
ON_HOST = ("cpu_*",)
"""Patches for a device that is the host itself, as shell patterns: they come before all others."""

"""THE table of features: what each flag switches on, what it needs, and what it cannot run beside."""

from __future__ import annotations

from typing import Any

from mindspeed_mem.chunk.placement import placement
from mindspeed_mem.optimizer_parallel.assignment import MODES
from mindspeed_mem.options import (
    Feature,
    Option,
    at_least_one,
    by_pattern,
    gib,
    layer_list,
    new_file,
    source,
    whole_numbers,
    zero_stage,
)
from mindspeed_mem.schedule import settings as schedule
from mindspeed_mem.schedule.stages import describes


def _core(flag: str, why: str, **condition: Any) -> Option:
    return Option(flag=flag, origin="megatron-core", why=why, **condition)


def _lm(flag: str, why: str, **condition: Any) -> Option:
    return Option(flag=flag, origin="megatron-lm", why=why, **condition)


def _ms(flag: str, why: str) -> Option:
    return Option(flag=flag, origin="mindspeed", why=why)


def _made_of_stages(args: Any) -> bool:
    """Whether the layout in `args` is what --pipeline-stages stands for: its patch puts that there."""
    given = getattr(args, "pipeline_stages", None)
    try:
        entries = schedule.current().stages if given is None else whole_numbers(given)
    except ValueError:  # reported where it is read
        return False
    return entries is not None and describes(str(getattr(args, "pipeline_model_parallel_layout", None)), entries)


def _own(flag: str, why: str) -> Option:
    return Option(flag=flag, origin="mindspeed_mem", why=why)


_SAME = "both decide about the same activations"
_GRAPH = "replaying a graph skips the Python code that swaps and recomputes"
_NOT_YET = "not supported yet"

MEMORY_PATCHES = ("activation_*",)
RECOMPUTE_PATCHES = ("recompute_*",)
_MEMORY_BARS = (
    _core("--recompute-granularity", "a layer that Megatron recomputes keeps nothing to decide about", value="full"),
    _core("--fine-grained-activation-offloading", _SAME),
    _core("--cpu-offloading", _SAME),
    _core("--cpu-offloading-num-layers", _SAME),
    _core("--cuda-graph-impl", _GRAPH, off="none"),
    _core("--enable-cuda-graph", _GRAPH),
    _core("--external-cuda-graph", _GRAPH),
    _core("--overlap-moe-expert-parallel-comm", _NOT_YET),
    _core("--moe-shared-expert-overlap", "it computes on a second stream, which swap and recompute do not follow"),
    _lm("--use-megatron-fsdp", _NOT_YET),
    _lm("--use-torch-fsdp2", _NOT_YET),
    _lm("--use-legacy-models", "the legacy models have none of megatron-core's layers"),
    _lm("--yaml-cfg", "it replaces the command line, this option included"),
    _ms("--swap-attention", _SAME),
    _ms("--smart-swap", _SAME),
    _ms("--recompute-in-bubble", _NOT_YET),
    _ms("--recompute-in-advance", _NOT_YET),
    _ms("--moe-fb-overlap", _NOT_YET),
)
_RECOMPUTE_BARS = (
    _core("--fp8-format", "delayed scaling changes with each forward, also with one that runs again", field="fp8"),
    _core(
        "--moe-router-load-balancing-type",
        "its running counts change between a forward and its repetition",
        value="global_aux_loss",
    ),
)

_RECOMPUTES = {
    "patches": (*MEMORY_PATCHES, *RECOMPUTE_PATCHES),
    "bars": (*_MEMORY_BARS, *_RECOMPUTE_BARS),
}

_TWO_SPLITS = "both say which layers a pipeline stage has"
_STAGES_BARS = (
    _core("--pipeline-model-parallel-layout", _TWO_SPLITS, unless=_made_of_stages),
    _core("--decoder-first-pipeline-num-layers", _TWO_SPLITS, field="num_layers_in_first_pipeline_stage"),
    _core("--decoder-last-pipeline-num-layers", _TWO_SPLITS, field="num_layers_in_last_pipeline_stage"),
    _lm("--decoder-first-pipeline-num-layers", _TWO_SPLITS),
    _lm("--decoder-last-pipeline-num-layers", _TWO_SPLITS),
    _core("--account-for-embedding-in-pipeline-split", _TWO_SPLITS),
    _core("--account-for-loss-in-pipeline-split", _TWO_SPLITS),
    _lm("--num-layers-per-virtual-pipeline-stage", "the number of virtual stages follows from that of the counts"),
    _core("--is-hybrid-model", "hybrid models always split their layers evenly"),
    _lm("--use-legacy-models", "the legacy models have none of megatron-core's layers"),
    _lm("--yaml-cfg", "it replaces the command line, this option included"),
)

_OWN_LOOP = "it belongs to Megatron's own loop, whose place a capped schedule takes"
_CAP_BARS = (
    _core("--overlap-moe-expert-parallel-comm", _OWN_LOOP),
    _core("--defer-embedding-wgrad-compute", _OWN_LOOP),
    _core("--num-microbatches-with-partial-activation-checkpoints", _OWN_LOOP),
    _core("--fine-grained-activation-offloading", _NOT_YET),
    _core("--hybrid-context-parallel", _NOT_YET),
    _core("--variable-seq-lengths", "stages do not tell each other sizes: all micro-batches have one"),
    _core("--mtp-standalone", "stages do not tell each other sizes: between all of them they are one"),
    _core("--cuda-graph-impl", "graphs are captured in the order of Megatron's own loop", off="none"),
    _core("--enable-cuda-graph", "graphs are captured in the order of Megatron's own loop"),
    _core("--external-cuda-graph", "graphs are captured in the order of Megatron's own loop"),
    _lm("--use-megatron-fsdp", _NOT_YET),
    _lm("--use-torch-fsdp2", _NOT_YET),
    _lm("--yaml-cfg", "it replaces the command line, this option included"),
    _ms("--recompute-in-bubble", "both decide about the order of passes"),
    _ms("--recompute-in-advance", "both decide about the order of passes"),
    _ms("--moe-fb-overlap", "both decide about the order of passes"),
)

_FINDS = "it finds out itself what to swap and what to recompute"
_ADAPTIVE_BARS = (
    *(bar for bar in _MEMORY_BARS if bar.flag != "--recompute-granularity"),
    *_RECOMPUTE_BARS,
    _core("--recompute-granularity", _FINDS),
    _own("--memory-config", _FINDS),
    _own("--recompute-layers", _FINDS),
    _own("--select-recompute", _FINDS),
    _own("--select-comm-recompute", _FINDS),
    _ms("--adaptive-recompute-device-swap", _SAME),
    _ms("--adaptive-recompute-device-size", _SAME),
    _ms("--recompute-activation-function", _SAME),
    _ms("--memory-fragmentation", "both manage memory"),
)

_OWN_MEMORY = "it keeps parameters or gradients in memory of its own"
_SAME_STATES = "both decide where optimizer states lie"


def _stage_1(args: Any) -> bool:
    return str(getattr(args, "chunk_zero_stage", None)) == "1"


def _parameters_are_whole(args: Any) -> bool:
    return str(getattr(args, "chunk_zero_stage", None)) != "3"


def _norm_can_be_read(args: Any) -> bool:
    """Megatron takes it from the masters in bf16, all of which have to be on the device, else from the parameters."""
    if getattr(args, "bf16", False):
        return str(getattr(args, "placement_policy", None) or "device").partition(":")[0] == "device"
    return _parameters_are_whole(args)


_CHUNK_BARS = (
    _core("--fp8-param-gather", "fp8 parameters have another layout than their buckets", field="fp8_param"),
    _core("--cuda-graph-impl", "a replayed graph skips the Python code that gathers parameters", off="none"),
    _core("--enable-cuda-graph", "a replayed graph skips the Python code that gathers parameters"),
    _core("--external-cuda-graph", "a replayed graph skips the Python code that gathers parameters"),
    _core("--delay-wgrad-compute", _NOT_YET),
    _core("--overlap-moe-expert-parallel-comm", _NOT_YET),
    _core("--defer-embedding-wgrad-compute", _NOT_YET),
    _lm("--optimizer", "Megatron's distributed optimizer is for Adam", off="adam"),
    _lm("--use-nccl-ub", _OWN_MEMORY, field="nccl_ub"),
    _lm("--use-megatron-fsdp", _OWN_MEMORY),
    _lm("--use-torch-fsdp2", _OWN_MEMORY),
    _lm("--num-distributed-optimizer-instances", _NOT_YET, off="1"),
    _lm("--overlap-param-gather-with-optimizer-step", "parameters are gathered when they are used"),
    _lm("--use-precision-aware-optimizer", "its masters are TransformerEngine's own"),
    _lm("--optimizer-cpu-offload", _SAME_STATES),
    _lm("--save-wgrads-interval", "no rank has whole gradients with stages 2 and 3; stage 1 can", unless=_stage_1),
    _lm(
        "--check-weight-hash-across-dp-replicas-interval",
        "no rank has whole parameters between two passes with stage 3; stages 1 and 2 can",
        unless=_parameters_are_whole,
    ),
    _lm(
        "--log-params-norm",
        "it reads what a chunk that rests on the host, or stage 3 without bf16, does not have on the device",
        unless=_norm_can_be_read,
    ),
    _core("--qk-clip", "it writes into whole fp32 masters"),
    _lm("--use-legacy-models", "the legacy models have none of megatron-core's layers"),
    _lm("--yaml-cfg", "it replaces the command line, this option included"),
    _ms("--swap-optimizer", _SAME_STATES),
    _ms("--reuse-fp32-param", "both decide where the fp32 masters lie"),
    _ms("--layerzero", _OWN_MEMORY),
)

_SPLITS = "it splits the optimizer by itself"
_OPTIMIZER_BARS = (
    _lm("--use-distributed-optimizer", _SPLITS),
    _lm("--use-megatron-fsdp", _SPLITS),
    _lm("--use-torch-fsdp2", _SPLITS),
    _lm("--optimizer", _SPLITS, value="dist_muon"),
    _lm("--optimizer", _NOT_YET, value="muon"),
    _lm("--optimizer-cpu-offload", _SAME_STATES),
    _lm("--use-precision-aware-optimizer", "its masters are TransformerEngine's own"),
    _lm("--rl-offload-optimizer-during-inference", _SAME_STATES),
    _lm("--ckpt-format", "there one rank saves what lies on all of them; torch_dist can be loaded", value="torch"),
    _lm("--yaml-cfg", "it replaces the command line, this option included"),
    _core("--fp8-param-gather", "fp8 parameters are made from whole fp32 masters", field="fp8_param"),
    _core("--qk-clip", "it writes into whole fp32 masters"),
    _ms("--swap-optimizer", _SAME_STATES),
    _ms("--reuse-fp32-param", "both decide where the fp32 masters lie"),
)

FEATURES = (
    Feature(
        flag="--device",
        choices=("auto", "cpu", "cuda", "npu"),
        default="auto",
        help="device to train on; auto (default) takes what MINDSPEED_MEM_DEVICE says, else the first present of npu, "
        "cuda, cpu. On cpu, megatron-core is made to train on host memory with gloo",
    ),
    # Before all that wraps Megatron's schedules: it takes the place of what lies beneath it.
    Feature(
        flag="--max-inflight-microbatches",
        read=at_least_one,
        metavar="N",
        help="micro-batches (with virtual stages: passes of one chunk) whose activations a pipeline stage may hold; "
        "fewer than the schedule would hold cost time in which stages idle",
        patches=("pipeline_cap",),
        bars=_CAP_BARS,
    ),
    Feature(
        flag="--memory-config",
        read=source,
        metavar="FILE",
        help="YAML file naming the layers and operators whose activations are swapped to host memory (swap_config) or "
        "computed again in backward (recompute_config), with MindFormers' field names",
        patches=MEMORY_PATCHES,
        bars=_MEMORY_BARS,
        recompute_bars=_RECOMPUTE_BARS,
    ),
    Feature(
        flag="--recompute-layers",
        read=layer_list,
        metavar="LAYERS",
        help="layers whose forward runs again in backward, counted from 0 over the whole model: 0,3-5 or all",
        section="recompute",
        **_RECOMPUTES,
    ),
    Feature(
        flag="--select-recompute",
        read=by_pattern,
        many=True,
        metavar="PATTERN[=LAYERS]",
        help=r"operators whose forward runs again in backward, with their layers (none named: all), such as "
        r"'mlp=0,3' 'self_attention\.core_attention'",
        section="select_recompute",
        **_RECOMPUTES,
    ),
    Feature(
        flag="--select-comm-recompute",
        read=by_pattern,
        many=True,
        metavar="PATTERN[=LAYERS]",
        help=r"the same for operators that communicate, and the norms that feed them, such as '.*\.norm'",
        section="select_comm_recompute",
        **_RECOMPUTES,
    ),
    Feature(
        flag="--swap-host-memory-gib",
        read=gib,
        metavar="GIB",
        help="host memory that each rank may fill with swapped activations; beyond it an activation stays on the "
        "device (default: no limit)",
        needs_features=("--memory-config", "--survive-oom", "--adaptive-memory-optimization"),
    ),
    Feature(
        flag="--device-memory-gib",
        read=gib,
        metavar="GIB",
        help="device memory that each rank may use (default: all there is; on cpu, where that is the host's, no limit)",
        needs_features=("--survive-oom", "--adaptive-memory-optimization", "--placement-policy"),
    ),
    Feature(
        flag="--chunk-zero-stage",
        read=zero_stage,
        metavar="STAGE",
        help="split over the data-parallel ranks, in chunks: 1 optimizer states, 2 gradients too, 3 parameters too",
        patches=("chunk_*",),
        needs=(_lm("--use-distributed-optimizer", "its buckets are the chunks"),),
        bars=_CHUNK_BARS,
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
        help="where the optimizer steps chunks that rest on the host: device (default) brings their states there and "
        "keeps its arithmetic; host runs Adam on the host's cores",
        needs_features=("--chunk-zero-stage",),
    ),
    Feature(
        flag="--chunk-reduce-each-microbatch",
        read=bool,
        default=False,
        help="with stages 2 and 3, reduce gradients in every micro-batch, so that whole ones are there for few chunks "
        "only; sums are then in another order than Megatron's",
        needs_features=("--chunk-zero-stage",),
    ),
    Feature(
        flag="--chunk-host-memory-gib",
        read=gib,
        metavar="GIB",
        help="host memory that the chunks of each rank may take (default: what the host has free)",
        needs_features=("--chunk-zero-stage",),
    ),
    Feature(
        flag="--min-chunk-size-mib",
        read=gib,
        metavar="MIB",
        help="MiB of bf16 parameters that a chunk holds at least (default: 64; 2 bytes per element are counted for any "
        "type)",
        needs_features=("--chunk-zero-stage",),
    ),
    Feature(
        flag="--chunk-search-range-mib",
        read=gib,
        metavar="MIB",
        help="MiB above that minimum among which the size with the smallest chunks is searched (default: 64)",
        needs_features=("--chunk-zero-stage",),
    ),
    Feature(
        flag="--chunk-hidden-dim",
        read=at_least_one,
        metavar="N",
        help="step of that search in elements (default: the model's hidden size)",
        needs_features=("--chunk-zero-stage",),
    ),
    # Behind all that follows the passes of a schedule: a call that is tried again begins anew for these, too.
    Feature(
        flag="--survive-oom",
        read=bool,
        default=False,
        help="when device memory runs out in the middle of a step, move activations to the host and go on, whatever "
        "the memory plan says",
        patches=(*MEMORY_PATCHES, "recompute_random", "survive_*"),
        bars=_MEMORY_BARS,
    ),
    Feature(
        flag="--adaptive-memory-optimization",
        read=bool,
        default=False,
        help="survive the first steps as with --survive-oom, profile them, find out what to keep, swap and recompute "
        "for the shortest step within the device's memory, and go on with that",
        patches=(*MEMORY_PATCHES, *RECOMPUTE_PATCHES, "survive_*", "adaptive_*"),
        bars=_ADAPTIVE_BARS,
    ),
    Feature(
        flag="--adaptive-plan-file",
        read=new_file,
        metavar="FILE",
        help="where the plan of --adaptive-memory-optimization is kept, to be used again by the same job, to be read "
        "and edited as a --memory-config (default: it is not kept)",
        needs_features=("--adaptive-memory-optimization",),
    ),
    Feature(
        flag="--optimizer-parallel",
        choices=MODES,
        help="each data-parallel rank keeps the optimizer's states for its part only, updates that and hands it out: "
        "grouping by whole parameters, sharding by a slice of each",
        patches=("optimizer_parallel",),
        bars=_OPTIMIZER_BARS,
    ),
    Feature(
        flag="--sdpa-attention",
        read=bool,
        default=False,
        help="run core attention of the local layer spec by torch's scaled_dot_product_attention",
        patches=("sdpa_*",),
        needs=(_core("--transformer-impl", "the other layer specs bring their own attention", value="local"),),
    ),
    Feature(
        flag="--pipeline-stages",
        read=whole_numbers,
        metavar="COUNTS",
        help="layers of each pipeline stage, such as 3,5,5,3 (with virtual stages one count for each chunk, in the "
        "model's order), or the stage of each layer, such as 0,0,0,1,1,1,1,1",
        patches=("pipeline_stages",),
        bars=_STAGES_BARS,
    ),
)
BY_DEVICE = {"cpu": ("cpu_*",), "simulated": ("cpu_*",)}
"""Patches for a device, as shell patterns: they come before all others."""

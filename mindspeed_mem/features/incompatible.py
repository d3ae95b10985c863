"""What each feature of the table cannot run beside: options of megatron-core, Megatron-LM, MindSpeed, and our own."""

from __future__ import annotations

from functools import partial
from typing import Any

from mindspeed_mem.features.readers import whole_numbers
from mindspeed_mem.features.rows import Option
from mindspeed_mem.schedule.stages import describes
from mindspeed_mem.zero.core.placement import placement

of_core = partial(Option, "megatron-core")
of_megatron_lm = partial(Option, "megatron-lm")
of_mindspeed = partial(Option, "mindspeed")
of_ours = partial(Option, "mindspeed_mem")


def _made_of_stages(args: Any) -> bool:
    """Whether the layout in `args` is what --pipeline-stages stands for: its patch puts that there."""
    given = getattr(args, "pipeline_stages", None)
    try:
        entries = None if given is None else whole_numbers(given)
    except ValueError:  # reported where it is read
        return False
    return entries is not None and describes(str(getattr(args, "pipeline_model_parallel_layout", None)), entries)


def _draws_nothing(args: Any) -> bool:
    try:
        return not any(float(getattr(args, f"{what}_dropout", 0.1)) for what in ("hidden", "attention"))
    except (TypeError, ValueError):  # reported where it is parsed
        return False


_SAME = "both decide about the same activations"
_AS_PLAN = "`python -m mindspeed_mem plan --from-megatron` says it as a plan"
_GRAPH = "replaying a graph skips the Python code that swaps and recomputes"
_NOT_YET = "not supported yet"
_OWN_PASSES = "its forwards and backwards are its own, which swap and recompute do not follow"
_EMPTIES = "it empties activations and fills them again by itself, on streams that swap and recompute do not follow"
_LIVE = (
    "its states are live generators, so dropout would draw other masks in a forward that runs again (it can stay with "
    "--hidden-dropout 0 --attention-dropout 0)"
)

MEMORY = (
    of_core("--recompute-granularity", f"a layer that runs again keeps nothing to move; {_AS_PLAN}", value="full"),
    of_core("--fine-grained-activation-offloading", f"{_SAME}; {_AS_PLAN}"),
    of_core("--cpu-offloading", _SAME),
    of_core("--cpu-offloading-num-layers", f"{_SAME}; {_AS_PLAN}"),
    of_core("--cuda-graph-impl", _GRAPH, off="none"),
    of_core("--enable-cuda-graph", _GRAPH),
    of_core("--external-cuda-graph", _GRAPH),
    of_core("--overlap-moe-expert-parallel-comm", _NOT_YET),
    of_core("--moe-shared-expert-overlap", "it computes on a second stream, which swap and recompute do not follow"),
    of_megatron_lm("--use-megatron-fsdp", _NOT_YET),
    of_megatron_lm("--use-torch-fsdp2", _NOT_YET),
    of_megatron_lm("--use-legacy-models", "the legacy models have none of megatron-core's layers"),
    of_megatron_lm("--yaml-cfg", "it replaces the command line, this option included"),
    of_mindspeed("--swap-attention", _SAME),
    of_mindspeed("--smart-swap", _SAME),
    of_mindspeed("--recompute-in-bubble", _NOT_YET),
    of_mindspeed("--recompute-in-advance", _NOT_YET),
    of_mindspeed("--moe-fb-overlap", _NOT_YET),
    of_mindspeed("--moe-alltoall-overlap-comm", _EMPTIES),
    of_mindspeed("--moe-allgather-overlap-comm", _EMPTIES),
    of_mindspeed("--moe-zero-memory", _SAME, off="disable"),
    of_mindspeed("--moe-unperm2-mem-optim-swap", _SAME),
    of_mindspeed("--compress-dense", _SAME, off="disable"),
    of_mindspeed("--automated-pipeline", _SAME),
    of_mindspeed("--schedules-method", _OWN_PASSES, value="dualpipev"),
    of_mindspeed("--use-multiparameter-pipeline-model-parallel", _OWN_PASSES),
)
RECOMPUTE = (
    of_core("--fp8-format", "delayed scaling changes with each forward, also with one that runs again", field="fp8"),
    of_megatron_lm(
        "--te-rng-tracker",
        _LIVE,
        unless=_draws_nothing,
        asks=("--hidden-dropout", "--attention-dropout"),
    ),
    of_core("--te-rng-tracker", _LIVE, field="use_te_rng_tracker", unless=_draws_nothing),
)


_TWO_SPLITS = "both say which layers a pipeline stage has"
PIPELINE_STAGES = (
    of_core("--pipeline-model-parallel-layout", _TWO_SPLITS, unless=_made_of_stages),
    of_core("--decoder-first-pipeline-num-layers", _TWO_SPLITS, field="num_layers_in_first_pipeline_stage"),
    of_core("--decoder-last-pipeline-num-layers", _TWO_SPLITS, field="num_layers_in_last_pipeline_stage"),
    of_megatron_lm("--decoder-first-pipeline-num-layers", _TWO_SPLITS),
    of_megatron_lm("--decoder-last-pipeline-num-layers", _TWO_SPLITS),
    of_core("--account-for-embedding-in-pipeline-split", _TWO_SPLITS),
    of_core("--account-for-loss-in-pipeline-split", _TWO_SPLITS),
    of_megatron_lm(
        "--num-layers-per-virtual-pipeline-stage", "the number of virtual stages follows from that of the counts"
    ),
    of_core("--is-hybrid-model", "hybrid models always split their layers evenly"),
    of_megatron_lm("--hybrid-override-pattern", "hybrid models always split their layers evenly"),
    of_megatron_lm("--hybrid-layer-pattern", "the bars in the pattern split a hybrid model"),
    of_megatron_lm("--use-legacy-models", "the legacy models have none of megatron-core's layers"),
    of_megatron_lm("--yaml-cfg", "it replaces the command line, this option included"),
    of_mindspeed("--noop-layers", "it finds its layers where an even split has them"),
    of_mindspeed("--automated-pipeline", _TWO_SPLITS),
    of_mindspeed("--schedules-method", "each stage has a part of both halves of the model", value="dualpipev"),
)

_OWN_LOOP = "it belongs to Megatron's own loop, whose place a capped schedule takes"
INFLIGHT_CAP = (
    of_core("--overlap-moe-expert-parallel-comm", _OWN_LOOP),
    of_core("--defer-embedding-wgrad-compute", _OWN_LOOP),
    of_core("--num-microbatches-with-partial-activation-checkpoints", _OWN_LOOP),
    of_core("--fine-grained-activation-offloading", _NOT_YET),
    of_core("--hybrid-context-parallel", _NOT_YET),
    of_core("--variable-seq-lengths", "stages do not tell each other sizes: all micro-batches have one"),
    of_core("--mtp-standalone", "stages do not tell each other sizes: between all of them they are one"),
    of_core("--cuda-graph-impl", "graphs are captured in the order of Megatron's own loop", off="none"),
    of_core("--enable-cuda-graph", "graphs are captured in the order of Megatron's own loop"),
    of_core("--external-cuda-graph", "graphs are captured in the order of Megatron's own loop"),
    of_megatron_lm("--use-megatron-fsdp", _NOT_YET),
    of_megatron_lm("--use-torch-fsdp2", _NOT_YET),
    of_megatron_lm("--yaml-cfg", "it replaces the command line, this option included"),
    of_mindspeed("--recompute-in-bubble", "both decide about the order of passes"),
    of_mindspeed("--recompute-in-advance", "both decide about the order of passes"),
    of_mindspeed("--moe-fb-overlap", "both decide about the order of passes"),
    of_mindspeed("--schedules-method", "both decide about the order of passes", value="dualpipev"),
    of_mindspeed("--use-multiparameter-pipeline-model-parallel", "stages send each other one tensor"),
)

_FINDS = "it finds out itself what to swap and what to recompute"
ADAPTIVE = (
    *(bar for bar in MEMORY if bar.flag != "--recompute-granularity"),
    *RECOMPUTE,
    of_core("--recompute-granularity", _FINDS),
    of_ours("--memory-config", _FINDS),
    of_ours("--recompute-layers", _FINDS),
    of_ours("--select-recompute", _FINDS),
    of_ours("--select-comm-recompute", _FINDS),
    of_mindspeed("--adaptive-recompute-device-swap", _SAME),
    of_mindspeed("--adaptive-recompute-device-size", _SAME),
    of_mindspeed("--recompute-activation-function", _SAME),
    of_mindspeed("--recompute-norm", _SAME),
    of_mindspeed("--memory-fragmentation", "both manage memory"),
)

_OWN_MEMORY = "it keeps parameters or gradients in memory of its own"
_SAME_STATES = "both decide where optimizer states lie"


def _stage(args: Any) -> str:
    return str(getattr(args, "chunk_zero_stage", None))


def _norm_can_be_read(args: Any) -> bool:
    """Megatron takes it from the masters in bf16, all of which have to be on the device, else from the parameters."""
    if getattr(args, "bf16", False):
        try:
            return placement(getattr(args, "placement_policy", None) or "device").policy == "device"
        except ValueError:  # reported where it is read
            return True
    return _stage(args) != "3"


CHUNKS = (
    of_core("--fp8-param-gather", "fp8 parameters have another layout than their buckets", field="fp8_param"),
    of_core("--cuda-graph-impl", "a replayed graph skips the Python code that gathers parameters", off="none"),
    of_core("--enable-cuda-graph", "a replayed graph skips the Python code that gathers parameters"),
    of_core("--external-cuda-graph", "a replayed graph skips the Python code that gathers parameters"),
    of_core("--delay-wgrad-compute", _NOT_YET),
    of_core("--overlap-moe-expert-parallel-comm", _NOT_YET),
    of_core("--defer-embedding-wgrad-compute", _NOT_YET),
    of_megatron_lm("--optimizer", "Megatron's distributed optimizer is for Adam", off="adam"),
    of_megatron_lm("--use-nccl-ub", _OWN_MEMORY, field="nccl_ub"),
    of_megatron_lm("--use-megatron-fsdp", _OWN_MEMORY),
    of_megatron_lm("--use-torch-fsdp2", _OWN_MEMORY),
    of_megatron_lm("--num-distributed-optimizer-instances", _NOT_YET, off="1"),
    of_megatron_lm("--overlap-param-gather-with-optimizer-step", "parameters are gathered when they are used"),
    of_megatron_lm("--use-precision-aware-optimizer", "its masters are TransformerEngine's own"),
    of_megatron_lm("--optimizer-cpu-offload", _SAME_STATES),
    of_megatron_lm(
        "--save-wgrads-interval",
        "no rank has whole gradients with stages 2 and 3; stage 1 can",
        unless=lambda args: _stage(args) == "1",
    ),
    of_megatron_lm(
        "--check-weight-hash-across-dp-replicas-interval",
        "no rank has whole parameters between two passes with stage 3; stages 1 and 2 can",
        unless=lambda args: _stage(args) != "3",
    ),
    of_megatron_lm(
        "--log-params-norm",
        "it reads what a chunk that rests on the host, or stage 3 without bf16, does not have on the device",
        unless=_norm_can_be_read,
        asks=("--bf16",),
    ),
    of_core("--qk-clip", "it writes into whole fp32 masters"),
    of_megatron_lm("--use-legacy-models", "the legacy models have none of megatron-core's layers"),
    of_megatron_lm("--yaml-cfg", "it replaces the command line, this option included"),
    of_mindspeed("--swap-optimizer", _SAME_STATES),
    of_mindspeed("--virtual-optimizer", _SAME_STATES),
    of_mindspeed("--reuse-fp32-param", "both decide where the fp32 masters lie"),
    of_mindspeed("--layerzero", _OWN_MEMORY),
    of_mindspeed("--moe-fb-overlap", _NOT_YET),
    of_mindspeed("--schedules-method", _NOT_YET, value="dualpipev"),
)

_SPLITS = "it splits the optimizer by itself"
OPTIMIZER_PARALLEL = (
    of_megatron_lm("--use-distributed-optimizer", _SPLITS),
    of_megatron_lm("--use-megatron-fsdp", _SPLITS),
    of_megatron_lm("--use-torch-fsdp2", _SPLITS),
    of_megatron_lm("--optimizer", _SPLITS, value="dist_muon"),
    of_megatron_lm("--optimizer", _NOT_YET, value="muon"),
    of_megatron_lm("--optimizer-cpu-offload", _SAME_STATES),
    of_megatron_lm("--use-precision-aware-optimizer", "its masters are TransformerEngine's own"),
    of_megatron_lm("--rl-offload-optimizer-during-inference", _SAME_STATES),
    of_megatron_lm(
        "--ckpt-format", "there one rank saves what lies on all of them; torch_dist can be loaded", value="torch"
    ),
    of_megatron_lm("--yaml-cfg", "it replaces the command line, this option included"),
    of_core("--fp8-param-gather", "fp8 parameters are made from whole fp32 masters", field="fp8_param"),
    of_core("--qk-clip", "it writes into whole fp32 masters"),
    of_mindspeed("--swap-optimizer", _SAME_STATES),
    of_mindspeed("--virtual-optimizer", _SAME_STATES),
    of_mindspeed("--reuse-fp32-param", "both decide where the fp32 masters lie"),
)

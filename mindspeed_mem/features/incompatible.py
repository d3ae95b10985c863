"""What each feature of the table cannot run beside: options of megatron-core, Megatron-LM, MindSpeed, and our own."""

from __future__ import annotations

from collections.abc import Callable
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
_AS_PLAN = "`python -m mindspeed_mem plan --from-megatron` translates it into a plan"
_GRAPH = (
    "replaying a graph of whole layers or steps skips the Python code that swaps and recomputes (--cuda-graph-impl "
    "transformer_engine with graphs of parts, such as --cuda-graph-scope attn moe_router, can stay: swap follows the "
    "rest)"
)
_NOT_YET = "not supported yet"
_PIECES = (
    "it runs layers in pieces, of one micro-batch's forward and of another's backward in turn, and never calls a "
    "layer's forward, by which swap and recompute know where they are"
)
_FSDP = "the memory of a layer's parameters and gradients comes and goes, which was never run with plans"
_OWN_PASSES = "its forwards and backwards are its own, which swap and recompute do not follow"
_EMPTIES = "it empties activations and fills them again by itself, on streams that swap and recompute do not follow"
_LIVE = (
    "its states are live generators, so dropout would draw other masks in a forward that runs again (it can stay with "
    "--hidden-dropout 0 --attention-dropout 0)"
)


def _graphs_of_parts(args: Any) -> bool:
    """Whether CUDA graphs hold parts of layers only, and what is between them runs as Python code."""
    impl, old = getattr(args, "cuda_graph_impl", None), getattr(args, "external_cuda_graph", None)
    scope = getattr(args, "cuda_graph_modules", None) or getattr(args, "cuda_graph_scope", None) or ()
    parts = scope.split(",") if isinstance(scope, str) else scope if isinstance(scope, list | tuple) else [scope]
    names = {str(getattr(part, "name", part)) for part in parts}
    return (impl == "transformer_engine" or bool(old)) and bool(names) and not names & {"full", "full_iteration"}


def _graphs(why: str, unless: Callable[[Any], bool] | None = None) -> tuple[Option, ...]:
    asks = () if unless is None else ("--cuda-graph-scope", "--cuda-graph-modules")
    return (
        of_core("--cuda-graph-impl", why, off="none", unless=unless, asks=asks),
        of_core("--external-cuda-graph", why, unless=unless, asks=asks),
    )


_ALWAYS = (
    of_core("--recompute-granularity", f"a layer that runs again keeps nothing to move; {_AS_PLAN}", value="full"),
    of_core("--fine-grained-activation-offloading", f"{_SAME}; {_AS_PLAN}"),
    of_core("--cpu-offloading", _SAME),
    of_core("--cpu-offloading-num-layers", f"{_SAME}; {_AS_PLAN}"),
    of_core("--moe-paged-stash", "it keeps what experts save in pages of its own, and may run a step again"),
    of_core("--enable-cuda-graph", _GRAPH),
    of_core("--overlap-moe-expert-parallel-comm", _PIECES),
    of_megatron_lm("--use-megatron-fsdp", _FSDP),
    of_megatron_lm("--use-custom-fsdp", _FSDP),
    of_megatron_lm("--use-torch-fsdp2", _FSDP),
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
    of_mindspeed("--compress-activation", _SAME),
    of_mindspeed("--swap-layer-input", _SAME),
    of_mindspeed("--automated-pipeline", _SAME),
    of_mindspeed("--schedules-method", _OWN_PASSES, value="dualpipev"),
    of_mindspeed("--use-multiparameter-pipeline-model-parallel", _OWN_PASSES),
    of_mindspeed("--layerwise-disaggregated-training", _OWN_PASSES),
)
MEMORY = (*_ALWAYS, *_graphs(_GRAPH, _graphs_of_parts))
RECOMPUTE = (
    of_core(
        "--fp8-format",
        "delayed scaling changes with each forward, and one that runs again is outside TransformerEngine's fp8 context",
        field="fp8",
    ),
    of_megatron_lm(
        "--te-rng-tracker",
        _LIVE,
        unless=_draws_nothing,
        asks=("--hidden-dropout", "--attention-dropout"),
    ),
    of_core("--te-rng-tracker", _LIVE, field="use_te_rng_tracker", unless=_draws_nothing),
    *_graphs("a second run in backward would need a graph that its next micro-batch has"),
)
RECOMPUTING = (*_ALWAYS, *RECOMPUTE)
SURVIVE = (*_ALWAYS, *_graphs("memory cannot be made free while a graph is captured or replayed"))


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
    of_mindspeed("--pipeline-num-transformer-layers", _TWO_SPLITS),
    of_mindspeed("--num-layer-list", _TWO_SPLITS),
    of_mindspeed("--automated-pipeline", _TWO_SPLITS),
    of_mindspeed("--schedules-method", "each stage has a part of both halves of the model", value="dualpipev"),
)

_OWN_LOOP = "it belongs to Megatron's own loop, whose place a capped schedule takes"
INFLIGHT_CAP = (
    of_core("--overlap-moe-expert-parallel-comm", _OWN_LOOP),
    of_core("--defer-embedding-wgrad-compute", _OWN_LOOP),
    of_core("--num-microbatches-with-partial-activation-checkpoints", _OWN_LOOP),
    of_core("--moe-paged-stash", "Megatron's own loop empties its pages"),
    of_core("--hybrid-context-parallel", "Megatron's own loop cuts sequences anew for each micro-batch"),
    of_core("--variable-seq-lengths", "stages do not tell each other sizes: all micro-batches have one"),
    of_core("--mtp-standalone", "stages do not tell each other sizes: between all of them they are one"),
    of_core("--cuda-graph-impl", "graphs are captured in the order of Megatron's own loop", off="none"),
    of_core("--enable-cuda-graph", "graphs are captured in the order of Megatron's own loop"),
    of_core("--external-cuda-graph", "graphs are captured in the order of Megatron's own loop"),
    of_megatron_lm("--use-megatron-fsdp", "its gradients are not reduced as a capped schedule asks for it"),
    of_megatron_lm("--use-custom-fsdp", "its gradients are not reduced as a capped schedule asks for it"),
    of_megatron_lm("--use-torch-fsdp2", "its gradients are not reduced as a capped schedule asks for it"),
    of_megatron_lm("--yaml-cfg", "it replaces the command line, this option included"),
    of_mindspeed("--recompute-in-bubble", "both decide about the order of passes"),
    of_mindspeed("--recompute-in-advance", "both decide about the order of passes"),
    of_mindspeed("--moe-fb-overlap", "both decide about the order of passes"),
    of_mindspeed("--schedules-method", "both decide about the order of passes", value="dualpipev"),
    of_mindspeed("--use-multiparameter-pipeline-model-parallel", "stages send each other one tensor"),
    of_mindspeed("--layerwise-disaggregated-training", "both decide about the order of passes"),
    of_mindspeed("--dist-train", "its models run on other stages, with passes of their own"),
)

_BOTH_PUT_OFF = "both put gradients of weights off"
_AS_MADE = "it takes gradients as the backward pass makes them, into memory of its own"
_OTHER_LINEAR = "both change the backward of linear layers"
SPLIT_BACKWARD = (
    of_core("--delay-wgrad-compute", _BOTH_PUT_OFF),
    of_core("--defer-embedding-wgrad-compute", _BOTH_PUT_OFF),
    of_core("--overlap-moe-expert-parallel-comm", "it runs forwards and backwards piece by piece by itself"),
    *_graphs("a replayed graph skips the Python code that puts gradients of weights off"),
    of_core("--enable-cuda-graph", "a replayed graph skips the Python code that puts gradients of weights off"),
    of_megatron_lm("--use-megatron-fsdp", _AS_MADE),
    of_megatron_lm("--use-custom-fsdp", _AS_MADE),
    of_megatron_lm("--use-torch-fsdp2", _AS_MADE),
    of_megatron_lm("--use-legacy-models", "the legacy models have none of megatron-core's layers"),
    of_megatron_lm("--yaml-cfg", "it replaces the command line, this option included"),
    of_ours("--chunk-zero-stage", "a chunk's gradients are reduced as the backward pass makes them"),
    of_mindspeed("--moe-fb-overlap", _BOTH_PUT_OFF),
    of_mindspeed("--schedules-method", _BOTH_PUT_OFF, value="dualpipev"),
    of_mindspeed("--recompute-in-bubble", _OTHER_LINEAR),
    of_mindspeed("--recompute-in-advance", _OTHER_LINEAR),
    of_mindspeed("--swap-attention", _OTHER_LINEAR),
    of_mindspeed("--use-multiparameter-pipeline-model-parallel", _OWN_PASSES),
)


def _no_v(args: Any) -> bool:
    return str(getattr(args, "pipeline_schedule", None)) != "v"


_BY_RANK = "its files name parts by their rank: on another placement they would be mixed up, without a word"
_OWN_PLACES = "it places its layers by itself"
V = (
    of_core("--mtp-num-layers", _NOT_YET, unless=_no_v),
    of_core("--is-hybrid-model", _OWN_PLACES, unless=_no_v),
    of_megatron_lm("--hybrid-override-pattern", _OWN_PLACES, unless=_no_v),
    of_megatron_lm("--hybrid-layer-pattern", _OWN_PLACES, unless=_no_v),
    of_megatron_lm("--ckpt-format", _BY_RANK, value="torch", unless=_no_v),
    of_megatron_lm("--ckpt-format", _BY_RANK, value="torch_dcp", unless=_no_v),
    of_megatron_lm("--ckpt-convert-format", _BY_RANK, value="torch", unless=_no_v),
    of_mindspeed("--noop-layers", _OWN_PLACES, unless=_no_v),
)
ZERO_BUBBLE = (*{(bar.origin, bar.flag): bar for bar in (*INFLIGHT_CAP, *SPLIT_BACKWARD)}.values(), *V)

_FINDS = "it decides by itself what to swap and what to recompute"
ADAPTIVE = (
    *(bar for bar in RECOMPUTING if bar.flag != "--recompute-granularity"),
    of_core("--recompute-granularity", _FINDS),
    of_ours("--memory-config", _FINDS),
    of_ours("--recompute-layers", _FINDS),
    of_ours("--select-recompute", _FINDS),
    of_ours("--select-comm-recompute", _FINDS),
    of_mindspeed("--adaptive-recompute-device-swap", _SAME),
    of_mindspeed("--adaptive-recompute-device-size", _SAME),
    of_mindspeed("--recompute-activation-function", _SAME),
    of_mindspeed("--recompute-norm", _SAME),
    of_mindspeed("--recompute-mla-up-proj", _SAME),
    of_mindspeed("--mla-zero-memory", _SAME),
    of_mindspeed("--memory-fragmentation", "both manage memory"),
)

_SAME_STATES = "both decide where optimizer states lie"
_OWN_FORMATS = "it keeps optimizer states or gradients in formats of its own"
_OWN_STATES = (
    of_mindspeed("--swap-optimizer", _SAME_STATES),
    of_mindspeed("--virtual-optimizer", _SAME_STATES),
    of_mindspeed("--reuse-fp32-param", "both decide where the fp32 masters lie"),
    of_mindspeed("--compress-optimizer", _SAME_STATES),
    of_mindspeed("--quant-states", _OWN_FORMATS),
    of_mindspeed("--quant-grads", _OWN_FORMATS),
    of_mindspeed("--o2-optimizer", _OWN_FORMATS),
)
"""Of MindSpeed and MindSpeed-LLM."""

_LATE_GRADIENTS = "gradients of weights come after the backward pass that its chunks are reduced in"
_OWN_MEMORY = "it keeps parameters or gradients in memory of its own"


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
    of_core("--delay-wgrad-compute", _LATE_GRADIENTS),
    of_core("--defer-embedding-wgrad-compute", _LATE_GRADIENTS),
    of_megatron_lm("--optimizer", "Megatron's distributed optimizer is for Adam", off="adam"),
    of_megatron_lm("--use-nccl-ub", _OWN_MEMORY, field="nccl_ub"),
    of_megatron_lm("--use-megatron-fsdp", _OWN_MEMORY),
    of_megatron_lm("--use-custom-fsdp", _OWN_MEMORY),
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
    *_OWN_STATES,
    of_mindspeed("--layerzero", _OWN_MEMORY),
    of_mindspeed("--layerwise-disaggregated-training", _NOT_YET),
    of_mindspeed("--moe-fb-overlap", _NOT_YET),
    of_mindspeed("--schedules-method", _NOT_YET, value="dualpipev"),
)

_SPLITS = "it splits the optimizer by itself"
_ONE_SAVES = "there one rank saves what lies on all of them"
OPTIMIZER_PARALLEL = (
    of_megatron_lm("--use-distributed-optimizer", _SPLITS),
    of_megatron_lm("--use-megatron-fsdp", _SPLITS),
    of_megatron_lm("--use-custom-fsdp", _SPLITS),
    of_megatron_lm("--use-torch-fsdp2", _SPLITS),
    of_megatron_lm("--optimizer", _SPLITS, value="dist_muon"),
    of_megatron_lm("--optimizer", _NOT_YET, value="muon"),
    of_megatron_lm("--optimizer-cpu-offload", _SAME_STATES),
    of_megatron_lm("--use-precision-aware-optimizer", "its masters are TransformerEngine's own"),
    of_megatron_lm("--rl-offload-optimizer-during-inference", _SAME_STATES),
    of_megatron_lm("--ckpt-format", f"{_ONE_SAVES}; torch_dist can be loaded", value="torch"),
    of_megatron_lm("--ckpt-convert-format", f"{_ONE_SAVES}; converting needs no split optimizer", value="torch"),
    of_megatron_lm("--yaml-cfg", "it replaces the command line, this option included"),
    of_core("--fp8-param-gather", "fp8 parameters are made from whole fp32 masters", field="fp8_param"),
    of_core("--qk-clip", "it writes into whole fp32 masters"),
    *_OWN_STATES,
)

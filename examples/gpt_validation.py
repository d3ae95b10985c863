"""What must hold between the arguments, the world and the installed packages: all problems at once, nothing started."""

import importlib.util
import os

from gpt_arguments import UsageError

from mindspeed_mem.schedule import ScheduleError
from mindspeed_mem.schedule.stages import split

POSITIVE = """num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups seq_length
micro_batch_size global_batch_size make_vocab_size_divisible_by max_position_embeddings num_experts moe_router_topk
tensor_model_parallel_size pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage vocab_size
expert_model_parallel_size exit_interval save_interval log_interval eval_interval lr_decay_iters recompute_num_layers
ddp_bucket_size loss_scale initial_loss_scale loss_scale_window norm_epsilon""".split()
NOT_NEGATIVE = """train_iters eval_iters lr min_lr lr_warmup_iters weight_decay clip_grad adam_eps
moe_aux_loss_coeff init_method_std""".split()
FRACTIONS = "attention_dropout hidden_dropout adam_beta1 adam_beta2 lr_warmup_fraction".split()


def flag(name):
    """num_layers -> --num-layers"""
    return "--" + name.replace("_", "-")


def complete(args):
    """Fill in defaults that depend on other arguments and on args.world_size, then check everything.

    Raises UsageError with all problems. Adds data_parallel_size, num_microbatches,
    virtual_pipeline_model_parallel_size and layers_per_chunk (in the model's order).
    """
    problems = _ranges(args)
    if problems:  # the rest divides by these
        raise UsageError("\n".join(problems))
    _fill(args)
    problems += _stages(args)
    for check in (_shapes, _layout, _batches, _precision, _recompute, _experts, _optimizer, _files):
        problems += check(args)
    if problems:
        raise UsageError("\n".join(problems))


def _ranges(args):
    problems = []
    for names, allowed, wrong in (
        (POSITIVE, "greater than 0", lambda v: v <= 0),
        (NOT_NEGATIVE, "0 or greater", lambda v: v < 0),
        (FRACTIONS, "from 0 to less than 1", lambda v: not 0 <= v < 1),
    ):
        for name in names:
            value = getattr(args, name)
            if value is not None and wrong(value):
                problems.append(f"{flag(name)}: got {value}, must be {allowed}")
    return problems


def _fill(args):
    replica = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    args.data_parallel_size = max(1, args.world_size // replica)
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * args.data_parallel_size
    args.num_microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    if args.ffn_hidden_size is None:
        wide = 4 * args.hidden_size
        args.ffn_hidden_size = max(64, wide * 2 // 3 // 64 * 64) if args.swiglu else wide
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.recompute_activations and args.recompute_granularity is None:
        args.recompute_granularity = "selective"
    if args.lr_decay_iters is None:
        args.lr_decay_iters = max(1, args.train_iters)
    if args.lr_warmup_fraction is not None:
        args.lr_warmup_iters = int(args.lr_warmup_fraction * args.lr_decay_iters)


def _stages(args):
    """Fill in the layers of each pipeline stage and its virtual stages."""
    pp, per_chunk = args.pipeline_model_parallel_size, args.num_layers_per_virtual_pipeline_stage
    virtual = 1 if per_chunk is None else max(1, args.num_layers // pp // per_chunk)
    args.virtual_pipeline_model_parallel_size = None if per_chunk is None else virtual
    args.layers_per_chunk = (args.num_layers // pp // virtual,) * (pp * virtual)
    if args.pipeline_stages is None or pp == 1:  # the pack warns of stages that one rank cannot have
        return _divides(args, "num_layers", "pipeline_model_parallel_size")
    try:
        chosen = split(args.pipeline_stages, args.num_layers, pp)
    except ScheduleError as error:
        return [str(error)]
    args.virtual_pipeline_model_parallel_size = chosen.virtual_stages if chosen.virtual_stages > 1 else None
    args.layers_per_chunk = chosen.counts
    return []


def _divides(args, whole, part):
    if getattr(args, whole) % getattr(args, part):
        return [f"{flag(whole)} {getattr(args, whole)} is not a multiple of {flag(part)} {getattr(args, part)}"]
    return []


def _shapes(args):
    problems = _divides(args, "num_attention_heads", "tensor_model_parallel_size")
    problems += _divides(args, "ffn_hidden_size", "tensor_model_parallel_size")
    if args.group_query_attention:
        problems += _divides(args, "num_attention_heads", "num_query_groups")
        problems += _divides(args, "num_query_groups", "tensor_model_parallel_size")
        if args.multi_latent_attention:
            problems.append("--group-query-attention and --multi-latent-attention exclude each other: leave one out")
    if args.kv_channels is None and not args.multi_latent_attention:
        problems += _divides(args, "hidden_size", "num_attention_heads")
    if args.multi_latent_attention and args.transformer_impl == "local" and not args.sdpa_attention:
        problems.append("--multi-latent-attention needs --sdpa-attention: Megatron's own local attention cannot do it")
    if args.max_position_embeddings < args.seq_length:
        problems.append(
            f"--max-position-embeddings {args.max_position_embeddings} is less than --seq-length {args.seq_length}"
        )
    if args.transformer_impl == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        problems.append("--transformer-impl transformer_engine: the package is not installed; use local or install it")
    return problems


def _layout(args):
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    problems = []
    if args.world_size % (tp * pp):
        problems.append(
            f"{args.world_size} ranks do not fit --tensor-model-parallel-size {tp} x --pipeline-model-parallel-size "
            f"{pp}; start a multiple of {tp * pp} ranks (torchrun --nproc-per-node)"
        )
    if args.sequence_parallel and tp == 1:
        problems.append("--sequence-parallel needs --tensor-model-parallel-size 2 or more")
    if args.sequence_parallel and args.seq_length % tp:
        problems += _divides(args, "seq_length", "tensor_model_parallel_size")
    per_chunk = args.num_layers_per_virtual_pipeline_stage
    if args.virtual_pipeline_model_parallel_size is not None and pp == 2 and not args.overlap_p2p_comm:
        # Both directions then go between the same two ranks in one batch, which mixes them up.
        problems.append("--no-overlap-p2p-communication with virtual stages needs 3 pipeline stages or more")
    if per_chunk is not None:
        if pp == 1:
            problems.append("--num-layers-per-virtual-pipeline-stage needs --pipeline-model-parallel-size 2 or more")
        if args.num_layers // pp % per_chunk:
            problems.append(
                f"--num-layers-per-virtual-pipeline-stage {per_chunk} does not divide the {args.num_layers // pp} "
                "layers of a pipeline stage"
            )
    if args.overlap_param_gather and not (args.use_distributed_optimizer and args.overlap_grad_reduce):
        problems.append("--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce")
    return problems


def _batches(args):
    part = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size % part:
        return [
            f"--global-batch-size {args.global_batch_size} is not a multiple of --micro-batch-size "
            f"{args.micro_batch_size} x data-parallel size {args.data_parallel_size}"
        ]
    pp = args.pipeline_model_parallel_size
    if args.virtual_pipeline_model_parallel_size and args.num_microbatches % pp:
        return [
            f"virtual pipeline stages need a multiple of {pp} micro-batches per iteration, these are "
            f"{args.num_microbatches}; choose --global-batch-size as a multiple of {part * pp}"
        ]
    return []


def _precision(args):
    problems = ["--bf16 and --fp16 exclude each other: leave one out"] if args.bf16 and args.fp16 else []
    if args.loss_scale is not None and not args.fp16:
        problems.append("--loss-scale has no effect without --fp16")
    return problems


def _recompute(args):
    problems = []
    pp = args.pipeline_model_parallel_size
    per_stage = max(sum(args.layers_per_chunk[stage::pp]) for stage in range(pp))  # of the largest
    if args.recompute_granularity == "full":
        if args.recompute_method is None or args.recompute_num_layers is None:
            problems.append("--recompute-granularity full needs --recompute-method and --recompute-num-layers")
        elif args.recompute_num_layers > per_stage:
            problems.append(f"--recompute-num-layers {args.recompute_num_layers}: a stage has {per_stage} layers")
        if args.recompute_modules:
            problems.append("--recompute-modules needs --recompute-granularity selective")
    elif args.recompute_method is not None or args.recompute_num_layers is not None:
        problems.append("--recompute-method and --recompute-num-layers need --recompute-granularity full")
    elif args.recompute_modules and args.recompute_granularity is None:
        problems.append("--recompute-modules needs --recompute-granularity selective")
    if args.recompute_modules and "mlp" in args.recompute_modules and args.add_bias_linear and not args.num_experts:
        # Megatron's recomputed MLP returns its bias parameter, and the backward pass then never ends.
        problems.append("--recompute-modules mlp needs --disable-bias-linear")
    return problems


def _experts(args):
    problems = []
    if args.num_experts is None:
        if args.expert_model_parallel_size > 1:
            problems.append("--expert-model-parallel-size needs --num-experts")
        return problems
    if args.moe_router_topk > args.num_experts:
        problems.append(f"--moe-router-topk {args.moe_router_topk} is more than --num-experts {args.num_experts}")
    problems += _divides(args, "num_experts", "expert_model_parallel_size")
    if args.data_parallel_size * args.tensor_model_parallel_size % args.expert_model_parallel_size:
        problems.append(
            f"--expert-model-parallel-size {args.expert_model_parallel_size} does not divide the "
            f"{args.data_parallel_size * args.tensor_model_parallel_size} ranks of a pipeline stage"
        )
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        problems.append("--num-experts with --tensor-model-parallel-size above 1 needs --sequence-parallel")
    return problems


def _optimizer(args):
    problems = []
    if args.min_lr > args.lr:
        problems.append(f"--min-lr {args.min_lr} is greater than --lr {args.lr}")
    if args.lr_warmup_iters >= args.lr_decay_iters:
        problems.append(
            f"the warm-up of {args.lr_warmup_iters} iterations must be shorter than the {args.lr_decay_iters} "
            "iterations in which the learning rate decays"
        )
    return problems


def _files(args):
    problems = []
    if args.save_interval is not None and args.save is None:
        problems.append("--save-interval has no effect without --save DIR")
    if args.tokenizer_model is not None:
        if not os.path.isfile(args.tokenizer_model):
            problems.append(f"--tokenizer-model {args.tokenizer_model}: no such file")
        if importlib.util.find_spec("tokenizers") is None:
            problems.append("--tokenizer-model needs the package tokenizers: pip install tokenizers")
        if args.vocab_size is not None:
            problems.append("--vocab-size comes from --tokenizer-model: leave one out")
    for path in args.data_path or []:
        if not os.path.exists(path) and not (os.path.isfile(path + ".bin") and os.path.isfile(path + ".idx")):
            problems.append(f"--data-path {path}: no such file or folder, and no {path}.bin with {path}.idx")
    if args.tensorboard_dir is not None and importlib.util.find_spec("tensorboard") is None:
        problems.append("--tensorboard-dir needs the package tensorboard: pip install tensorboard")
    weights = args.split.split(",")
    if len(weights) > 3 or not all(w.strip().replace(".", "", 1).isdigit() for w in weights):
        problems.append(f"--split: got {args.split!r}, must be up to three weights such as 969,30,1")
    elif float(weights[0]) == 0:
        problems.append(f"--split: got {args.split!r}, which leaves nothing to train on")
    return problems

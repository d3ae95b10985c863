"""The model on megatron.core: configuration, layer specification, model chunks, optimizer, learning rate schedule."""

import importlib.util

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

SAME_NAME = """num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels attention_dropout hidden_dropout
normalization add_bias_linear add_qkv_bias qk_layernorm init_method_std bf16 fp16 sequence_parallel
tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size expert_model_parallel_size
recompute_granularity recompute_method recompute_num_layers distribute_saved_activations transformer_impl""".split()
EXPERTS = """moe_router_topk moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_load_balancing_type
moe_aux_loss_coeff moe_token_dispatcher_type moe_grouped_gemm""".split()
LATENT = "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_base rotary_percent".split()


def installed(package):
    return importlib.util.find_spec(package) is not None


def parameter_dtype(args):
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def model_config(args, device):
    """The TransformerConfig that the arguments describe."""
    fused = device.type == "cuda"  # Megatron's fused kernels are CUDA's, or compiled at the first call
    te = args.transformer_impl == "transformer_engine"
    apex_norm = installed("apex") and args.normalization == "LayerNorm"
    virtual = args.virtual_pipeline_model_parallel_size is not None
    values = {name: getattr(args, name) for name in SAME_NAME}
    values |= {
        "params_dtype": parameter_dtype(args),
        "pipeline_dtype": parameter_dtype(args),
        "layernorm_epsilon": args.norm_epsilon,
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "gated_linear_unit": args.swiglu,
        "activation_func": torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        "bias_activation_fusion": fused and _activation_fusion(args),
        "bias_dropout_fusion": fused and args.bias_dropout_fusion,
        "masked_softmax_fusion": fused
        and args.masked_softmax_fusion
        and installed("scaled_upper_triang_masked_softmax_cuda"),
        # Apex's kernel: also TransformerEngine's layers, which have one, are followed by Megatron's own output layer.
        "gradient_accumulation_fusion": fused
        and args.gradient_accumulation_fusion
        and installed("fused_weight_gradient_mlp_cuda"),
        "persist_layer_norm": fused and args.persist_layer_norm and (te or apex_norm),
        "deterministic_mode": args.deterministic_mode and fused,
        # Sends of both directions between the same two ranks must not share a batch: they would be mixed up.
        "overlap_p2p_comm": virtual and args.overlap_p2p_comm,
        "batch_p2p_comm": not (virtual and args.overlap_p2p_comm),
        "deallocate_pipeline_outputs": True,
    }
    if args.recompute_modules:
        values["recompute_modules"] = args.recompute_modules
    if args.num_experts is not None:
        values |= {"num_moe_experts": args.num_experts} | {name: getattr(args, name) for name in EXPERTS}
    if args.multi_latent_attention:
        values |= {"rope_type": "rope"} | {name: getattr(args, name) for name in LATENT}
        return MLATransformerConfig(**values)
    return TransformerConfig(**values)


def _activation_fusion(args):
    if args.swiglu:
        return args.bias_swiglu_fusion
    return args.bias_gelu_fusion and args.add_bias_linear


def layer_spec(args):
    if args.transformer_impl == "transformer_engine":
        get_spec, more = get_gpt_layer_with_transformer_engine_spec, {}
    else:
        get_spec, more = get_gpt_layer_local_spec, {"normalization": args.normalization}
    return get_spec(
        num_experts=args.num_experts,
        moe_grouped_gemm=args.moe_grouped_gemm,
        qk_layernorm=args.qk_layernorm,
        multi_latent_attention=args.multi_latent_attention,
        **more,
    )


def build_model(args, config, device):
    """This rank's model chunks (one, or one per virtual pipeline stage), wrapped in Megatron's data parallelism."""
    stages = range(args.virtual_pipeline_model_parallel_size) if args.virtual_pipeline_model_parallel_size else [None]
    chunks = []
    for stage in stages:
        chunk = GPTModel(
            config,
            layer_spec(args),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_base=args.rotary_base,
            rotary_percent=args.rotary_percent,
            vp_stage=stage,
        )
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunk.to(device)
        chunks.append(Float16Module(config, chunk) if args.bf16 or args.fp16 else chunk)

    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.bf16,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
        check_for_nan_in_grad=not args.fp16,  # there a skipped step and a smaller loss scale are the answer
        bucket_size=args.ddp_bucket_size,
    )
    chunks = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    for chunk in chunks:
        chunk.broadcast_params()
    return chunks


def build_optimizer(args, config, chunks):
    """(optimizer, learning rate schedule); also hooks the model chunks into `config` as Megatron's schedules want."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=args.optimizer,
            lr=args.lr,
            min_lr=args.min_lr,
            weight_decay=args.weight_decay,
            clip_grad=args.clip_grad,
            adam_beta1=args.adam_beta1,
            adam_beta2=args.adam_beta2,
            adam_eps=args.adam_eps,
            sgd_momentum=args.sgd_momentum,
            bf16=args.bf16,
            fp16=args.fp16,
            params_dtype=parameter_dtype(args),
            loss_scale=args.loss_scale,
            initial_loss_scale=args.initial_loss_scale,
            loss_scale_window=args.loss_scale_window,
            use_distributed_optimizer=args.use_distributed_optimizer,
            overlap_param_gather=args.overlap_param_gather,
        ),
        chunks,
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
        if len(chunks) > 1:
            config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size,
        lr_decay_steps=args.lr_decay_iters * args.global_batch_size,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # after a resume, too, the flags say what the schedule is
    )
    return optimizer, schedule


def _one_or_all(functions):
    return functions[0] if len(functions) == 1 else functions

"""Tiny real megatron-core GPT models, and one training step as Megatron takes it.

    with parallel(tp=2):                                   # tests.worlds; the layout is read from Megatron's groups
        chunks = build_gpt("dense", dtype=torch.bfloat16, hidden_dropout=0.1)
        result = train_step(chunks)                        # .loss, .losses, .grads
        optimizer = build_optimizer(chunks)                # optional: steps after the backwards
        train_step(chunks, optimizer=optimizer, step=1)

Parameters are filled by their global names: every layout starts from the same numbers, so losses compare. (Dropout
masks depend on the layout: with tensor parallelism ranks draw different ones.) Import this only where the CPU patches
are applied already, that is in functions that run in `tests.worlds.on_ranks`, or after `apply_cpu_patches()`.
"""

from __future__ import annotations

import argparse as text_source
import os
import re
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.worlds import known

DEVICE = os.environ.get("ACCELERATOR_KIND", "cpu")
VOCABULARY = 256
SEQUENCE = 32
KINDS = ("dense", "swiglu_gqa_rope", "mla", "moe", "dropout")

_GLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False}
_OF_KIND: dict[str, dict[str, Any]] = {
    "dense": {},
    "swiglu_gqa_rope": _GLU | {"normalization": "RMSNorm", "num_query_groups": 2, "position_embedding_type": "rope"},
    "mla": _GLU
    | {"normalization": "RMSNorm", "multi_latent_attention": True, "position_embedding_type": "rope"}
    | {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
    | {"rope_type": "rope", "rotary_scaling_factor": 1.0},
    "moe": _GLU
    | {"normalization": "RMSNorm", "num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01}
    | {"moe_token_dispatcher_type": "alltoall", "moe_ffn_hidden_size": 64},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
}


@dataclass
class StepResult:
    """What one `train_step` gave on this rank."""

    loss: float
    """Mean over all micro-batches of all data-parallel ranks; the same on every rank."""
    losses: list[torch.Tensor]
    """Of this rank's micro-batches, in order; only on the last pipeline stage."""
    grads: dict[str, torch.Tensor]
    """Of this rank's parameters by global name, after all reductions: fp32 copies of main_grad."""
    grad_norm: float | None = None
    """Over all parameters, before clipping; None without an optimizer."""


def build_gpt(
    kind: str = "dense",
    *,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    dtype: torch.dtype = torch.float32,
    sequence_parallel: bool = False,
    tied: bool = True,
    ddp: dict[str, Any] | None = None,
    change_spec: Callable[[Any], None] | None = None,
    **overrides: Any,
) -> list[torch.nn.Module]:
    """The model chunks of this rank (one for each virtual stage), in Megatron's DistributedDataParallel.

    kind: one of `KINDS`. ddp: fields of DistributedDataParallelConfig. change_spec: puts other modules into the spec of
    a layer. overrides: fields of TransformerConfig, and position_embedding_type. "mla" works inside `with
    applied("sdpa_*")` (tests.worlds).
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    expert_losses().clear()  # the number of layers in it is that of the first model
    fields = {**_OF_KIND[kind], **overrides}
    embedding = fields.pop("position_embedding_type", "learned_absolute")
    vpp = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    of_layout = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": vpp,
        "sequence_parallel": sequence_parallel,
        # Two stages that interleave must not batch their sends: they would be mixed up between the same two ranks.
        "batch_p2p_comm": vpp is None,
        "overlap_p2p_comm": vpp is not None,
    }
    of_type = {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype == torch.bfloat16}
    defaults = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
    mla = fields.get("multi_latent_attention", False)
    config = (MLATransformerConfig if mla else TransformerConfig)(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        **{**defaults, **of_layout, **of_type, **fields},
    )
    config.finalize_model_grads_func = finalize_model_grads
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        multi_latent_attention=mla,
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
    )
    if change_spec is not None:
        change_spec(spec)
    ahead = {}
    if fields.get("mtp_num_layers"):
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

        ahead["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    settings = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, **(ddp or {})})
    chunks = []
    for stage in range(vpp or 1):
        at = known(GPTModel.__init__, vp_stage=None if vpp is None else stage)  # before 0.13 one part only
        model = GPTModel(
            config,
            spec,
            VOCABULARY,
            SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **at),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **at),
            share_embeddings_and_output_weights=tied,
            position_embedding_type=embedding,
            **ahead,
            **at,
        )
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        fill_by_name(model)
        model.to(DEVICE)  # Megatron's own get_model does so: torch's norms are made on the host
        model = Float16Module(config, model) if config.bf16 or config.fp16 else model
        chunks.append(DistributedDataParallel(config, settings, model))
    _built.update(chunks)
    if settings.overlap_grad_reduce:  # reduce after the last micro-batch only
        config.no_sync_func = chunks[0].no_sync if vpp is None else [chunk.no_sync for chunk in chunks]
    return chunks


def expert_losses() -> dict[str, Any]:
    """What Megatron keeps of the experts' losses, by name: itself, whichever version it is."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker  # from 0.18 on

        return get_moe_metrics_tracker()._metrics
    except ImportError:
        from megatron.core.transformer.moe import moe_utils

        home = moe_utils if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker") else moe_utils.parallel_state
        return home.get_moe_layer_wise_logging_tracker()


_built: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def forget_routing(chunks: Iterable[torch.nn.Module] | None = None) -> None:
    """Drop the last micro-batch's tensors from the token dispatchers of experts; None: of all models built here.

    Their graph keeps a trained model with experts alive after its last use, and with it the threads of its process
    groups, which cost time even when idle. Megatron does so with or without this pack. Of all models the scale of the
    experts' loss as well, which keeps the shape that its first user gave it, a schedule or none.
    """
    moe_utils = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    if chunks is None and moe_utils is not None:
        moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    for chunk in list(_built) if chunks is None else chunks:
        for module in chunk.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            if dispatcher is not None:
                vars(dispatcher).clear()


def build_optimizer(chunks: list[torch.nn.Module], *, lr: float = 1e-3, **overrides: Any) -> Any:
    """Megatron's optimizer around torch's AdamW, distributed if the chunks are. overrides: of OptimizerConfig."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = chunks[0].config
    fields = {
        "optimizer": "adam",
        "lr": lr,
        "weight_decay": 0.01,
        "clip_grad": 1.0,
        "bf16": config.bf16,
        "params_dtype": config.params_dtype,
        "use_distributed_optimizer": chunks[0].ddp_config.use_distributed_optimizer,
        **known(OptimizerConfig, overlap_param_gather=chunks[0].ddp_config.overlap_param_gather),
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(**{**fields, **overrides}), chunks)
    config.grad_scale_func = optimizer.scale_loss
    return optimizer


def train_step(
    chunks: list[torch.nn.Module],
    *,
    micro_batches: int = 4,
    micro_batch_size: int = 2,
    step: int = 0,
    optimizer: Any = None,
    forward_only: bool = False,
    attention_mask: bool = False,
) -> StepResult:
    """Forward and backward of one global batch with Megatron's own schedule, then the optimizer's step if given.

    micro_batches: of all data-parallel ranks together, which take turns. step: which part of the text. Gradients are
    those of this step alone. attention_mask: pass the causal mask as a tensor, as pretrain_gpt.py does, not None.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    ranks = parallel_state.get_data_parallel_world_size()
    mine = parallel_state.get_data_parallel_rank()
    first = step * micro_batches
    numbers = range(first + mine, first + micro_batches, ranks)
    parts, part = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=DEVICE).triu(1) if attention_mask else None

    def forward_step(
        batches: Iterator[torch.Tensor], model: torch.nn.Module, return_schedule_plan: bool = False
    ) -> tuple[torch.Tensor, Any]:
        text = next(batches)
        positions = torch.arange(SEQUENCE, device=DEVICE).unsqueeze(0).expand(micro_batch_size, -1)
        run = model.build_schedule_plan if return_schedule_plan else model
        words, positions, labels = (
            one.chunk(parts, 1)[part].contiguous() for one in (text[:, :-1], positions, text[:, 1:])
        )
        output = run(words, positions, mask, labels=labels)

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mean = output.float().mean()
            return mean, {"loss": mean.detach().clone()}

        return output, loss

    for chunk in chunks:
        chunk.zero_grad_buffer()
    if optimizer is not None:
        optimizer.zero_grad()
    done = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(_texts(numbers, micro_batch_size)) for _ in chunks],
        model=chunks,
        num_microbatches=len(numbers),
        seq_length=SEQUENCE,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
    )
    losses = [one["loss"] for one in done]
    grads = {}
    if not forward_only:
        grads = {name: parameter.main_grad.float().clone() for name, parameter in global_parameters(chunks)}
    result = StepResult(_mean_loss(losses, micro_batches), losses, grads)
    if optimizer is not None and not forward_only:
        result.grad_norm = float(optimizer.step()[1])
    return result


def global_parameters(chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Names that are the same in every layout, with this rank's parameters (for tensor parallelism its shards)."""
    from megatron.core import parallel_state

    for chunk in chunks:
        model = chunk
        while hasattr(model, "module"):
            model = model.module
        experts = (model.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
        before = parallel_state.get_expert_model_parallel_rank() * experts

        def layer(match: re.Match, model: Any = model) -> str:
            return f"layers.{model.decoder.layers[int(match[1])].layer_number - 1}."

        def expert(match: re.Match, before: int = before) -> str:
            return f"local_experts.{int(match[1]) + before}."

        for name, parameter in model.named_parameters():
            name = re.sub(r"layers\.(\d+)\.", layer, name, count=1)
            name = re.sub(r"local_experts\.(\d+)\.", expert, name)
            if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"
            yield name, parameter


@torch.no_grad()
def fill_by_name(model: torch.nn.Module) -> None:
    """Fill the weights from generators seeded by their global names; norms and biases keep their defaults."""
    from megatron.core import parallel_state

    ranks = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in global_parameters([model]):
        if "norm" in name or name.endswith("bias"):
            continue
        shape = list(parameter.shape)
        shard = ranks if getattr(parameter, "tensor_model_parallel", False) else 1
        dim = parameter.partition_dim if shard > 1 else 0
        shape[dim] *= shard
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        full = torch.randn(shape, generator=generator) * 0.05
        # Each rank of a gated layer holds its part of the gate and its part of the rest.
        halves = 2 if shard > 1 and model.config.gated_linear_unit and "linear_fc1" in name else 1
        parts = [half.chunk(shard, dim)[rank if shard > 1 else 0] for half in full.chunk(halves, dim)]
        parameter.copy_(torch.cat(parts, dim))


def _texts(numbers: range, micro_batch_size: int) -> Iterator[torch.Tensor]:
    """Micro-batches [micro_batch_size, SEQUENCE + 1] of int64 bytes; the number tells which."""
    with open(text_source.__file__, "rb") as file:
        data = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        starts = torch.randint(0, len(data) - SEQUENCE - 1, (micro_batch_size,), generator=generator)
        yield torch.stack([data[start : start + SEQUENCE + 1] for start in starts]).to(DEVICE)


def _mean_loss(losses: list[torch.Tensor], micro_batches: int) -> float:
    """The mean over all ranks, from the last stages, given to everybody."""
    from megatron.core import parallel_state

    total = torch.zeros((), dtype=torch.float64, device=DEVICE)
    if losses and parallel_state.get_tensor_model_parallel_rank() == 0:
        total += torch.stack(losses).double().sum()
    torch.distributed.all_reduce(total)
    return float(total) / micro_batches

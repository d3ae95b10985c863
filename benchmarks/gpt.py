"""A GPT on one rank for benchmarks: Llama-like layers of megatron-core's local specification."""

from __future__ import annotations

import torch
import torch.distributed as dist


def start_one_rank(device_type: str) -> torch.device:
    """A process group and model-parallel groups of one rank; returns the device."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    device = torch.device(device_type, 0) if device_type != "cpu" else torch.device("cpu")
    if device_type != "cpu":
        torch.get_device_module(device_type).set_device(device)
    backend = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[device_type]
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # no port that another may have
    parallel_state.initialize_model_parallel()
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234)
    return device


def build(device: torch.device, layers: int, hidden: int, heads: int, ffn: int, seq: int, vocab: int, dtype):
    """SwiGLU, RMSNorm, rotary positions, untied embeddings; parameters of ``dtype``."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=ffn,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=device.type != "cpu",
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab,
        seq,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return model.to(device=device, dtype=dtype)


def make_step(model, device: torch.device, seq: int, micro_batch: int, micro_batches: int, vocab: int):
    """One training step without the optimizer, on fixed random tokens; returns the losses."""
    from megatron.core.pipeline_parallel import schedules

    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, vocab, (micro_batches, micro_batch, seq), generator=generator).to(device)
    positions = torch.arange(seq, device=device).unsqueeze(0).expand(micro_batch, seq)

    def forward_step(iterator, model):
        batch = next(iterator)
        output = model(batch, positions, None, labels=batch)
        return output, lambda out: (out.float().mean(), {"loss": out.detach().float().mean()})

    def step() -> list[float]:
        model.zero_grad(set_to_none=False)  # as with gradient buffers: their memory is there all the time
        reduced = schedules.get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(tokens),
            model=model,
            num_microbatches=micro_batches,
            seq_length=seq,
            micro_batch_size=micro_batch,
            forward_only=False,
        )
        return [float(entry["loss"]) for entry in reduced]

    return step

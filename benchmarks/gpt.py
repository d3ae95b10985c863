"""A GPT on one rank for benchmarks: Llama-like layers, megatron-core's own or TransformerEngine's."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_mem.device import Backend, get_backend
from mindspeed_mem.zero.core.shard_memory import device_of

IMPLEMENTATIONS = ("local", "transformer_engine")
"""Whose layers: megatron-core's own, or TransformerEngine's."""


def start_one_rank(device_type: str) -> torch.device:
    """A process group and model-parallel groups of one rank; returns the device."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    backend = get_backend(device_type)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # for Megatron's gloo groups: look up no name
    dist.init_process_group(
        backend.collectives, store=dist.HashStore(), rank=0, world_size=1
    )  # no port that another may have
    parallel_state.initialize_model_parallel()
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234)
    return device_of(backend)


def known(function: Callable, **given: Any) -> dict[str, Any]:
    """Those arguments that the installed megatron-core's function takes."""
    return {name: value for name, value in given.items() if name in inspect.signature(function).parameters}


@functools.cache
def compiles(backend: Backend) -> bool:
    """Whether this device can run what torch.compile makes, as Megatron's fused activation is made: on a GPU that takes
    triton and a C compiler."""
    if backend.is_host:
        return False
    try:
        torch.compile(lambda x: torch.nn.functional.silu(x) * x)(torch.ones(8, device=device_of(backend)))
    except Exception as error:  # whatever a compiler raises
        print(f"nothing is compiled here: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr, flush=True)
        return False
    return True


@functools.cache
def repair_megatron(backend: Backend) -> None:
    """Let selective recompute of norms work without TransformerEngine: megatron-core 0.16.1 asks ``fp8 is not None``
    with a default of False, and then for names of TransformerEngine."""
    from megatron.core.tensor_parallel import random

    if random.HAVE_TE or backend.is_host:  # on a host the pack sees to it
        return
    original = random.CheckpointWithoutOutput.__init__

    def without_fp8(self, fp8=False):
        original(self, None if fp8 is False else fp8)

    random.CheckpointWithoutOutput.__init__ = without_fp8


def build(
    backend: Backend,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    seq: int,
    vocab: int,
    dtype: torch.dtype,
    transformer_impl: str = "local",
    **more: Any,
) -> torch.nn.Module:
    """SwiGLU, RMSNorm, rotary positions, untied embeddings; parameters of ``dtype``. ``more``: for its config."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.transformer_config import TransformerConfig

    repair_megatron(backend)
    fields = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": ffn,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "gradient_accumulation_fusion": False,  # these need Apex or TransformerEngine
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": compiles(backend),
    }
    config = TransformerConfig(**(fields | more))
    experts = {"num_experts": config.num_moe_experts, "moe_grouped_gemm": config.moe_grouped_gemm}
    if transformer_impl == "local":
        spec = specs.get_gpt_layer_local_spec(normalization="RMSNorm", **experts)
    else:
        spec = specs.get_gpt_layer_with_transformer_engine_spec(**experts)
    with _fusing_without_apex() if transformer_impl != "local" else contextlib.nullcontext():
        model = GPTModel(
            config,
            spec,
            vocab,
            seq,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
    return model.to(device=device_of(backend), dtype=dtype)


@contextlib.contextmanager
def _fusing_without_apex() -> Iterator[None]:
    """Megatron's own linears, such as the output layer of a model, are made without gradient_accumulation_fusion where
    Apex is not there, also if the config asks for it, as it may for TransformerEngine's, which need no Apex."""
    from megatron.core.tensor_parallel import layers

    original = layers.ColumnParallelLinear.__init__

    def without(self, *args, config, **more):
        here = copy.copy(config)
        here.gradient_accumulation_fusion &= layers._grad_accum_fusion_available
        original(self, *args, config=here, **more)

    layers.ColumnParallelLinear.__init__ = without
    try:
        yield
    finally:
        layers.ColumnParallelLinear.__init__ = original


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

"""megatron.core without TransformerEngine, Apex and triton: norms, router, fused gradients, checkpoints, stand-ins."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed


def norms(normalization: str) -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "normalization": normalization}
    # As Megatron-LM's flags have it by default, with sequence parallelism.
    config = TransformerConfig(**fields, tensor_model_parallel_size=2, sequence_parallel=True, persist_layer_norm=True)
    norm = WrappedTorchNorm(config, 8)
    assert all(parameter.sequence_parallel for parameter in norm.parameters())
    assert config.sequence_parallel and config.persist_layer_norm
    alone = WrappedTorchNorm(TransformerConfig(**fields), 8)
    assert not any(parameter.sequence_parallel for parameter in alone.parameters())
    with pytest.raises(AssertionError, match="zero_centered_gamma"):
        WrappedTorchNorm(TransformerConfig(**fields, layernorm_zero_centered_gamma=True), 8)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_norms_work_with_sequence_parallelism(normalization):
    on_ranks(1, norms, normalization)


def softmax() -> torch.Tensor:
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.utils import attention_mask_func

    fused = FusedScaleMaskSoftmax(False, True, AttnMaskType.causal, True, attention_mask_func, True, None)
    return fused(torch.zeros(2, 2, 32, 32, dtype=torch.bfloat16), None)


def test_the_fused_softmax_flag_needs_no_cuda_kernel():
    (weights,) = on_ranks(1, softmax)
    rows = torch.arange(1, 33, dtype=torch.float32)
    expected = (1 / rows)[:, None].expand(32, 32).tril().bfloat16()
    assert torch.equal(weights[1, 1], expected)


def splits() -> None:
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.moe.moe_utils import maybe_move_tensor_to_cpu

    assert token_dispatcher.maybe_move_tensor_to_cpu is maybe_move_tensor_to_cpu
    sizes = maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True)
    assert not torch.is_tensor(sizes) and sizes.tolist() == [1, 2]
    assert torch.is_tensor(maybe_move_tensor_to_cpu(torch.tensor([1, 2]), record_stream=True))


def test_split_sizes_are_numbers():
    on_ranks(1, splits)


def fused_gradients(main_dtype: torch.dtype) -> None:
    from megatron.core.tensor_parallel import layers

    accumulate = layers.fused_weight_gradient_mlp_cuda
    total, grad = torch.randn(6, 3), torch.randn(6, 2)
    main = torch.ones(2, 3, dtype=main_dtype)
    name = "wgrad_gemm_accum_fp32" if main_dtype == torch.float32 else "wgrad_gemm_accum_fp16"
    getattr(accumulate, name)(total, grad, main)
    torch.testing.assert_close(main.float(), 1 + grad.t() @ total, rtol=2e-2, atol=5e-2)
    assert main.dtype == main_dtype


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_accumulate(main_dtype):
    on_ranks(1, fused_gradients, main_dtype)


def checkpointed(folder: str, ddp: dict, sharding: str, dtype: str) -> tuple[list[float], list[float]]:
    """Losses after a save, going on in one run and in one that loads it."""
    from megatron.core import dist_checkpointing

    from tests.models import build_gpt, build_optimizer, train_step

    def build():
        chunks = build_gpt("dense", layers=2, ddp=ddp, dtype=getattr(torch, dtype))
        return chunks, build_optimizer(chunks)

    def unwrapped(chunks):
        model = chunks[0]
        while hasattr(model, "module"):
            model = model.module
        return model

    def sharded(chunks, optimizer, is_loading):
        state = {"model": unwrapped(chunks).sharded_state_dict()}
        metadata = {"distrib_optim_sharding_type": sharding}
        more = {"metadata": metadata} if ddp else {}
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, **more)
        return state

    with parallel():
        chunks, optimizer = build()
        for step in range(3):
            train_step(chunks, optimizer=optimizer, step=step)
        dist_checkpointing.save(sharded(chunks, optimizer, False), folder)
        onward = [train_step(chunks, optimizer=optimizer, step=step).loss for step in range(3, 6)]
        chunks, optimizer = build()
        state = dist_checkpointing.load(sharded(chunks, optimizer, True), folder)
        unwrapped(chunks).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return onward, [train_step(chunks, optimizer=optimizer, step=step).loss for step in range(3, 6)]


SHARDED = {"use_distributed_optimizer": True}


@pytest.mark.parametrize(
    ("size", "ddp", "sharding", "dtype"),
    [
        pytest.param(1, {}, "", "float32", id="plain"),
        pytest.param(2, SHARDED, "dp_reshardable", "float32", id="dp_reshardable"),
        pytest.param(2, SHARDED, "fully_reshardable", "float32", id="fully_reshardable"),
        pytest.param(2, SHARDED, "dp_reshardable", "bfloat16", id="bf16"),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, size, ddp, sharding, dtype):
    """Not only its first loss, which needs no optimizer state: the next ones show the moments and the step count."""
    for onward, resumed in on_ranks(size, checkpointed, str(tmp_path), ddp, sharding, dtype):
        assert resumed == onward


def offloaded() -> None:
    from mindspeed_mem.features import FeatureError
    from tests.models import build_gpt, build_optimizer

    with parallel():
        chunks = build_gpt("dense", layers=1)
        with pytest.raises(FeatureError, match="--optimizer-cpu-offload .*has nothing to move on a cpu.* Leave it out"):
            build_optimizer(chunks, optimizer_cpu_offload=True)


def test_an_offloaded_optimizer_says_that_everything_is_on_the_host():
    on_ranks(1, offloaded)


def stand_ins() -> None:
    from megatron.core.transformer.custom_layers import batch_invariant_kernels as kernels

    assert not kernels.is_batch_invariant_mode_enabled()
    with pytest.raises(RuntimeError, match="need triton: leave --batch-invariant-mode out"):
        kernels.enable_batch_invariant_mode()


def state_space():
    """A model of state-space layers says what it lacks."""
    from megatron.core.models.mamba import MambaModel, mamba_layer_specs
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=2, is_hybrid_model=True)
    with parallel(), pytest.raises(ImportError, match="(?i)mamba.?ssm"):
        MambaModel(config, mamba_layer_specs.mamba_stack_spec, 256, 32, hybrid_override_pattern="M")


def test_a_state_space_model_says_what_it_lacks():
    on_ranks(1, state_space)


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is installed")
def test_megatron_training_finds_its_triton_module():
    on_ranks(1, stand_ins)


def helpers() -> None:
    import numpy
    from megatron.core.datasets.helpers import build_sample_idx
    from megatron.core.datasets.utils import compile_helpers

    compile_helpers()  # not by make: the wheel has no Makefile
    found = build_sample_idx(numpy.array([5, 5], numpy.int32), numpy.array([0, 1], numpy.int32), 3, 1, 10, True, 1)
    assert found.tolist() == [[0, 0], [0, 3], [1, 1], [1, 4]]


def test_the_wheels_dataset_helpers_are_taken():
    on_ranks(1, helpers)


class Sums(TorchDispatchMode):
    """Elements of what is cast on the way into an fp32 tensor, operator by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.cast: list[int] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.add_.Tensor and args[0].dtype != args[1].dtype:
            self.cast.append(args[1].numel())
        return operator(*args, **(kwargs or {}))


def added(fused: bool) -> list[int]:
    """A 16-bit gradient twice into Megatron's fp32 one: what was cast."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(1)
    with parallel():
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
        layer = torch.nn.Linear(300, 500, bias=False, dtype=torch.bfloat16)
        model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), layer)
        weight = layer.weight
        model.zero_grad_buffer()
        gradients = [torch.randn(500, 300).bfloat16() for _ in range(2)]
        with Sums() as sums:
            for gradient in gradients:
                weight.grad_added_to_main_grad = fused  # as a layer leaves it that adds by itself
                (weight * gradient).sum().backward()
                assert weight.grad is None and weight.grad_added_to_main_grad == fused
        assert torch.equal(weight.main_grad, torch.zeros(500, 300) if fused else gradients[0].float() + gradients[1])
    return sums.cast


def test_gradients_are_added_in_tiles():
    """torch's CPU kernel would cast 150,000 elements at a time, into memory that no device takes."""
    (cast,) = on_ranks(1, added, False)
    assert sum(cast) == 2 * 150_000 and max(cast) <= 2**16


def test_a_gradient_that_its_layer_has_added_is_not_added_again():
    assert on_ranks(1, added, True) == [[]]

"""One GPT in data-parallel training, sharded in several ways: Megatron's, the pack's and torch's (FSDP2).

All start from the same parameters, see the same batches, and use AdamW in fp32 with the same settings.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from gpt import build, known
from two_memories import TwoMemories, offloading

import mindspeed_mem.megatron_adaptor as mem
from mindspeed_mem.device import Backend
from mindspeed_mem.patching import REGISTRY
from mindspeed_mem.zero.buffers import runtime
from mindspeed_mem.zero.buffers.settings import ChunkSettings

PATCHES = [importlib.import_module(name).__name__ for name in mem.patch_modules(["pass_events", "chunk_*"])]
RATE, DECAY, CLIP = 1e-3, 1e-2, 1.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all of them train, and where."""

    backend: Backend
    device: torch.device
    memories: TwoMemories
    shape: dict[str, int]
    """See `chunk_zero.SHAPE`."""
    chunk_elements: int
    """At which a bucket of Megatron's, or a chunk, is closed."""
    config: dict[str, Any] = field(default_factory=dict)
    """More for `gpt.build`."""

    def model(self) -> torch.nn.Module:
        """A GPTModel in bf16, always with the same parameters."""
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        torch.manual_seed(1234)
        model_parallel_cuda_manual_seed(1234, **known(model_parallel_cuda_manual_seed, force_reset_rng=True))
        names = ("layers", "hidden", "heads", "ffn", "seq_length", "vocab")
        return build(self.backend, *(self.shape[name] for name in names), torch.bfloat16, **self.config)

    def batches(self) -> torch.Tensor:
        """This rank's tokens [micro-batches, micro-batch, sequence] of every step."""
        generator = torch.Generator().manual_seed(7 + dist.get_rank())
        size = [self.shape[name] for name in ("micro_batches", "micro_batch_size", "seq_length")]
        return torch.randint(0, self.shape["vocab"], size, generator=generator).to(self.device)

    def positions(self) -> torch.Tensor:
        size = self.shape["micro_batch_size"], self.shape["seq_length"]
        return torch.arange(size[1], device=self.device).unsqueeze(0).expand(size)


class Megatron:
    """Megatron's distributed optimizer, with the pack's chunks if settings for them are given.

    offload: Megatron's own, of the optimizer.
    """

    def __init__(
        self,
        job: Job,
        *,
        overlap: bool = True,
        chunks: ChunkSettings | None = None,
        offload: bool = False,
    ) -> None:
        self._job, self._chunks, self._offload, self.runtime = job, chunks, offload, None
        with self.active():
            self._build(overlap)
            self.runtime = runtime.current()
        self._batches, self._positions = job.batches(), job.positions()

    def _build(self, overlap: bool) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
        from megatron.core.transformer.module import Float16Module

        model = self._job.model()
        config = model.config
        for parameter in model.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
            bucket_size=self._job.chunk_elements,
        )
        self.model = DistributedDataParallel(config, settings, Float16Module(config, model))
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = self.model.no_sync if overlap else None
        asked: dict[str, Any] = {"optimizer": "adam", "lr": RATE, "weight_decay": DECAY, "clip_grad": CLIP}
        asked |= {"bf16": True, "params_dtype": torch.bfloat16}
        asked |= {"use_distributed_optimizer": True, **known(OptimizerConfig, overlap_param_gather=overlap)}
        if self._offload:
            asked |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
            asked |= {"overlap_cpu_optimizer_d2h_h2d": True}
        config_of_optimizer = OptimizerConfig(**asked)
        if self._offload:
            # Without it masters stay on the device. Set afterwards: asked for, it wants a version of
            # TransformerEngine, also where, as here, nothing of that is used.
            config_of_optimizer.use_precision_aware_optimizer = True
            config_of_optimizer.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        # All of what an optimizer makes that is offloaded as a whole is the host's.
        with self._job.memories.hosted() if self._offload else contextlib.nullcontext():
            self.optimizer = get_megatron_optimizer(config_of_optimizer, [self.model])
        if self._offload:
            self._let_step_on_host()
        config.grad_scale_func = self.optimizer.scale_loss

    def _let_step_on_host(self) -> None:
        for one in self.optimizer.chained_optimizers:
            inner = one.optimizer
            step = inner.step

            def hosted_step(*args, inner=inner, step=step):
                with self._job.memories.hosted():
                    result = step(*args)
                for gradient in inner.cpu_copy_map_grad.values():
                    self._job.memories.mark(gradient)
                return result

            inner.step = hosted_step

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Everything about this model happens inside: with the patches it was built with, and no others."""
        if self._chunks is not None:
            REGISTRY.apply(PATCHES)
            runtime.resume(self.runtime or runtime.Runtime(self._chunks))
        try:
            with offloading(self._job.memories) if self._offload else contextlib.nullcontext():
                yield
        finally:
            if self._chunks is not None:
                runtime.resume(None)
                REGISTRY.undo(PATCHES)

    def step(self) -> list[float]:
        """One training step: the losses of its micro-batches, and the gradients' norm."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward(batches, model):
            batch = next(batches)
            output = model(batch, self._positions, None, labels=batch)
            return output, lambda out: (out.float().mean(), {"loss": out.detach().float().mean()})

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(self._batches),
            model=self.model,
            num_microbatches=len(self._batches),
            seq_length=self._batches.shape[-1],
            micro_batch_size=self._batches.shape[1],
            forward_only=False,
        )
        norm = self.optimizer.step()[1]
        return [*(float(entry["loss"]) for entry in reduced), float(norm)]


class Fsdp2:
    """torch's fully_shard on each layer and on the model around them: the same GPTModel without Megatron's wrappers.

    whole_gradients: gradients are added up unsharded and reduced once in a step, as Megatron does it; otherwise they
    are reduced with each micro-batch, which is what FSDP2 does by itself.
    """

    runtime = None

    def __init__(self, job: Job, *, reshard: bool, whole_gradients: bool = False, offload: bool = False) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        self._job, self._whole_gradients, self._offload = job, whole_gradients, offload
        self.model = job.model().float()
        told_apart = job.memories.told_apart
        options = {
            "mesh": dist.init_device_mesh(job.device.type, (dist.get_world_size(),)),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=torch.bfloat16,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,  # or rotary embeddings would be rounded
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=told_apart) if offload else OffloadPolicy(),
            "reshard_after_forward": reshard,
        }
        with self.active():
            for layer in self.model.decoder.layers:
                fully_shard(layer, **options)
            fully_shard(self.model, **options)
        params = list(self.model.parameters())
        groups = [
            {"params": [one for one in params if one.dim() > 1]},
            {"params": [one for one in params if one.dim() == 1], "weight_decay": 0.0},  # as Megatron has it
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY, fused=True if offload else None)
        self._batches, self._positions = job.batches(), job.positions()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with offloading(self._job.memories) if self._offload else contextlib.nullcontext():
            yield

    def step(self) -> list[float]:
        """As `Megatron.step`."""
        memories, losses = self._job.memories, []
        hosted = memories.hosted if self._offload else contextlib.nullcontext
        self.optimizer.zero_grad(set_to_none=True)
        for number, batch in enumerate(self._batches):
            if self._whole_gradients:
                self.model.set_requires_gradient_sync(number == len(self._batches) - 1)
            loss = self.model(batch, self._positions, None, labels=batch).float().mean()
            losses.append(loss.detach())
            (loss / len(self._batches)).backward()
        with hosted():
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            return [*map(float, losses), float(norm.full_tensor())]

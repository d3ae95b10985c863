"""Trains tiny models with chunk ZeRO and with Megatron's own distributed optimizer, whose buckets are the same.

    found = on_ranks(2, differences, {"bf16": Case(), "PP2": Case(layout={"pp": 2})})     # [[], []]

Import this where the CPU patches are applied, or the accelerator is: in functions that `tests.worlds.on_ranks` runs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed_mem.device import get_backend
from mindspeed_mem.zero.buffers import runtime
from mindspeed_mem.zero.buffers.settings import ChunkSettings
from mindspeed_mem.zero.core.placement import Placement
from tests.models import DEVICE, SEQUENCE, _texts, build_gpt, build_optimizer, forget_routing
from tests.worlds import applied, parallel

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@dataclass(frozen=True)
class Case:
    """What is trained, and how. Other names as in tests.models."""

    kind: str = "dense"
    dtype: torch.dtype = torch.bfloat16
    layout: dict[str, int] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 2
    """Of each data-parallel rank."""
    steps: int = 3
    """An evaluation comes before the last one."""
    chunk: int = 16384
    """Elements after which a chunk is closed."""
    budget: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """More fields of ChunkSettings."""
    per_token: bool = False
    """The loss is a sum over tokens, whose number the gradients are divided by in the end."""
    align: bool = False
    """Gradients are reduced, and parameters gathered, when the schedule says so."""
    around: tuple[Callable[[], contextlib.AbstractContextManager], ...] = ()
    """Entered around the run, such as other features; top-level functions or partials of them."""
    beneath: tuple[Callable[[], contextlib.AbstractContextManager], ...] = ()
    """The same for features whose patches lie beneath those of chunks."""
    during: Callable[[int, list[Any], Any], None] | None = None
    """Called before each step with its number, the models and the optimizer."""
    stages: tuple[int, ...] = (2, 3)
    deviates: bool = False
    """Passes of one kind are not all alike."""


@dataclass
class Run:
    """What a case gave on this rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    masters: str = ""
    problems: list[str] = field(default_factory=list)

    def numbers(self) -> tuple[Any, ...]:
        return self.losses, self.norms, self.masters


@contextlib.contextmanager
def chunked(stage: int, *, chunk: int = 16384, budget: int | None = None, **more: Any) -> Iterator[None]:
    """Chunk ZeRO of this stage for models built inside; stage 0: Megatron alone, with the same buckets."""
    given = ChunkSettings(
        stage=stage or 3,
        min_chunk_size=chunk,
        search_range=0,
        **{"placement": Placement(budget=budget), "backend": get_backend(DEVICE), **more},
    )
    if not stage:
        with _same_buckets(given):
            yield
        return
    runtime.use(given)
    try:
        with applied("chunk_*"):
            yield
    finally:
        runtime.use(ChunkSettings())


@contextlib.contextmanager
def _same_buckets(given: ChunkSettings) -> Iterator[None]:
    """Megatron makes the buckets that chunk ZeRO would, where left alone it makes only one."""
    from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    sizes = runtime.Runtime(given)

    def size(ddp_config: Any, params: list[Any], ranks: int) -> int:
        plain = [one[0] if isinstance(one, tuple) else one for one in params]  # from 0.17 on they come with names
        return sizes.bucket_size(plain, ranks, ddp_config.pad_buckets_for_high_nccl_busbw)

    buffer_init, ddp_init = _ParamAndGradBuffer.__init__, DistributedDataParallel.__init__

    def buffer(self, ddp_config, param_dtype, grad_dtype, params, group, bucket_size, *rest, **more):
        bucket_size = size(ddp_config, params, group.size())
        buffer_init(self, ddp_config, param_dtype, grad_dtype, params, group, bucket_size, *rest, **more)

    def ddp(self, config, *args, **kwargs):
        sizes.hidden_size = config.hidden_size
        ddp_init(self, config, *args, **kwargs)

    replaced = [(_ParamAndGradBuffer, "__init__", buffer), (DistributedDataParallel, "__init__", ddp)]
    if hasattr(DistributedOptimizer, "_compute_per_buffer_param_layout"):  # from 0.18 on it says where buckets end
        layout = DistributedOptimizer._compute_per_buffer_param_layout

        def laid_out(params, bucket_size, ranks, ddp_config, *rest, **more):
            return layout(params, size(ddp_config, params, ranks), ranks, ddp_config, *rest, **more)

        replaced.append((DistributedOptimizer, "_compute_per_buffer_param_layout", staticmethod(laid_out)))
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in replaced]
    for owner, name, ours in replaced:
        setattr(owner, name, ours)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def differences(cases: dict[str, Case]) -> list[str]:
    """Where chunk ZeRO differs from Megatron in any bit, and what it leaves behind; empty when all is well."""
    found = []
    for name, case in cases.items():
        with parallel(**case.layout):
            expected = _trained(0, case)
            for stage in case.stages:
                run = _trained(stage, case)
                found += [f"{name}, stage {stage}: {problem}" for problem in run.problems]
                if run.numbers() != expected.numbers():
                    found.append(f"{name}, stage {stage}: {run.numbers()} instead of {expected.numbers()}")
    return found


def trained(stage: int, case: Case) -> Run:
    """Train a new model: `Case.steps` steps, and an evaluation before the last one."""
    with parallel(**case.layout):
        return _trained(stage, case)


def _trained(stage: int, case: Case) -> Run:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    run = Run()
    with contextlib.ExitStack() as stack:
        for one in case.beneath:
            stack.enter_context(one())
        stack.enter_context(chunked(stage, chunk=case.chunk, budget=case.budget, **case.settings))
        for one in case.around:
            stack.enter_context(one())
        models, optimizer = built(case)
        now = runtime.current()
        for step in range(case.steps):
            if case.during is not None:
                case.during(step, models, optimizer)
            if step == case.steps - 1:
                run.losses.append(passed(models, case, step + 100, forward_only=True))
            run.losses.append(passed(models, case, step))
            run.norms.append(stepped(optimizer))
        run.masters = masters(optimizer)
        if now is not None:
            run.problems += left_over(now, case)
        forget_routing(models)
        RotaryEmbedding.forward.cache_clear()  # Megatron keeps the tables' modules, and their hooks keep the model
        del models, optimizer
        gc.collect()
        if now is not None and now.gathering.chunks:
            run.problems.append(f"{len(now.gathering.chunks)} chunks of a model that is gone")
    return run


def built(case: Case) -> tuple[list[Any], Any]:
    """The models and their optimizer."""
    ddp = {"use_distributed_optimizer": True, **case.ddp}
    model = {"layers": 4 if "pp" in case.layout else 3, **case.model}
    if case.per_token:
        model["calculate_per_token_loss"] = True
    if case.dtype is torch.float16:
        model["fp16"] = True
    models = build_gpt(case.kind, dtype=case.dtype, ddp=ddp, **model)
    if case.align:
        config = models[0].config
        config.grad_sync_func = [one.start_grad_sync for one in models]
        config.grad_sync_func = config.grad_sync_func if len(models) > 1 else config.grad_sync_func[0]
        if len(models) > 1:
            config.param_sync_func = [one.start_param_sync for one in models]
    optimizer = build_optimizer(models, **{"fp16": case.dtype is torch.float16, **case.optimizer})
    return models, optimizer


def passed(models: list[Any], case: Case, step: int, forward_only: bool = False) -> float:
    """Zero the gradients and run one schedule; this rank's mean loss, 0 where there is none."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    ranks, mine = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    first = step * case.micro_batches * ranks
    numbers = range(first + mine, first + case.micro_batches * ranks, ranks)
    if not forward_only:
        for model in models:
            model.zero_grad_buffer()
    done = get_forward_backward_func()(
        forward_step_func=functools.partial(_forward, case),
        data_iterator=[iter(list(_texts(numbers, 2))) for _ in models],
        model=models,
        num_microbatches=case.micro_batches,
        seq_length=SEQUENCE,
        micro_batch_size=2,
        forward_only=forward_only,
    )
    losses = [float(one["loss"]) for one in done]
    return sum(losses) / max(1, len(losses))


def _forward(case: Case, batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    text = next(batches)
    positions = torch.arange(SEQUENCE, device=DEVICE).unsqueeze(0).expand(len(text), -1)
    output = model(text[:, :-1].contiguous(), positions, None, labels=text[:, 1:].contiguous())

    def loss(output: torch.Tensor) -> tuple[Any, ...]:
        mean = output.float().mean()
        report = {"loss": mean.detach().clone()}
        if not case.per_token:
            return mean, report
        return output.float().sum(), torch.tensor(output.numel(), dtype=torch.int, device=DEVICE), report

    return output, loss


def stepped(optimizer: Any) -> float | None:
    """Take the optimizer's step; the gradient norm, None if it was skipped."""
    updated, norm, _ = optimizer.step()
    optimizer.zero_grad()
    return float(norm) if updated else None


def masters(optimizer: Any) -> str:
    """A digest of this rank's fp32 masters."""
    digest = hashlib.sha256()
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for groups in (one.shard_fp32_from_float16_groups, one.shard_fp32_groups):
            for master in (master for group in groups for master in group):
                digest.update(master.detach().contiguous().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def left_over(now: runtime.Runtime, case: Case) -> list[str]:
    """What should not be so after a run."""
    gathering, found = now.gathering, []
    counts = gathering.counts
    gathered = [chunk.label for chunk in gathering.chunks if chunk.gathered]
    if gathered or gathering.live_bytes:
        found.append(f"gathered after a step: {gathered}, {gathering.live_bytes} bytes")
    if counts.over_budget or (gathering.budget is not None and counts.peak_bytes > gathering.budget):
        found.append(f"above the budget of {gathering.budget} bytes: {counts}")
    if gathering.order.deviations and not case.deviates:
        found.append(f"{gathering.order.deviations} passes deviated")
    if now.settings.stage == 3 and not (gathering.chunks and counts.gathers):
        found.append("nothing was gathered")
    for one in now._models:
        whole = [chunk.label for chunk in one.chunks if chunk.grad.untyped_storage().nbytes()]
        found += [f"whole gradients after a step: {whole}"] * bool(whole)
    return found


@contextlib.contextmanager
def altered(*changes: Callable[[Any], None]) -> Iterator[None]:
    """Models built inside are changed by these, called with each GPTModel, before they are wrapped."""
    from megatron.core.models.gpt import GPTModel

    original = GPTModel.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        for change in changes:
            change(self)

    GPTModel.__init__ = init
    try:
        yield
    finally:
        GPTModel.__init__ = original


def chunk_of(models: list[Any], name: str) -> Any:
    """The chunk with the parameter that ends like this."""
    for model in models:
        for found, param in model.named_parameters():
            if found.endswith(name):
                return model.chunks_of_model.chunk_of(param)
    raise KeyError(name)


@contextlib.contextmanager
def failing_once(module: torch.nn.Module, in_backward: bool = False) -> Iterator[None]:
    """The next forward of `module`, or its backward, raises `Failure` in the middle of it."""

    def fail(*unused: Any) -> None:
        handle.remove()
        raise Failure

    def fail_later(_: Any, __: Any, output: Any) -> None:
        (output[0] if isinstance(output, tuple) else output).register_hook(fail)
        handle.remove()

    handle = module.register_forward_hook(fail_later if in_backward else fail)
    try:
        yield
    finally:
        handle.remove()


class Failure(Exception):
    """What a test's module raises."""

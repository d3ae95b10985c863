"""megatron.core.distributed: the buckets of a model's DistributedDataParallel become chunks.

Why here: everything about gradients and gathered parameters passes through DistributedDataParallel and its bucket
groups, whatever the loop. Which parameters lie in a bucket, scaling, checks for nan and the collective itself stay
Megatron's; what changes is when a bucket is reduced (also in the first step, also without overlap) and which memory
there is meanwhile.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from mindspeed_mem import features, ranks
from mindspeed_mem.patching import around
from mindspeed_mem.zero.buffers import runtime
from mindspeed_mem.zero.buffers.buckets import BucketChunks

_DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel."
_GROUP = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup."
_BUFFER = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer."
_LAYOUT = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._compute_per_buffer_param_layout"


@around(_DDP + "__init__")
def ddp_init(original, self, config, ddp_config, module, disable_bucketing=False, *args, **kwargs):
    now = runtime.current()
    if now is not None:
        now.hidden_size = config.hidden_size or now.hidden_size  # 0: that of no transformer
    ours = now is not None and now.settings.stage >= 2 and ddp_config.use_distributed_optimizer
    # Else upstream would put all buckets of a stage's later chunks into one group, to be reduced together.
    original(self, config, ddp_config, module, disable_bucketing and not ours, *args, **kwargs)
    buffers = [*self.buffers, *self.expert_parallel_buffers]
    if now is not None and ddp_config.use_distributed_optimizer:
        _agree(buffers)
        now.check_ranks(buffers)
        now.check_host(self, buffers)
    if now is None or not ours:
        return
    groups = {
        bucket: group for group in self.bucket_groups + self.expert_parallel_bucket_groups for bucket in group.buckets
    }

    def start_reduction(bucket):
        group = groups[bucket]
        group.chunks_of_model = None  # upstream's own reduction, this time
        try:
            group.start_grad_sync()
        finally:
            group.chunks_of_model = chunks
        work, group.grad_reduce_handle = group.grad_reduce_handle, None
        return _All(work) if isinstance(work, list) else work

    chunks = BucketChunks(
        self.module, buffers, now.settings.stage, now.gathering, start_reduction, config.gradient_accumulation_fusion
    )
    for owner in (self, *buffers, *groups.values()):
        owner.chunks_of_model = chunks
    chunks.reduce_each = now.settings.reduce_each
    now.add(self, chunks)


class _All:
    """MindSpeed's reduction has a handle for each bucket of the group."""

    def __init__(self, handles):
        self._handles = handles

    def wait(self):
        for handle in self._handles:
            handle.wait()


def _agree(buffers):
    """Ranks that share chunks have asked for the same, or none goes on: they would wait for each other for ever in the
    first step, without a word."""
    for group in dict.fromkeys(buffer.data_parallel_group for buffer in buffers):
        if group.size() > 1:
            asked = ranks.gather(features.for_all_ranks(features.in_force()), group)
            if problems := features.differing(asked, dist.get_process_group_ranks(group)):
                raise features.FeatureError(problems)


@around(_BUFFER + "__init__", before="0.17")
def buffer_init(original, self, ddp_config, param_dtype, grad_dtype, params, data_parallel_group, bucket_size, *rest):
    bucket_size = _bucket_size(ddp_config, params, data_parallel_group.size(), bucket_size)
    with _gradients_later(ddp_config):
        original(self, ddp_config, param_dtype, grad_dtype, params, data_parallel_group, bucket_size, *rest)


@around(_BUFFER + "__init__", since="0.17")
def named_buffer_init(
    original,
    self,
    ddp_config,
    param_dtype,
    grad_dtype,
    params_with_names,
    data_parallel_group,
    bucket_size,
    *rest,
    **kw,
):
    params = [param for param, _ in params_with_names]
    bucket_size = _bucket_size(ddp_config, params, data_parallel_group.size(), bucket_size)
    given = (ddp_config, param_dtype, grad_dtype, params_with_names, data_parallel_group, bucket_size)
    with _gradients_later(ddp_config):
        original(self, *given, *rest, **kw)


@around(_LAYOUT, since="0.18")
def layout(original, params, bucket_size, data_parallel_world_size, ddp_config, *rest, **more):
    """Where buckets end is settled here, for the buffers to come."""
    bucket_size = _bucket_size(ddp_config, params, data_parallel_world_size, bucket_size)
    return original(params, bucket_size, data_parallel_world_size, ddp_config, *rest, **more)


def _bucket_size(ddp_config, params, ranks, given):
    """Upstream makes one bucket of everything without overlap, behind the first pipeline stage, and of later chunks."""
    now = runtime.current() if ddp_config.use_distributed_optimizer else None
    if now is None or not now.cuts_buckets:
        return given
    return now.bucket_size(params, ranks, ddp_config.pad_buckets_for_high_nccl_busbw)


def _gradients_later(ddp_config):
    now = runtime.current() if ddp_config.use_distributed_optimizer else None
    return _GradientsLater() if now is not None and now.settings.stage >= 2 else contextlib.nullcontext()


class _GradientsLater(TorchFunctionMode):
    """A buffer makes memory for all parameters, then for all gradients: these without content, for chunks' sake."""

    made = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.zeros:
            self.made += 1
            kwargs = {**kwargs, "device": "meta"} if self.made == 2 else kwargs
        return function(*args, **(kwargs or {}))


@around(_BUFFER + "reset")
def buffer_reset(original, self):
    chunks = _of(self)
    if chunks is None:  # else the model has done it: see zero_grad_buffer
        original(self)


@around(_BUFFER + "scale_gradients")
def scale_gradients(original, self, scaling_factor):
    chunks = _of(self)
    if chunks is None:
        return original(self, scaling_factor)
    for bucket in self.buckets:
        shard = chunks.of_bucket(bucket).grad_shard  # perhaps on the host, which takes no factor from a device
        on_device = isinstance(scaling_factor, torch.Tensor) and scaling_factor.device != shard.device
        shard.mul_(scaling_factor.to(shard.device) if on_device else scaling_factor)


@around(_DDP + "zero_grad_buffer")
def zero_grad_buffer(original, self):
    chunks = _of(self)
    if chunks is not None:
        chunks.begin_step()
    original(self)


@around(_DDP + "_make_backward_post_hook")
def make_backward_post_hook(original, self, param):
    """Made before the model's chunks are, so they are looked for when the hook runs."""
    hook = original(self, param)

    def with_chunks(*unused):
        chunks = _of(self)
        if chunks is None:
            return hook(*unused)
        chunks.before_gradient(param)
        hook(*unused)
        last = chunks.reduce_each or self.param_to_bucket_group[param].is_last_microbatch
        chunks.after_gradient(param, last)

    return with_chunks


@around(_GROUP + "register_grad_ready")
def register_grad_ready(original, self, *args, **kwargs):
    if _of(self) is None:
        original(self, *args, **kwargs)


@around(_GROUP + "start_grad_sync")
def start_grad_sync(original, self, *args, **kwargs):
    chunks = _of(self)
    if chunks is None:
        return original(self, *args, **kwargs)
    for bucket in self.buckets:
        chunks.gradients.start(chunks.of_bucket(bucket))


@around(_GROUP + "finish_grad_sync")
def finish_grad_sync(original, self, *force_all_reduce, **named):
    chunks = _of(self)
    if chunks is None:
        return original(self, *force_all_reduce, **named)
    if any((*force_all_reduce, *named.values())):
        raise ValueError(
            "--save-wgrads-interval saves whole gradients, which no rank has with --chunk-zero-stage 2 or 3. Leave one "
            "of them out, or use --chunk-zero-stage 1"
        )
    self.param_gather_dispatched = False
    chunks.finish_gradients(self.buckets)


@around(_GROUP + "start_param_sync")
def start_param_sync(original, self, *args, **kwargs):
    """With stage 3 parameters are gathered when a module needs them, and only then."""
    chunks = _of(self)
    if chunks is None or chunks.stage < 3 or not all(map(chunks.sealed, self.buckets)):
        return original(self, *args, **kwargs)
    self.param_gather_dispatched = True


@around(_GROUP + "finish_param_sync")
def finish_param_sync(original, self, *args, **kwargs):
    chunks = _of(self)
    if chunks is None or chunks.stage < 3 or not all(map(chunks.sealed, self.buckets)):
        original(self, *args, **kwargs)


def _of(owner):
    """The chunks of a DistributedDataParallel, or of one of its buffers or bucket groups; None if it has none."""
    return getattr(owner, "chunks_of_model", None)

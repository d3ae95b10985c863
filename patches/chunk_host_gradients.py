"""megatron.core.optimizer and finalize_model_grads: gradients that lie on the host, beside an accelerator.

Why here: a master on the host has its gradient there, since torch wants both on one device; Megatron's kernels and
collectives take tensors of the accelerator only. So the few gradients that are summed over tensor- or pipeline-parallel
ranks are brought up for that, and so is each for its norm, one after the other. Clipping and unscaling are done on the
host. On a CPU, where both are the host's, these functions stay Megatron's.
"""

from __future__ import annotations

import contextlib

import torch

from mindspeed_mem.device import is_host_device
from mindspeed_mem.patching import around
from mindspeed_mem.zero.buffers import runtime
from mindspeed_mem.zero.core.shard_memory import device_of, norm_on

_CLIP = "megatron.core.optimizer.clip_grads:"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer."
_FINALIZE = "megatron.core.distributed.finalize_model_grads:"


def away(tensor: torch.Tensor | None) -> bool:
    """Whether `tensor` is on the host while the model is on an accelerator."""
    now = runtime.current()
    if now is None or tensor is None:
        return False
    return not now.backend.is_host and is_host_device(tensor.device)


def _device():
    now = runtime.current()
    assert now is not None, "as something is away"
    return device_of(now.backend)


@around(_CLIP + "get_grad_norm_fp32")
def get_grad_norm_fp32(original, grads_for_norm, norm_type=2, *args, **kwargs):
    """The norm of norms is the norm: that of a gradient on the host stands in its place.

    The bits are those of all gradients on the device where upstream takes the norm of each, as it does without the
    kernels of TransformerEngine and Apex, which add up over all of them at once.
    """
    grads = [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else list(grads_for_norm)
    for number, grad in enumerate(grads):
        if away(grad):
            grads[number] = norm_on(_device(), grad, float(norm_type)).view(1)
    return original(grads, norm_type, *args, **kwargs)


@around(_CLIP + "clip_grad_by_total_norm_fp32")
def clip_grad_by_total_norm_fp32(original, parameters, max_norm, total_norm, *args, **kwargs):
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    there = [param for param in params if away(param)]
    here = [param for param in params if not away(param)]
    if here or not there:  # Apex' kernels refuse an empty list
        original(here, max_norm, total_norm, *args, **kwargs)
    factor = max_norm / (total_norm + 1e-6)  # as upstream has it
    for param in there if factor < 1 else ():
        if param.grad is not None:
            param.grad.mul_(factor)


@around(_OPTIMIZER + "_collect_main_grad_data_for_unscaling")
def collect_main_grad_data_for_unscaling(original, self):
    """What is on the host is unscaled here; an infinity stands for those that were found there."""
    grads = original(self)
    there = [grad for grad in grads if away(grad)]
    if not there:
        return grads
    found, inverse = torch.zeros(1), self.grad_scaler.inv_scale.cpu()
    torch._amp_foreach_non_finite_check_and_unscale_(there, found, inverse)
    flag = torch.where(found > 0, torch.inf, 0.0)
    return [grad for grad in grads if not away(grad)] + [flag.to(_device())]


@around(_FINALIZE + "_allreduce_embedding_grad")
def allreduce_embedding_grad(original, model, embd_group, pp_group, weight_getter, *args, **kwargs):
    """Upstream asks for the weight where there is something to reduce, and only there."""
    with contextlib.ExitStack() as until_reduced:

        def getter(module):
            weight = weight_getter(module)
            until_reduced.enter_context(_brought_up([weight]))
            return weight

        original(model, embd_group, pp_group, getter, *args, **kwargs)


@around(_FINALIZE + "_allreduce_non_tensor_model_parallel_grads")
def allreduce_non_tensor_model_parallel_grads(original, model, config, tp_group, *args, **kwargs):
    flags = ("sequence_parallel", "average_gradients_across_tp_domain")
    norms = ("q_layernorm", "k_layernorm")
    named = (pair for one in model for pair in one.named_parameters() if tp_group.size() > 1)
    reduced = [
        param
        for name, param in named
        if any(getattr(param, flag, False) for flag in flags) or any(norm in name for norm in norms)
    ]
    with _brought_up(reduced):
        original(model, config, tp_group, *args, **kwargs)


@contextlib.contextmanager
def _brought_up(params):
    """Inside, ``main_grad`` of these parameters is a copy on the device, taken back at the end, where it is away."""
    there = {param: param.main_grad for param in params if away(getattr(param, "main_grad", param))}
    for param, grad in there.items():
        param.main_grad = grad.to(_device(), copy=True)
    try:
        yield
    finally:
        for param, grad in there.items():
            grad.copy_(param.main_grad)
            param.main_grad = grad

"""megatron.core.optimizer: norm, clipping and unscaling of gradients that lie on the host, beside an accelerator.

Why here: a master on the host has its gradient there, since torch wants both on one device; Megatron's kernels take
tensors of the accelerator only. On a CPU, where both are the host's, these functions stay Megatron's.
"""

from __future__ import annotations

import torch

from mindspeed_mem.chunk import runtime
from mindspeed_mem.chunk.stores import device_of_models
from mindspeed_mem.patching import around

_CLIP = "megatron.core.optimizer.clip_grads:"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer."


def away(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is on the host while the model is on an accelerator."""
    now = runtime.current()
    return tensor.device.type == "cpu" and now is not None and now.settings.backend.type in ("cuda", "npu")


@around(_CLIP + "get_grad_norm_fp32")
def get_grad_norm_fp32(original, grads_for_norm, norm_type=2, *args, **kwargs):
    """The norm of norms is the norm: of a gradient on the host only its own norm travels."""
    grads = [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else list(grads_for_norm)
    there = [torch.linalg.vector_norm(grad, float(norm_type)) for grad in grads if away(grad)]
    if there:
        grads = [grad for grad in grads if not away(grad)] + [torch.stack(there).to(device_of_models())]
    return original(grads, norm_type, *args, **kwargs)


@around(_CLIP + "clip_grad_by_total_norm_fp32")
def clip_grad_by_total_norm_fp32(original, parameters, max_norm, total_norm, *args, **kwargs):
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    there = [param for param in params if away(param)]
    original([param for param in params if not away(param)] if there else params, max_norm, total_norm, *args, **kwargs)
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
    return [grad for grad in grads if not away(grad)] + [flag.to(device_of_models())]

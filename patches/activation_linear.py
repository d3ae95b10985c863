"""megatron.core: keep fused weight-gradient accumulation under saved-tensor hooks.

Inside any saved-tensor hook ``ctx.saved_tensors`` hands back a plain tensor for the weight, without the
``grad_added_to_main_grad`` that the backward of a linear layer asks for and then sets: it adds to ``main_grad``, and
returns no gradient, where DDP, overlapped, asserts that there is one. Megatron's own layer may simply remember the
weight, a parameter that outlives the graph. For TransformerEngine's (before 2.15) DDP's hook gets what it asks for.
"""

from __future__ import annotations

import torch

from mindspeed_mem.patching import around

_DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel."
_LINEAR = "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication."


class _WithWeight:
    """The context as backward sees it: the saved weight is the parameter itself."""

    def __init__(self, ctx):
        self._ctx = ctx

    def __getattr__(self, name):
        return getattr(self._ctx, name)

    @property
    def saved_tensors(self):
        inputs, _ = self._ctx.saved_tensors
        return inputs, self._ctx._mindspeed_mem_weight


@around(_LINEAR + "forward")
def forward(original, ctx, input, weight, bias, gradient_accumulation_fusion, *args, **kwargs):
    if gradient_accumulation_fusion:
        ctx._mindspeed_mem_weight = weight
    return original(ctx, input, weight, bias, gradient_accumulation_fusion, *args, **kwargs)


@around(_LINEAR + "backward")
def backward(original, ctx, grad_output):
    return original(_WithWeight(ctx) if hasattr(ctx, "_mindspeed_mem_weight") else ctx, grad_output)


@around(_DDP + "_make_backward_post_hook")
def make_backward_post_hook(original, self, param):
    hook = original(self, param)
    fused = getattr(self.config, "gradient_accumulation_fusion", False)

    def with_gradient(*unused):
        if param.grad is not None:
            return hook(*unused)
        before = param.grad_added_to_main_grad
        param.grad = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)
        param.grad_added_to_main_grad = True
        try:
            hook(*unused)
        finally:
            param.grad_added_to_main_grad = before

    return with_gradient if fused else hook

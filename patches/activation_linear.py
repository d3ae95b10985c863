"""megatron.core.tensor_parallel.layers: keep the fused weight-gradient path under saved-tensor hooks.

Why here: inside any saved-tensor hook ``ctx.saved_tensors`` hands back a plain tensor for the weight, without the
``grad_added_to_main_grad`` that the backward asks for, which breaks DDP's overlap contract when gradient accumulation
is fused. The weight itself is a parameter and outlives the graph, so the context may simply remember it.
"""

from __future__ import annotations

from mindspeed_mem.patching import around

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

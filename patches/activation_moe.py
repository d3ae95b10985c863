"""megatron.core.transformer.moe: what is no module in an expert layer has names, too.

The steps of token dispatch are methods of an object. What a step reads on that object is replaced by the next
micro-batch, so a second run gets it as it was. Some gather into a buffer that all layers share. TransformerEngine's
grouped experts compute their activation function between two modules, without the marker that Megatron's MLP has there.
"""

from __future__ import annotations

import torch

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation.storage.marks import mark_managed
from mindspeed_mem.patching import around

_DISPATCHERS = "megatron.core.transformer.moe.token_dispatcher:MoE{}TokenDispatcher.{}"
_STEPS = {
    "dispatch_preprocess": "dispatch.preprocess",
    "token_dispatch": "dispatch.communicate",
    "dispatch_postprocess": "dispatch.postprocess",
}


def _step(method, name):
    def step(original, self, *args, **kwargs):
        engine = engines.current()
        if engine is None or torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        return engine.operators.run_inline(name, lambda *a, **k: original(self, *a, **k), args, kwargs, state=self)

    step.__name__ = method
    return step


for _kind in ("AllGather", "AlltoAll"):
    for _method, _name in _STEPS.items():
        around(_DISPATCHERS.format(_kind, _method), since="0.14")(_step(_method, _name))


@around("megatron.core.transformer.moe.experts:TEGroupedMLP.__init__", since="0.14")
def grouped_experts(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    self.linear_fc1.register_forward_hook(_activation_begins)
    self.linear_fc2.register_forward_pre_hook(_activation_ends)


def _activation_begins(module, inputs, output):
    engine = None if torch.compiler.is_compiling() else engines.in_use
    if engine is not None:
        engine.operators.mark_start("activation")


def _activation_ends(module, inputs):
    engine = None if torch.compiler.is_compiling() else engines.in_use
    if engine is not None:
        engine.operators.mark_stop("activation")


@around("megatron.core.utils:GlobalMemoryBuffer.get_tensor")
def get_tensor(original, self, *args, **kwargs):
    tensor = original(self, *args, **kwargs)
    mark_managed(tensor)  # the next layer writes over it, and NCCL does not raise the version when it does
    return tensor

"""megatron.core.transformer.moe.token_dispatcher: the steps of token dispatch are operators of an expert layer.

Why here: they are methods of an object that is no module. What a step reads on that object is replaced by the next
micro-batch, so a second run gets it as it was. Some gather into a buffer that all layers share.
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


@around("megatron.core.utils:GlobalMemoryBuffer.get_tensor")
def get_tensor(original, self, *args, **kwargs):
    tensor = original(self, *args, **kwargs)
    mark_managed(tensor)  # the next layer writes over it, and NCCL does not raise the version when it does
    return tensor

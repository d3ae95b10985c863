"""Nothing is compiled on the host.

torch.compile would need a C++ compiler and seconds of warm-up, and compiled dropout draws other random numbers, so that
runs could not be compared across that difference.
"""

from __future__ import annotations

from mindspeed_mem.patching import around, replace


@around("torch:compile")
def _compile(original, model=None, **kwargs):
    """The function as it is. Megatron decorates with this at import (`megatron.core.jit.jit_fuser`, copied around)."""
    return (lambda function: function) if model is None else model


# For what was decorated before we came: dynamo, once it is imported, leaves every frame to the interpreter.
replace("torch._dynamo.config:disable", True, declared_by=__name__)


@around("torch.utils.cpp_extension:load_inline")
def _load_inline(original, *args, with_cuda=None, **kwargs):
    """megatron-core 0.15 does so when it is imported, and goes on after this error, but not after some of torch's."""
    if with_cuda:
        raise RuntimeError("nothing is compiled for CUDA where the host is the device")
    return original(*args, with_cuda=with_cuda, **kwargs)

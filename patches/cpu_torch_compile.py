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

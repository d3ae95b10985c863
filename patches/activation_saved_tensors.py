"""torch.autograd: under our saved-tensor hooks a custom function reads the tensors that it saved.

Why here: a hook alone cannot do that, as autograd makes new tensors of what it hands back. A linear layer that adds
to ``main_grad`` by itself (Megatron's, TransformerEngine's) asks the weight that it saved whether to, and marks it; a
checkpoint that runs its function again reads ``.grad`` of the inputs that it saved. TransformerEngine marks weights in
a low precision, plain tensors that it saves for each micro-batch, as nothing to be offloaded. Who saves is seen by the
frame of ``Function.apply``; torch 2.14 and newer have that in C, and get one of ours, which only calls it.
"""

from __future__ import annotations

from typing import Any

from torch.autograd.function import BackwardCFunction

from mindspeed_mem.activation.storage import own_tensors
from mindspeed_mem.patching import join, replace

_native: Any = BackwardCFunction.saved_tensors  # of a class, what reads it


join("mindspeed_mem.activation.storage.own_tensors:MARKS", "_TE_do_not_offload", declared_by=__name__)
replace(
    "torch.autograd.function:BackwardCFunction.saved_tensors",
    property(own_tensors.reader(_native.__get__)),
    declared_by=__name__,
)
if not own_tensors.APPLY_IS_PYTHON:
    replace("torch.autograd.function:Function.apply", classmethod(own_tensors.applied), declared_by=__name__)

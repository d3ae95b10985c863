"""torch.autograd: under our saved-tensor hooks a custom function reads the tensors that it saved.

Why here: a hook alone cannot do that, as autograd makes new tensors of what it hands back. A linear layer that adds
to ``main_grad`` by itself (Megatron's, TransformerEngine's) asks the weight that it saved whether to, and marks it; a
checkpoint that runs its function again reads ``.grad`` of the inputs that it saved.
"""

from __future__ import annotations

from torch.autograd.function import BackwardCFunction

from mindspeed_mem.activation.storage import own_tensors
from mindspeed_mem.patching import replace

_NATIVE = BackwardCFunction.saved_tensors.__get__


@property
def saved_tensors(self):
    return own_tensors.read(_NATIVE, self)


replace("torch.autograd.function:BackwardCFunction.saved_tensors", saved_tensors, declared_by=__name__)

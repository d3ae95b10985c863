"""megatron.core.distributed: note when gradient buffers were zeroed, which a second attempt at a step starts from.

Why here: nothing else tells whether buffers hold gradients of an earlier call; to look would be to read them all.
"""

from __future__ import annotations

from mindspeed_mem.patching import around


@around("megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.zero_grad_buffer")
def zero_grad_buffer(original, self):
    original(self)
    vars(self)["_mindspeed_mem_zeroed"] = True

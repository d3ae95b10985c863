"""megatron.core.distributed: 16-bit gradients are added to fp32 ones in tiles on a CPU.

A device's kernel casts as it reads. torch's for the CPU casts the whole gradient first, into memory that a device never
takes and that costs more time than the sum.
"""

from __future__ import annotations

import torch

from mindspeed_mem.patching import around

_DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel."
_TILE = 64 * 2**10  # elements; measured from 16 Ki to 1 Mi, this was the fastest


@around(_DDP + "_make_backward_post_hook")
def make_backward_post_hook(original, self, param):
    hook = original(self, param)
    if 0 < param.numel() <= _TILE:
        return hook

    def add_in_tiles(*unused):
        added_before = param.grad_added_to_main_grad  # by a layer's own backward: then `grad` is a placeholder
        again = getattr(param, "zero_out_wgrad", False)  # upstream's hook adds in any case
        if added_before or again or not _is_cast_whole(param):
            return hook(*unused)
        for whole, part in zip(*(each.view(-1).split(_TILE) for each in (param.main_grad, param.grad)), strict=True):
            whole.add_(part)
        param.grad_added_to_main_grad = True
        try:
            hook(*unused)
        finally:
            param.grad_added_to_main_grad = added_before

    return add_in_tiles


def _is_cast_whole(param: torch.nn.Parameter) -> bool:
    grad, whole = param.grad, getattr(param, "main_grad", None)
    if grad is None or whole is None or not grad.is_cpu or grad.dtype == whole.dtype:
        return False
    return grad.shape == whole.shape and grad.is_contiguous() and whole.is_contiguous()

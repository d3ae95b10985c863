"""Whether tensors hold the same bits, or as good as that."""

from __future__ import annotations

import torch

from mindspeed_mem.activation.storage.records import local_of

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_MOST = 1 / 32  # coarse types: more is no rounding
AT_ONCE = 1 << 22  # elements: comparing takes memory, too


def nearly_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they differ by no more than sums do whose order is left to chance."""
    if one.shape != other.shape or one.dtype != other.dtype or not one.is_floating_point():
        return same_bits(one, other)
    if one.numel() > AT_ONCE:
        return all(nearly_same(*parts) for parts in _halves(one, other))
    if same_bits(one, other) or not one.numel():
        return True
    eps = torch.finfo(one.dtype).eps
    least = max(eps, min(64 * eps, _AT_MOST))
    one, other = one.detach().float(), other.detach().float()
    return bool((one - other).abs().max() <= least * one.abs().max())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one layout hold the same, not-a-numbers included; takes little memory besides."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if one.numel() > AT_ONCE:
        return all(same_bits(*parts) for parts in _halves(one, other))
    kind = _INTEGERS[one.element_size()]
    return torch.equal(one.detach().view(kind), other.detach().view(kind))


def _halves(one: torch.Tensor, other: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    dim = max(range(one.dim()), key=one.size)
    half = one.size(dim) // 2
    parts = (0, half), (half, one.size(dim) - half)
    return [(one.narrow(dim, *part), other.narrow(dim, *part)) for part in parts]


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors that autograd saved hold the same; of what is not plain memory only the type is compared."""
    one, other = local_of(one), local_of(other)
    if one.is_nested and one.layout is torch.strided and other.is_nested:
        parts = one.detach().unbind(), other.detach().unbind()
        return len(parts[0]) == len(parts[1]) and all(map(alike, *parts))
    if type(one) is not torch.Tensor or type(other) is not torch.Tensor or one.layout is not torch.strided:
        return type(one) is type(other)
    return same_bits(one, other)

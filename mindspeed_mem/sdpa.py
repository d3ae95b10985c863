"""Core attention through torch's scaled_dot_product_attention: the fused kernels keep no matrix of sequence squared."""

from __future__ import annotations

import functools
import weakref

import torch
import torch.distributed as dist
from torch.nn.functional import pad, scaled_dot_product_attention

from mindspeed_mem.device import is_host_device


class SdpaError(ValueError):
    """--sdpa-attention cannot compute what the model asks for."""


def core_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden: torch.Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention of [queries, batch, heads, qk channels], sequence first, to [queries, batch, heads * v channels].

    Args:
        query, key, value: floating point, one dtype and device. key and value have the same length; they may have
            fewer heads (a divisor: grouped queries), and value other channels than key (multi-latent attention).
        hidden: bool, True where a query must not look, broadcastable to [batch, heads, queries, keys]. A query that may
            look nowhere gives zeros. One that hides just the future is recognised, and as good as `causal`.
        causal: hide the future; a single query sees everything, as it does with a key-value cache.
        scale: of the products, by default 1 / sqrt(qk channels).
        dropout: probability, of attention weights, drawn from the default generator of the device.

    Saved for backward where a fused kernel applies: query, key, value, output, one number for each query and head, and
    `hidden` in their dtype. With dropout on CPU none applies, and the weights are saved. Older versions of torch save
    key and value on CPU once for each query head.

    Raises SdpaError for a causal mask between sequences of different lengths.
    """
    queries, keys = query.shape[0], key.shape[0]
    if hidden is not None and queries == keys and hides_the_future(hidden):
        hidden, causal = None, True
    causal = causal and queries > 1
    if causal and queries != keys:
        raise SdpaError(f"a causal mask needs as many keys as queries, not {keys} and {queries}: pass a mask instead")
    channels = value.shape[-1]
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if is_host_device(query.device):
        query, key, value = _for_the_cpu_kernel(query, key, value)
    output = scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        attn_mask=None if hidden is None else ~hidden,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=key.shape[2] != query.shape[2],
    )
    return output[..., :channels].permute(2, 0, 1, 3).flatten(2)


def _for_the_cpu_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Padded to one width, the only thing it takes; and with one key head for each query head where it must be so."""
    width = max(query.shape[-1], value.shape[-1])
    if value.shape[-1] != query.shape[-1]:
        query, key, value = (pad(tensor, (0, width - tensor.shape[-1])) for tensor in (query, key, value))
    group = query.shape[2] // key.shape[2]
    if group > 1 and not _cpu_kernel_takes_groups():
        key, value = (tensor.repeat_interleave(group, 2) for tensor in (key, value))
    return query, key, value


@functools.cache
def _cpu_kernel_takes_groups() -> bool:
    """It does since some version after 2.6; torch only tells by what it records for backward."""
    query, key = torch.zeros(1, 2, 1, 8), torch.zeros(1, 1, 1, 8)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        output = scaled_dot_product_attention(query.requires_grad_(), key, key, enable_gqa=True)
    return "Flash" in str(output.grad_fn)


def share_last_channels(key: torch.Tensor, channels: int, group: dist.ProcessGroup) -> torch.Tensor:
    """`key` itself ([..., heads, all channels], a view), whose last `channels` are one and the same for all heads of
    all ranks of `group`: their gradient is summed over these, as if each rank held all heads.

    Every rank then gives the sum to its first head, and zero to the others, where their common origin adds them up.
    Collective in backward.
    """
    return _ShareLastChannels.apply(key, channels, group)


class _ShareLastChannels(torch.autograd.Function):
    @staticmethod
    def forward(ctx, key, channels, group):
        ctx.channels, ctx.group = channels, group
        return key.view_as(key)

    @staticmethod
    def backward(ctx, grad):
        total = grad[..., -ctx.channels :].sum(-2)
        dist.all_reduce(total, group=ctx.group)
        grad = grad.clone()
        grad[..., -ctx.channels :] = 0
        grad[..., 0, -ctx.channels :] = total
        return grad, None, None


_last: tuple[weakref.ref, int, bool] | None = None


def hides_the_future(hidden: torch.Tensor) -> bool:
    """Whether a mask [..., length, length] is True exactly above the diagonal.

    Waits for the device, once for each mask: all layers of a micro-batch share one.
    """
    global _last
    if hidden.ndim < 2 or hidden.shape[-1] != hidden.shape[-2] or hidden.dtype != torch.bool:
        return False
    if torch.is_inference(hidden):
        return _hides_the_future(hidden)
    if _last is None or _last[0]() is not hidden or _last[1] != hidden._version:
        _last = weakref.ref(hidden), hidden._version, _hides_the_future(hidden)
    return _last[2]


def _hides_the_future(hidden: torch.Tensor) -> bool:
    length = hidden.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
    return bool((hidden == future).all())

"""Adam on the host for one flat shard, tile by tile, so that what a tile needs stays in the processor's cache.

A tile's gradient (bf16, fp16 or fp32) is cast into an fp32 stage and scaled there, and torch's fused kernel updates
master and moments. One pass over memory, and the only memory of its own is the stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch

from mindspeed_mem.device import is_host_device
from mindspeed_mem.optimizer_kinds import decouples_decay, is_fused_adam, is_torch_adam

TILE = 64 * 2**10
"""Elements. Measured from 4 Mi down to 64 Ki, smaller tiles were faster."""

_VECTORS = 64  # elements: a multiple of every vector's
_GRADIENTS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """Of Adam (Kingma and Ba, 2015), or with `decoupled` of AdamW (Loshchilov and Hutter, 2019)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    """Whether the decay is taken off the parameter itself, not added to the gradient."""
    maximize: bool = False


@dataclass(frozen=True)
class GradientScaling:
    """What becomes of a gradient before it is used: divided by `loss_scale`, then multiplied by `clip`, in fp32.

    In this order, and rounded after each, as by a trainer that first unscales and then clips: the results are the same
    bits. (Megatron multiplies by the reciprocal of the scale, which is the same for powers of two.)
    """

    loss_scale: float = 1.0
    clip: float = 1.0

    @property
    def neutral(self) -> bool:
        """Whether gradients stay as they are."""
        return self.loss_scale == 1.0 and self.clip == 1.0

    def apply_(self, gradient: torch.Tensor) -> None:
        """Scale `gradient` in place."""
        if self.loss_scale != 1.0:
            gradient.div_(self.loss_scale)
        if self.clip != 1.0:
            gradient.mul_(self.clip)


_AS_IT_IS = GradientScaling()


def adam_settings(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> AdamSettings:
    """The settings of `group`, one of those of `optimizer`, for which `adam_problems` has found nothing."""
    beta1, beta2 = group["betas"]
    return AdamSettings(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=decouples_decay(optimizer, group),
        maximize=group.get("maximize", False),
    )


def adam_problems(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> list[str]:
    """Why a step of `optimizer` on `groups` cannot be done by an Adam on the host; empty if it can."""
    kind = type(optimizer).__name__
    if not (is_torch_adam(optimizer) or is_fused_adam(optimizer)):
        return [
            f"the optimizer is {kind}; allowed are torch.optim.Adam and AdamW, their subclasses with the same step, "
            "FusedAdam of Apex and TransformerEngine, and AdamW of MindSpeed"
        ]
    wanted = {"amsgrad": False, "differentiable": False, "bias_correction": True}
    found = [
        f"{name}={not value} in a parameter group; it must be {value}"
        for name, value in wanted.items()
        if any(bool(group.get(name, value)) != value for group in groups)
    ]
    if is_fused_adam(optimizer):
        found += [
            f"{name}=True of {kind}; it must be False"
            for name in ("capturable", "master_weights", "store_param_remainders")
            if getattr(optimizer, name, None)
        ]
    return found


class HostAdam:
    """Steps flat shards in host memory. For use by one thread at a time; several threads take one object each.

    Args:
        tile: elements per tile, a multiple of 64. The result does not depend on it, bit by bit: only a shard's last
            elements are left over from whole vectors, which kernels round in their own way.

    The results are the bits of torch's Adam with ``fused=True``. From one without it a master differs after k steps by
    at most k * (2^-23 * its largest size so far + 2^-20 * lr); measured: a fifth of that or less.
    """

    def __init__(self, tile: int = TILE) -> None:
        if tile < 1 or tile % _VECTORS:
            raise ValueError(f"tile of Adam on the host: got {tile} elements; give a multiple of {_VECTORS}: {TILE}")
        self.tile = tile
        self._stage = torch.from_numpy(numpy.empty(tile, dtype=numpy.float32))  # numpy's: never device memory
        self._number = torch.from_numpy(numpy.zeros((), dtype=numpy.float32))

    @torch.no_grad()
    def step(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        number: float,
        settings: AdamSettings,
        scaling: GradientScaling = _AS_IT_IS,
    ) -> None:
        """Update `master`, `exp_avg` and `exp_avg_sq` in place.

        Args:
            master, exp_avg, exp_avg_sq: fp32, contiguous, of one number of elements, on the host.
            gradient: bf16, fp16 or fp32; not changed.
            number: which step this is, from 1 on.
            scaling: of the gradient.

        Raises ValueError for other tensors, naming all that is wrong.
        """
        tensors = {"master": master, "gradient": gradient, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        _check(tensors)
        flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
        for start in range(0, master.numel(), self.tile):
            here = {name: tensor[start : start + self.tile] for name, tensor in flat.items()}
            kernel = torch._fused_adamw_ if settings.decoupled else torch._fused_adam_
            kernel(
                [here["master"]],
                [self._scaled(here["gradient"], scaling)],
                [here["exp_avg"]],
                [here["exp_avg_sq"]],
                [],
                [self._number.fill_(number)],
                lr=settings.lr,
                beta1=settings.beta1,
                beta2=settings.beta2,
                weight_decay=settings.weight_decay,
                eps=settings.eps,
                amsgrad=False,
                maximize=settings.maximize,
            )

    def _scaled(self, gradient: torch.Tensor, scaling: GradientScaling) -> torch.Tensor:
        if scaling.neutral and gradient.dtype is torch.float32:
            return gradient  # the kernel only reads it
        stage = self._stage[: gradient.numel()]
        stage.copy_(gradient)
        scaling.apply_(stage)
        return stage


def _check(tensors: dict[str, torch.Tensor]) -> None:
    elements = tensors["master"].numel()
    found = []
    for name, tensor in tensors.items():
        allowed = _GRADIENTS if name == "gradient" else (torch.float32,)
        if tensor.layout is not torch.strided or not is_host_device(tensor.device) or not tensor.is_contiguous():
            found.append(f"{name} is {tensor.layout} on {tensor.device}; it must be contiguous host memory")
        if tensor.dtype not in allowed:
            found.append(f"{name} has {tensor.dtype}; allowed: {', '.join(map(str, allowed))}")
        if tensor.numel() != elements:
            found.append(f"{name} has {tensor.numel()} elements; the master has {elements}")
    if found:
        raise ValueError("Adam on the host: " + "; ".join(found))

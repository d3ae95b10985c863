"""What one Adam step is told: its settings, read from a torch optimizer's parameter group, and its gradients' scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_mem.optimizer_kinds import is_fused_adam, is_torch_adam


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
    found_inf: bool = False
    """Whether a gradient somewhere is not finite: then the step is skipped."""

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


def adam_settings(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> AdamSettings:
    """The settings of `group`, one of those of `optimizer`, for which `adam_problems` has found nothing."""
    if is_fused_adam(optimizer):
        decoupled = bool(optimizer.adam_w_mode)
    else:
        decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    beta1, beta2 = group["betas"]
    return AdamSettings(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=decoupled,
        maximize=group.get("maximize", False),
    )


def adam_problems(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> list[str]:
    """Why a step of `optimizer` on `groups` cannot be done by an Adam on the host; empty if it can."""
    kind = type(optimizer).__name__
    if not (is_torch_adam(optimizer) or is_fused_adam(optimizer)):
        return [
            f"the optimizer is {kind}; allowed are torch.optim.Adam and AdamW, their subclasses with the same step, "
            "and FusedAdam of Apex and TransformerEngine"
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

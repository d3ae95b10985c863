"""What one Adam step is told: its settings, read from a torch optimizer's parameter group, and its gradients' scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


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
    if counts_per_group(optimizer):
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
    if not (is_torch_adam(optimizer) or counts_per_group(optimizer)):
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
    if counts_per_group(optimizer):
        found += [
            f"{name}=True of {kind}; it must be False"
            for name in ("capturable", "master_weights", "store_param_remainders")
            if getattr(optimizer, name, None)
        ]
    return found


def is_torch_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` steps as torch.optim.Adam or AdamW do."""
    allowed = {unhooked_step(torch.optim.Adam), unhooked_step(torch.optim.AdamW)}
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) and unhooked_step(type(optimizer)) in allowed


def counts_per_group(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` is a FusedAdam (Apex, TransformerEngine), which counts steps in its groups."""
    return hasattr(optimizer, "adam_w_mode")


_ELEMENTWISE = ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a part of a parameter can be stepped without the rest, with the same result."""
    known = {unhooked_step(getattr(torch.optim, name)) for name in _ELEMENTWISE}
    return counts_per_group(optimizer) or unhooked_step(type(optimizer)) in known


def unhooked_step(kind: type[torch.optim.Optimizer]) -> Any:
    """The function `step` of an optimizer's class, without the wrapper in which torch calls step hooks."""
    step = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step

"""Which optimizers are known, and what of a step holds for a part of its parameters alone.

An optimizer that updates each element by itself can be cut anywhere. One that looks at a whole parameter (Adafactor's
row and column means, Muon's orthogonalization) can be given whole parameters. What a class does is known by the
function that its ``step`` is, and not by its attributes, which others share (Apex' FusedLAMB has all of FusedAdam's):
a subclass that inherits ``step`` is what its base is; any other class is unknown.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

_ELEMENTWISE = "Adadelta Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop SGD".split()
_PER_PARAMETER = "Adafactor Muon SparseAdam".split()
_FUSED_ADAM = {  # by the module and the qualified name of `step`
    ("transformer_engine.pytorch.optimizers.fused_adam", "FusedAdam.step"),
    ("apex.optimizers.fused_adam", "FusedAdam.step"),
    ("mindspeed.core.optimizer.adamw", "AdamW.step"),  # which takes the place of the others there
}
_FUSED_SGD = {
    ("transformer_engine.pytorch.optimizers.fused_sgd", "FusedSGD.step"),
    ("apex.optimizers.fused_sgd", "FusedSGD.step"),
}


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a part of a parameter can be stepped without the rest, with the same result."""
    return _is_one_of_torch(optimizer, _ELEMENTWISE) or _place_of_step(optimizer) in _FUSED_ADAM | _FUSED_SGD


def is_per_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a parameter can be stepped without the others, but not a part of it."""
    return _is_one_of_torch(optimizer, _PER_PARAMETER)


def is_torch_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` steps as torch.optim.Adam or AdamW do."""
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) and _is_one_of_torch(
        optimizer, ("Adam", "AdamW")
    )


def is_fused_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` is a FusedAdam (Apex, TransformerEngine, MindSpeed), which counts steps in its groups."""
    return _place_of_step(optimizer) in _FUSED_ADAM


def decouples_decay(optimizer: Any, group: dict[str, Any]) -> bool:
    """Whether a step of `group`, of an Adam known here, takes its weight decay off the parameter itself (AdamW)."""
    if is_fused_adam(optimizer):
        return bool(getattr(optimizer, "adam_w_mode", True))  # MindSpeed's has no other
    return group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))


def settings_of_whole_group(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], stepped: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """What a part of `group` has to be told for a step, since a step of all of it would find it in its first parameter.

    stepped: all parameters of the group that have a gradient, in its order. torch's Adafactor, given no first eps,
    takes that of the type of the first of them for all.
    """
    if not stepped or not _is_one_of_torch(optimizer, ("Adafactor",)) or group["eps"][0] is not None:
        return {}
    dtype = stepped[0].dtype
    if group.get("foreach"):  # which takes them type by type, in an order of its own
        (_, dtype), *_ = torch.utils._foreach_utils._group_tensors_by_device_and_dtype([list(stepped)])
    return {"eps": (torch.finfo(dtype).eps, group["eps"][1])}


def unhooked_step(kind: type[torch.optim.Optimizer]) -> Any:
    """The function `step` of an optimizer's class, without the wrapper in which torch calls step hooks."""
    step: Any = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


def _is_one_of_torch(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> bool:
    """Whether its step is that of one of torch's; some of them are missing in older versions."""
    classes = [getattr(torch.optim, name) for name in names if hasattr(torch.optim, name)]
    step = inspect.unwrap(type(optimizer).step)
    return any(inspect.unwrap(one.step) is step for one in classes)


def _place_of_step(optimizer: torch.optim.Optimizer) -> tuple[str, str]:
    step = inspect.unwrap(type(optimizer).step)
    return step.__module__, step.__qualname__

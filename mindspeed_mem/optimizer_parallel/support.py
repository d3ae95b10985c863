"""Which optimizers can be parallelized, and how far.

An optimizer that updates each element by itself can be cut anywhere. One that looks at a whole parameter (Adafactor's
row and column means, Muon's orthogonalization) can be given whole parameters. One that looks at all of them (LBFGS)
cannot be parallelized here. What a class does is known by the function that its ``step`` is: a subclass that inherits
``step`` is what its base is; any other class is unknown, and needs the caller's word for it.
"""

from __future__ import annotations

import inspect

import torch

from mindspeed_mem.optimizer_parallel.assignment import MODES

_ELEMENTWISE = "Adadelta Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop SGD".split()
_PER_PARAMETER = "Adafactor Muon SparseAdam".split()
_ELEMENTWISE_ELSEWHERE = {  # by the module and the qualified name of `step`
    ("transformer_engine.pytorch.optimizers.fused_adam", "FusedAdam.step"),
    ("transformer_engine.pytorch.optimizers.fused_sgd", "FusedSGD.step"),
    ("apex.optimizers.fused_adam", "FusedAdam.step"),
    ("apex.optimizers.fused_sgd", "FusedSGD.step"),
}


class OptimizerParallelError(ValueError):
    """An optimizer cannot be parallelized as asked; `problems` holds one entry for each reason."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problems))


def problems(optimizer: torch.optim.Optimizer, mode: str, assume_independent: bool = False) -> list[str]:
    """Why `optimizer` cannot be parallelized by `mode`; empty if it can.

    ``assume_independent``: the caller's word that a class unknown here updates each parameter (with ``sharding``
    each element) without looking at others.
    """
    if mode not in MODES:
        return [f"mode: got {mode!r}; allowed: {', '.join(MODES)}"]
    found = []
    name, step = type(optimizer).__name__, inspect.unwrap(type(optimizer).step)
    per_parameter = _is_one_of(step, _PER_PARAMETER)
    known = _is_one_of(step, _ELEMENTWISE) or (step.__module__, step.__qualname__) in _ELEMENTWISE_ELSEWHERE
    if isinstance(optimizer, torch.optim.LBFGS):
        found.append(f"{name} looks at all parameters together: no rank can update a part of them. Take another one")
    elif per_parameter and mode == "sharding":
        found.append(f"{name} needs whole parameters: sharding would change what it computes. Use grouping")
    elif not (known or per_parameter or assume_independent):
        unit = "element" if mode == "sharding" else "parameter"
        found.append(
            f"{name} ({step.__module__}) is not known here: if it updates each {unit} without looking at others, say "
            "assume_independent=True"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        found.append("differentiable=True: a step that hands out parameters has no gradient. Leave it out")
    return found


def _is_one_of(step: object, names: list[str]) -> bool:
    """Whether `step` is that of one of torch's optimizers; some are missing in older versions."""
    classes = [getattr(torch.optim, name) for name in names if hasattr(torch.optim, name)]
    return any(inspect.unwrap(one.step) is step for one in classes)

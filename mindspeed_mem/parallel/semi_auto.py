"""Semi-automatic mode: modules and operators get strategies, the redistributions between them are derived."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mindspeed_mem.parallel.plan import Plan, Strategies

Model = TypeVar("Model", bound=nn.Module)


def semi_auto(
    model: Model,
    mesh: DeviceMesh,
    plan: Plan | Mapping[str, Any] | str | os.PathLike[str],
    *,
    inputs: str = "whole",
) -> Model:
    """Split `model` over `mesh` as `plan` says; its numbers stay those of one device.

    Parameters and buffers become DTensors in place: those that the plan names are split, all others are whole on each
    rank, with gradients summed. Wherever a tensor lies otherwise than its reader's strategy says it is redistributed,
    and its gradient takes the tensor's own layout there. What the model returns are DTensors.

    Args:
        model: with the same parameters on all ranks; make the optimizer afterwards.
        mesh: with axis names.
        plan: rows by the paths of modules, or a YAML file with them (see `Plan`).
        inputs: "whole": each rank passes the full batch. "local": each passes its part of the tensors that the row of
            the model itself (``""``) has strategies for.

    Raises StrategyError with all that does not fit: what needs the inputs' shapes is found at the first call, before
    it computes.
    """
    raise NotImplementedError


def shard(
    target: Callable,
    in_strategy: Strategies = None,
    out_strategy: Strategies = None,
    parameter_plan: Mapping[str, Any] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    name: str | None = None,
) -> Callable:
    """`target` with these strategies: its inputs and outputs are brought to them, forward and backward.

    Args:
        target: a module, changed in place, or a function, which is wrapped.
        in_strategy: for each tensor in order, or by the names of arguments.
        out_strategy: for each output.
        parameter_plan: of a module, by the parameters' names in it.
        mesh: None: that made last.
        name: for reports and messages.

    Raises StrategyError.
    """
    raise NotImplementedError

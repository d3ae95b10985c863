"""Where an optimizer's states lie: on the device, or in host memory that nobody counts as the device's."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from mindspeed_mem.device import Backend
from mindspeed_mem.optimizer_kinds import is_torch_adam
from mindspeed_mem.zero.core.shard_memory import HostStore
from mindspeed_mem.zero.optimizer.swapped import State, travels


def counts_on_device(group: dict[str, Any]) -> bool:
    """Whether a step of `group`, of a torch optimizer, wants a parameter's step count on the parameter's device."""
    return bool(group.get("fused") or group.get("capturable"))


class PlacedStates:
    """Makes and moves the states of one optimizer's parameters.

    A step count goes with its parameter where the group's step wants it there, and otherwise stays where it is.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, backend: Backend) -> None:
        self._optimizer, self._backend, self._store = optimizer, backend, HostStore(backend)
        self._made: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # on the host, by us

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """An uninitialised host tensor of the shape and dtype of `tensor`, which may be on no device at all."""
        made = self._store.like(tensor)
        self._made.add(made.untyped_storage())
        return made

    def settle(self, param: torch.Tensor, group: dict[str, Any], on_host: bool) -> None:
        """Bring the states of `param`, of this group, to the host, or back to where it lies, unless they are there."""
        state = self._optimizer.state.get(param, {})
        if not on_host and counts_on_device(group) and isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(param.device)
        for key, value in state.items():
            if not travels(key, value, param):
                continue
            ours = value.untyped_storage() in self._made
            if on_host and not ours:
                state[key] = self.host_like(value).copy_(value)
            elif ours and not on_host:
                state[key] = torch.empty_like(value, device=param.device).copy_(value)

    def on_host(self, param: torch.Tensor, group: dict[str, Any], adam: bool) -> State:
        """The state of `param`, of this group, on the host; {} if there is none, for the caller to keep.

        For torch's Adam it is made as Adam makes it; with `adam` also for another optimizer, which counts its steps
        elsewhere.
        """
        state = self._optimizer.state.get(param, {})
        counts = is_torch_adam(self._optimizer)
        if not state and (adam or counts):
            with self._backend.on_host():
                if counts:
                    double = torch.get_default_dtype() is torch.float64 and not group.get("fused")
                    state["step"] = torch.zeros((), dtype=torch.float64 if double else torch.float32)
                for key in ("exp_avg", "exp_avg_sq") + ("max_exp_avg_sq",) * bool(group.get("amsgrad")):
                    state[key] = self.host_like(param).zero_()
            self._optimizer.state[param] = state
        self.settle(param, group, on_host=True)
        if adam and isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].cpu()  # the host counts
        return state

"""An optimizer whose parameters rest in different places: each is stepped where it lies, or brought up for its step.

Megatron, its checkpoints and its schedulers keep the optimizer object they know, with its groups and its state; only
what its `step` does is taken over.
"""

from __future__ import annotations

import enum
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from mindspeed_mem.device import Backend, Stream, get_backend, is_host_device
from mindspeed_mem.optimizer_kinds import (
    is_elementwise,
    is_fused_adam,
    is_per_parameter,
    settings_of_whole_group,
    unhooked_step,
)
from mindspeed_mem.zero.optimizer.host_adam import GradientScaling, HostAdam, adam_problems, adam_settings
from mindspeed_mem.zero.optimizer.states import PlacedStates, counts_on_device
from mindspeed_mem.zero.optimizer.swapped import GRAIN, State, Swapped, SwappedStep

GROUP_BYTES = 64 * 2**20
LEAST_GROUP_BYTES = 64 * GRAIN


class Place(enum.Enum):
    """Where a parameter (its fp32 master) and its optimizer states rest, and where they are stepped."""

    DEVICE = "device"
    """On the device, by the optimizer itself."""
    HOST = "host"
    """On the host, there, by `HostAdam`."""
    SWAPPED = "swapped"
    """On the host; the optimizer itself steps copies on the device, with the bits of DEVICE."""


class _Due(NamedTuple):
    """A parameter with a gradient."""

    group: int
    param: torch.Tensor
    gradient: torch.Tensor


class PlacedOptimizer:
    """Takes over the `step` of `optimizer`, which stays the object to use.

    Parameters are contiguous, those of HOST and SWAPPED in host memory (`Backend.host_empty`: pinned) when a step
    begins; their states are brought to where they belong when they are made, loaded, or found elsewhere. A parameter
    may change its place between steps, if its memory does. What a step writes on the host may be read when it returns.

    Args:
        optimizer: for HOST: see `host_adam.adam_problems`; the results differ from the optimizer's own by what
            `HostAdam` says. For SWAPPED: one that `optimizer_kinds` knows.
        place_of: a parameter's place; those that a mapping does not hold are on the device. Read at each step.
        group_bytes: of each of the two device buffers through which SWAPPED parameters pass.

    Raises ValueError where HOST or SWAPPED cannot be done, here and at any step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        place_of: Callable[[torch.Tensor], Place] | Mapping[torch.Tensor, Place],
        backend: Backend | None = None,
        *,
        group_bytes: int = GROUP_BYTES,
    ) -> None:
        self.optimizer, self.backend = optimizer, get_backend() if backend is None else backend
        self._place_of = (lambda p: place_of.get(p, Place.DEVICE)) if isinstance(place_of, Mapping) else place_of
        self._group_bytes, self._states = group_bytes, PlacedStates(optimizer, self.backend)
        self._host_adam: HostAdam | None = None
        self._streams: tuple[Stream, Stream] | None = None
        self._scaling = GradientScaling()
        if group_bytes < LEAST_GROUP_BYTES:
            raise ValueError(f"group_bytes={group_bytes}; give at least {LEAST_GROUP_BYTES}")
        if "step" in vars(optimizer):
            raise ValueError(
                f"the step of this {type(optimizer).__name__} has been replaced already, by a learning rate scheduler "
                "or another placement; place the optimizer before its schedulers, and once"
            )
        self._check([(index, param) for index, param in self._params() if self.place(param) is not Place.DEVICE])
        placed = self

        def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with torch.no_grad():
                placed._step()
            return loss

        ours = types.MethodType(torch.optim.Optimizer.profile_hook_step(step), optimizer)
        optimizer.step = ours  # type: ignore[method-assign]  # of this object, as schedulers do it
        optimizer.register_load_state_dict_post_hook(lambda _: self.settle())

    def place(self, param: torch.Tensor) -> Place:
        """Where `param` rests; nothing is moved for one without elements."""
        return self._place_of(param) if param.numel() else Place.DEVICE

    def scale_next(self, loss_scale: float = 1.0, clip: float = 1.0) -> None:
        """For the next step alone: gradients are divided by `loss_scale`, then multiplied by `clip`, in every place.

        The gradients of DEVICE change, the others stay as they are.
        """
        self._scaling = GradientScaling(float(loss_scale), float(clip))

    @torch.no_grad()
    def settle(self) -> None:
        """Bring the states that exist to where their parameters rest."""
        for index, param in self._params():
            self._states.settle(param, self.optimizer.param_groups[index], self.place(param) is not Place.DEVICE)

    # ---- a step

    def _step(self) -> None:
        resting: dict[Place, list[_Due]] = {Place.HOST: [], Place.SWAPPED: []}
        on_device: dict[int, list[torch.Tensor]] = {}
        for group, param in self._params():
            place = self.place(param)
            if place is Place.DEVICE:
                on_device.setdefault(group, []).append(param)
                self._states.settle(param, self.optimizer.param_groups[group], on_host=False)
            elif param.grad is not None:
                resting[place].append(_Due(group, param, param.grad))
        host, swapped = resting.values()
        self._check([(due.group, due.param) for due in host + swapped])
        swap = self._swap(swapped) if swapped else None
        # From here on something changes: what was refused, or found no memory, can be tried again.
        scaling, self._scaling = self._scaling, GradientScaling()
        for params in on_device.values():
            for param in params:
                if param.grad is not None:
                    scaling.apply_(param.grad)
        if not host and not swapped and len(on_device) == len(self.optimizer.param_groups):
            unhooked_step(type(self.optimizer))(self.optimizer)  # as if we were not here
        else:
            self._step_all(on_device, host, swap, scaling)

    def _step_all(
        self,
        on_device: dict[int, list[torch.Tensor]],
        host: list[_Due],
        swap: SwappedStep | None,
        scaling: GradientScaling,
    ) -> None:
        """Copies first, so that they run beside the rest; the host's own work while the device is busy."""
        groups = self.optimizer.param_groups
        of_whole = self._of_whole_groups()
        left: dict[int, dict[str, Any]] = {}
        if is_fused_adam(self.optimizer):  # counts the steps of a group, whether or not a gradient has come
            left = {index: {"step": group.get("step", 0) + 1} for index, group in enumerate(groups) if group["params"]}
        try:
            if swap is not None:
                swap.fetch()
            if on_device:
                left |= self._original(on_device, of_whole)
            if swap is not None:
                swap.run(lambda chosen, states: left.update(self._original(chosen, of_whole, states)), scaling)
            if host:
                with self.backend.on_host():
                    self._step_on_host(host, scaling)
        finally:
            if swap is not None:
                swap.drain()
                made = {one.param: one.state for one in swap.params if one.state}  # some optimizers have none
                self.optimizer.state.update(made)
        for index, settings in left.items():
            for key, value in settings.items():
                if isinstance(value, torch.Tensor) and isinstance(groups[index].get(key), torch.Tensor):
                    groups[index][key].copy_(value)
                else:
                    groups[index][key] = value

    def _of_whole_groups(self) -> list[dict[str, Any]]:
        """Of each group, what its parts are told beside its settings."""
        stepped: list[list[torch.Tensor]] = [[] for _ in self.optimizer.param_groups]
        for group, param in self._params():
            if param.grad is not None:
                stepped[group].append(param)
        groups = zip(self.optimizer.param_groups, stepped, strict=True)
        return [settings_of_whole_group(self.optimizer, group, params) for group, params in groups]

    def _original(
        self,
        chosen: dict[int, list[torch.Tensor]],
        of_whole: list[dict[str, Any]],
        states: defaultdict[torch.Tensor, State] | None = None,
    ) -> dict[int, dict[str, Any]]:
        """The optimizer's own step for these parameters of its groups; returns the groups' settings after it.

        What a step changes in them (a count, say) it changes in copies: every part of a step begins with the same.
        """
        optimizer = self.optimizer
        groups, state = optimizer.param_groups, optimizer.state
        parts = {}
        for index, params in chosen.items():
            parts[index] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in groups[index].items()}
            parts[index] |= {**of_whole[index], "params": params}
        optimizer.param_groups = list(parts.values())
        if states is not None:
            optimizer.state = states
        try:
            unhooked_step(type(optimizer))(optimizer)
        finally:
            optimizer.param_groups, optimizer.state = groups, state
        return {
            index: {k: v for k, v in part.items() if k != "params" and k not in of_whole[index]}
            for index, part in parts.items()
        }

    def _swap(self, dues: list[_Due]) -> SwappedStep:
        if self._streams is None:  # only now is the device surely chosen
            self._streams = self.backend.new_stream("optimizer in"), self.backend.new_stream("optimizer out")
        params = []
        for due in dues:
            group = self.optimizer.param_groups[due.group]
            state = self._states.on_host(due.param, group, adam=False)
            params.append(Swapped(due.group, due.param, state, due.gradient, counts_on_device(group)))
        return SwappedStep(
            self.backend,
            self._streams,
            params,
            self._group_bytes,
            divisible=is_elementwise(self.optimizer),
            host_like=self._states.host_like,
        )

    def _step_on_host(self, dues: list[_Due], scaling: GradientScaling) -> None:
        if self._host_adam is None:
            self._host_adam = HostAdam()
        for due in dues:
            group = self.optimizer.param_groups[due.group]
            state = self._states.on_host(due.param, group, adam=True)
            count = group.get("step", 0) if is_fused_adam(self.optimizer) else state["step"]
            number = float(count) + 1
            moments = state["exp_avg"], state["exp_avg_sq"]
            settings = adam_settings(self.optimizer, group)
            self._host_adam.step(due.param, due.gradient, *moments, number, settings, scaling)
            if "step" in state:
                state["step"].fill_(number)

    # ---- checks

    def _params(self) -> Iterator[tuple[int, torch.Tensor]]:
        for index, group in enumerate(self.optimizer.param_groups):
            for param in group["params"]:
                yield index, param

    def _check(self, resting: list[tuple[int, torch.Tensor]]) -> None:
        """Refuse what cannot be done for these parameters, which rest on the host, all at once."""
        found, groups = [], self.optimizer.param_groups
        on_host = {index for index, param in resting if self.place(param) is Place.HOST}
        if on_host:
            found += adam_problems(self.optimizer, [groups[index] for index in sorted(on_host)])
        swaps = any(self.place(param) is Place.SWAPPED for _, param in resting)
        if swaps and not (is_elementwise(self.optimizer) or is_per_parameter(self.optimizer)):
            kind = type(self.optimizer).__name__
            found.append(
                f"{kind} is not known to step each parameter without looking at others; give all of them Place.DEVICE"
            )
        for index, param in resting:
            cast = self.place(param) is Place.HOST and param.dtype is not torch.float32
            if not is_host_device(param.device) or not param.is_contiguous() or cast:
                found.append(
                    f"a parameter of shape {tuple(param.shape)} in group {index} is {param.dtype} on {param.device}; "
                    "it must be contiguous host memory, and fp32 to be stepped there"
                )
        if found:
            raise ValueError("parameters that rest on the host: " + "; ".join(found))

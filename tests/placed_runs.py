"""Optimizers over parameters in three places, for tests, and their comparison with what they are without us."""

from __future__ import annotations

import io

import torch

import tests.models
from mindspeed_mem.device.simulated import SimulatedBackend
from mindspeed_mem.zero.optimizer.host_adam import HostAdam, adam_settings
from mindspeed_mem.zero.optimizer.placed import Place, PlacedOptimizer

DEVICE, HOST, SWAPPED = Place
SMALL = 2**16
"""Bytes of a device buffer: one of 16 Ki elements, master and gradient alone, fills it."""


class FusedAdam(torch.optim.Optimizer):
    """What Apex' and TransformerEngine's optimizer of this name does: steps are counted in the groups."""

    def __init__(self, params, lr, weight_decay, adam_w_mode=True):
        defaults = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay, "bias_correction": True}
        super().__init__(params, defaults)
        self.adam_w_mode = int(adam_w_mode)

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state |= {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
                    HostAdam().step(
                        param,
                        param.grad,
                        state["exp_avg"],
                        state["exp_avg_sq"],
                        group["step"],
                        adam_settings(self, group),
                    )

    step.__module__ = "apex.optimizers.fused_adam"  # by which it is known


MAKES = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, weight_decay=0.1),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "Adam fused": lambda groups: torch.optim.Adam(groups, lr=1e-2, weight_decay=0.1, fused=True),
    "AdamW foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=True),
    "AdamW amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
    "FusedAdam": lambda groups: FusedAdam(groups, lr=1e-2, weight_decay=0.1),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "SGD momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, momentum=0.5),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "ASGD": lambda groups: torch.optim.ASGD(groups, lr=1e-2),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
}
OF_HOST = ("Adam fused", "AdamW fused", "FusedAdam")


class Run:
    """An optimizer over two groups of parameters, each in its place; None: as it is without us."""

    def __init__(self, kind, sizes, places, backend=None, group_bytes=SMALL, seed=0):
        torch.manual_seed(seed)
        self.backend, self.places = backend, places
        self.params = [torch.nn.Parameter(torch.randn(size).to(tests.models.DEVICE)) for size in sizes]
        if places is not None:
            for param, place in zip(self.params, places, strict=True):
                if place is not DEVICE and param.numel():
                    param.data = on_host(backend, param.data)
        half = len(sizes) // 2
        groups = [{"params": self.params[:half]}, {"params": self.params[half:], "weight_decay": 0.0, "lr": 3e-3}]
        self.optimizer = MAKES[kind]([group for group in groups if group["params"]])
        self.generator = torch.Generator().manual_seed(1)
        if places is not None:
            self.placed = PlacedOptimizer(
                self.optimizer, dict(zip(self.params, places, strict=True)), backend, group_bytes=group_bytes
            )

    def steps(self, count, missing=()):
        for _ in range(count):
            for index, param in enumerate(self.params):
                gradient = torch.randn(param.shape, generator=self.generator)
                param.grad = None if index in missing else gradient.to(param.device)
            self.optimizer.param_groups[0]["lr"] *= 0.9
            self.optimizer.step()
        return self

    def saved(self):
        """What a checkpoint would hold."""
        file = io.BytesIO()
        torch.save((self.optimizer.state_dict(), [param.data for param in self.params]), file)
        file.seek(0)
        return torch.load(file, "cpu", weights_only=False)

    def load(self, saved):
        state, params = saved
        self.optimizer.load_state_dict(state)
        for param, value in zip(self.params, params, strict=True):
            param.data.copy_(value)
        return self


def late():
    """A device whose copies run as late as they may.

    It is not asked for races: it takes parts of one tensor on their way in opposite directions for one.
    """
    return SimulatedBackend(check=False)


def on_host(backend, tensor):
    held = backend.host_empty(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    return held.copy_(tensor)


def same(one, other):
    """Whether two trees of dicts, lists, tensors and values are equal, and all tensors bit by bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other

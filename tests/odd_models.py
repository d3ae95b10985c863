"""Models whose code reads parameters where no hook on the module that owns them sees it."""

from __future__ import annotations

import dataclasses

import torch

KINDS = ("read of another module", "returned view", "returned bias", "in a dataclass")
HIDDEN = 64


@dataclasses.dataclass
class Output:
    """Torch does not know it as a tree."""

    hidden: torch.Tensor


class Convolution(torch.nn.Module):
    """Takes the weight of a module that it does not call, as megatron-core's MambaMixer does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(HIDDEN, HIDDEN)
        self.conv1d = torch.nn.Conv1d(HIDDEN, HIDDEN, 4, groups=HIDDEN, padding=3)
        self.outer = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x).transpose(1, 2)
        y = torch.nn.functional.conv1d(y, self.conv1d.weight, self.conv1d.bias, padding=3, groups=HIDDEN)
        return x + self.outer(torch.nn.functional.silu(y[..., : x.shape[1]].transpose(1, 2)))


class Scaled(torch.nn.Module):
    """Uses a parameter of its own before and after a module, and returns what hooks have to look for."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 8)
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(torch.tanh(self.linear(torch.nn.functional.linear(x, self.scale))) @ self.scale)


class Positions(torch.nn.Module):
    """Returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN))

    def forward(self, length: int) -> torch.Tensor:
        return self.weight[:length]


class Linear(torch.nn.Linear):
    """Returns its bias besides, as Megatron's do."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.nn.Parameter]:
        return torch.nn.functional.linear(x, self.weight), self.bias


class Biased(torch.nn.Module):
    """Backward reads one of two biases."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Linear(HIDDEN, HIDDEN), Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, bias = self.inner(x)
        y, outer = self.outer(torch.tanh(y) * bias.view(1, -1))
        return y + outer


class OddModel(torch.nn.Module):
    """[batch, length, hidden] to the same."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        kinds = {"read of another module": Convolution, "returned bias": Biased, "in a dataclass": Scaled}
        make = kinds.get(kind, lambda: torch.nn.Linear(HIDDEN, HIDDEN))
        self.positions = Positions() if kind == "returned view" else None
        self.layers = torch.nn.ModuleList(make() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = None if self.positions is None else self.positions(x.shape[1])
        for layer in self.layers:
            output = layer(x)
            x = output.hidden if isinstance(output, Output) else output
            x = x if positions is None else torch.tanh(x) * positions
        return x


def odd_model(kind: str) -> OddModel:
    torch.manual_seed(3)
    return OddModel(kind)


def inputs(step: int) -> torch.Tensor:
    return torch.randn(2, 8, HIDDEN, generator=torch.Generator().manual_seed(step))

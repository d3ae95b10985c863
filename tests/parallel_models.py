"""Models, batches and plans for the tests of parallel modes, and training on one device and on many."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_mem import parallel


class Pair(nn.Module):
    """The original description's MatMuls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(*shape) / 4) for shape in ((16, 32), (32, 8)))

    def forward(self, x, y):
        return F.mse_loss(torch.matmul(torch.matmul(x, self.first), self.second), y)


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        short = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)]
        self.down = nn.Sequential(*short) if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.down(x))


class ResNet(nn.Module):
    """Bottlenecks after a stem of 7x7 with stride and padding, batch norms with running statistics, a max pool."""

    def __init__(self, classes: int = 16, width: int = 8) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = Bottleneck(width, width, 4 * width, 1)
        self.layer2 = nn.Sequential(
            Bottleneck(4 * width, 2 * width, 8 * width, 2), Bottleneck(8 * width, 2 * width, 8 * width, 1)
        )
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x, labels):
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return F.cross_entropy(self.fc(x.mean((2, 3))), labels)


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out = nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (one(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(y), self.dropout, self.training)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class GPT(nn.Module):
    """Two blocks between an embedding and a head that share their weight; makes its positions itself."""

    def __init__(self, hidden: int = 16, heads: int = 4, vocabulary: int = 24, length: int = 8) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, dropout=0.1) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids, labels):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def resnet_batch(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {
        "x": torch.randn(8, 3, 32, 32, generator=generator, dtype=dtype),
        "labels": torch.randint(0, 16, (8,), generator=generator),
    }


def gpt_batch(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 24, (8, 8), generator=torch.Generator().manual_seed(100 + step))
    return {"ids": ids, "labels": ids}


def pair_batch(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(200 + step)
    x, y = (torch.randn(8, size, generator=draw, dtype=torch.float64) for size in (16, 8))
    return {"x": x.to(dtype), "y": y.to(dtype)}


def pair_plan(axes: Any) -> dict[str, Any]:
    """Rows of the first product over all axes, columns of the second over tp: what is between them is gathered."""
    dp, tp = ("dp" if "dp" in axes else None), ("tp" if "tp" in axes else None)
    every = tuple(filter(None, (dp, tp)))
    return {
        "": {"in_strategy": ((dp, None), (dp, None))},
        ":matmul.0": {"in_strategy": ((every, None), (None, None))},
        ":matmul.1": {"in_strategy": ((dp, None), (None, tp))},
    }


def resnet_plan(axes: Any) -> dict[str, Any]:
    """Batch over dp, the classifier's columns over tp."""
    dp = "dp" if "dp" in axes else None
    plan: dict[str, Any] = {"": {"in_strategy": ((dp, None, None, None), (dp,))}}
    plan["fc"] = {"out_strategy": ((dp, None),)}
    if "tp" in axes:
        plan["fc"] |= {"in_strategy": ((dp, None),), "parameter_plan": {"weight": ("tp", None), "bias": ("tp",)}}
    return plan


def gpt_plan(axes: Any) -> dict[str, Any]:
    """Batch over dp, Megatron's split over tp."""
    dp = "dp" if "dp" in axes else None
    plan: dict[str, Any] = {"": {"in_strategy": ((dp, None), (dp, None))}}
    if "tp" in axes:
        columns = {"in_strategy": ((dp, None, None),), "parameter_plan": {"weight": ("tp", None), "bias": ("tp",)}}
        rows = {"parameter_plan": {"weight": (None, "tp")}, "out_strategy": ((dp, None, None),)}
        plan |= {f"blocks.*.{name}": columns for name in ("q", "k", "v", "fc1")}
        plan |= {f"blocks.*.{name}": rows for name in ("out", "fc2")}
        plan["tokens"] = {"parameter_plan": {"weight": ("tp", None)}, "out_strategy": ((dp, None, None),)}
        plan["head"] = {"out_strategy": ((dp, None, None),)}
    return plan


MODELS = {
    "pair": (Pair, pair_batch, pair_plan),
    "resnet": (ResNet, resnet_batch, resnet_plan),
    "gpt": (GPT, gpt_batch, gpt_plan),
}


def trained(model: nn.Module, batches: list[dict[str, torch.Tensor]], seed: int = 7) -> list[float]:
    """The losses of these steps."""
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(float(full(loss)))
    return losses


def full(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(((one - other).abs() / one.abs().clamp(min=1)).max())


def compared(kind: str, shape: dict[str, int], dtype: torch.dtype, steps: int = 5) -> dict[str, float]:
    """Largest differences of losses, parameters and buffers between one device and a mesh of this shape.

    Of numbers above 1 the difference is counted as a part of them: in fp32 a loss of 11 has no digits below 1e-6.
    """
    make, batch, plan = MODELS[kind]
    mesh = parallel.mesh("cpu", **shape)
    torch.manual_seed(2)  # (with 1, a ReLU in fp32 flips on one device, too)
    one = make().to(dtype)
    many = parallel.semi_auto(copy.deepcopy(one), mesh, plan(shape))
    batches = [batch(step, dtype) for step in range(steps)]
    losses = trained(one, batches), trained(many, batches)
    tensors = [dict([*model.named_parameters(), *model.named_buffers()]) for model in (one, many)]
    return {
        "loss": max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(*losses, strict=True)),
        "tensors": max(apart(full(tensors[0][name]), full(other)) for name, other in tensors[1].items()),
        "learned": abs(losses[0][0] - losses[0][-1]),
    }

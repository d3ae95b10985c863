"""Plain torch models for chunks without Megatron, and the training loop that theirs is compared with.

The reference holds everything everywhere: fp32 masters, torch's own Adam, gradients averaged in fp32 micro-batch by
micro-batch, and a loss scale that is adapted by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from mindspeed_mem.device import get_backend
from mindspeed_mem.gemini import GeminiAdamOptimizer, GeminiDDP
from tests.models import DEVICE

VOCABULARY, LENGTH, BATCH = 40, 12, 2
SMALL_CHUNKS = {"search_range_mb": 0.001, "min_chunk_size_mb": 0.004, "hidden_dim": 64}
"""For `TinyGPT`: several chunks, some with parameters of two layers."""
ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}
"""A large eps: gradients that are 0 but for rounding (of a key's bias) must not be made large by Adam."""


class Block(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(hidden)
        self.attention = torch.nn.MultiheadAttention(hidden, 2, batch_first=True)
        self.fc1, self.fc2 = torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.fc2(torch.nn.functional.gelu(self.fc1(self.norm(x))))


class TinyGPT(torch.nn.Module):
    """Embedding and output tied, a buffer, a parameter that is never used and one that is frozen.

    `MultiheadAttention` reads a weight of a module that it does not call.
    """

    def __init__(self, hidden: int = 32, layers: int = 3, recompute: str = "none") -> None:
        super().__init__()
        self.recompute = recompute
        self.wte = torch.nn.Embedding(VOCABULARY, hidden)
        self.positions = torch.nn.Embedding(LENGTH, hidden)
        self.positions.weight.requires_grad_(False)
        self.blocks = torch.nn.ModuleList(Block(hidden) for _ in range(layers))
        self.unused = torch.nn.Linear(hidden, 8)
        self.norm = torch.nn.LayerNorm(hidden)
        self.head = torch.nn.Linear(hidden, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("scale", torch.full((hidden,), 0.5))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)) * self.scale
        for block in self.blocks:
            if self.recompute == "none" or not torch.is_grad_enabled():
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(self.norm(x))


def plain(seed: int = 5, **more: Any) -> TinyGPT:
    torch.manual_seed(seed)
    return TinyGPT(**more)


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def batches(steps: int, micro: int = 1, seed: int = 11) -> torch.Tensor:
    """[steps, micro, batch, length] of this rank."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (steps, micro, ranks, BATCH, LENGTH), generator=generator)
    return tokens[:, :, rank].to(DEVICE)


def reference(
    data: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    max_norm: float = 0.0,
    scale: float = 1.0,
    model: torch.nn.Module | None = None,
    all_used: bool = False,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses of this rank, fp32 masters by name) after training on `data`; `all_used`: every parameter, on a rank."""
    model = (plain() if model is None else model).to(DEVICE)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    masters = {name: param.detach().clone().requires_grad_() for name, param in trained.items()}
    optimizer = torch.optim.AdamW(masters.values(), **ADAM, fused=get_backend(DEVICE).fuses_adam or None)
    model.to(dtype)
    losses = []
    for step in data:
        optimizer.zero_grad()
        for tokens in step:
            model.zero_grad()
            loss = loss_of(model, tokens)
            (loss * scale).backward()
            losses.append(loss.item())
            for name, param in trained.items():
                if param.grad is None and all_used:
                    param.grad = torch.zeros_like(param)
                if param.grad is not None:
                    grad = average(param.grad.float())
                    masters[name].grad = grad if masters[name].grad is None else masters[name].grad + grad
        grads = [master.grad for master in masters.values() if master.grad is not None]
        if not all(torch.isfinite(grad).all() for grad in grads):
            scale /= 2  # with a hysteresis of 1
            continue
        for grad in grads:
            grad /= scale
        if max_norm:
            torch.nn.utils.clip_grad_norm_(masters.values(), max_norm)
        optimizer.step()
        with torch.no_grad():
            for name, param in trained.items():
                param.copy_(masters[name])
    return losses, {name: master.detach().cpu() for name, master in masters.items()}


def average(grad: torch.Tensor) -> torch.Tensor:
    if dist.is_initialized() and dist.get_world_size() > 1:
        grad = grad / dist.get_world_size()
        dist.all_reduce(grad)
    return grad


def chunked(
    model: torch.nn.Module | None = None, adam: dict[str, Any] | None = None, **more: Any
) -> tuple[GeminiDDP, GeminiAdamOptimizer]:
    """A model (None: `plain`) in small chunks, and its optimizer."""
    options = {"mixed_precision": torch.float32} | SMALL_CHUNKS | more
    wrapped = GeminiDDP(plain() if model is None else model, DEVICE, **options)
    return wrapped, GeminiAdamOptimizer(wrapped, **ADAM, **(adam or {}))


def train(
    model: GeminiDDP,
    optimizer: GeminiAdamOptimizer,
    data: torch.Tensor,
    between: Callable[[], None] = lambda: None,
) -> list[float]:
    """Losses of this rank; `between` is called after each step."""
    losses = []
    for step in data:
        optimizer.zero_grad()
        for tokens in step:
            loss = loss_of(model, tokens)
            optimizer.backward(loss)
            losses.append(loss.item())
        optimizer.step()
        between()
    return losses


def masters(model: GeminiDDP) -> dict[str, torch.Tensor]:
    """The trained parameters, complete, by name."""
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    state = model.state_dict()
    return {name: state[name] for name in names}


def farthest(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest value of each tensor; 0 if all bits are equal."""
    assert list(found) == list(wanted)
    return max(((found[n] - wanted[n]).abs().max() / wanted[n].abs().max().clamp(min=1e-12)).item() for n in wanted)

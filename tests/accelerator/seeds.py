"""Attention that returns a seed of its dropout as torch's fused kernels do: without dropout nobody has written it."""

from __future__ import annotations

import ctypes
import functools

import torch

import mindspeed_mem
from tests.attachment.plain_models import same
from tests.models import DEVICE

RETURNS = {"named": "Tensor output, Tensor philox_seed", "unnamed": "Tensor, Tensor"}
_numbers = ctypes.c_long()  # nothing puts that back


@functools.cache
def _library() -> torch.library.Library:
    library = torch.library.Library("tests_of_seeds", "FRAGMENT")
    for name, returns in RETURNS.items():
        library.define(f"{name}(Tensor query, float dropout_p=0.) -> ({returns})")
        library.impl(name, _compute, "CompositeExplicitAutograd")
        torch.library.register_autograd(f"tests_of_seeds::{name}", _gradient, setup_context=_keep)
    return library


def _compute(query, dropout_p=0.0):
    """The seed is always another."""
    _numbers.value += 1
    return query.exp(), torch.full((), _numbers.value, dtype=torch.int64, device=query.device)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*output)


def _gradient(ctx, gradient, _):
    return gradient * ctx.saved_tensors[0], None


class Attention(torch.nn.Module):
    def __init__(self, operator: str, dropout: float):
        super().__init__()
        _library()
        self.run, self.dropout = getattr(torch.ops.tests_of_seeds, operator), dropout
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.run(self.linear(x), self.dropout)[0]


def recomputed(operator: str, dropout: float) -> tuple[list[bool], int]:
    """Whether gradients of some steps are those without recompute, and the bytes that were made again."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(Attention(operator, dropout), Attention(operator, dropout)).to(DEVICE)

    def gradients():
        model.zero_grad()
        model(torch.linspace(-1, 1, 16, device=DEVICE).view(2, 8)).sum().backward()
        return [one.grad.clone() for one in model.parameters()]

    plain = gradients()
    with mindspeed_mem.attach(model, {"recompute_config": {"recompute": True}}, layers=["0", "1"]) as attached:
        found = [gradients() for _ in range(3)]
        figures = attached.engine.report()
    return [same(one, plain) for one in found], figures.recomputed_bytes

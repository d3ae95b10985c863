"""What whoever calls an operator puts into a module for as long as it runs, as ms-swift's layers do with Megatron's
rotary embedding, is there when the operator runs again, and nowhere else."""

import contextlib
import gc
import sys
import weakref

import pytest
import torch
from torch import nn

import mindspeed_mem
from tests.attachment.plain_models import same

THIS = sys.modules[__name__]
PLANS = {
    "part": {"recompute_config": {"select_recompute": {"part": True}}},
    "whole": {"recompute_config": {"recompute": True}},
}
factor = 1.0


def turned(x):
    return x.sin()


THE_OTHER = turned


def by_name(x):
    return turned(x)


def by_module(x):
    return THIS.turned(x)


def by_number(x):
    return (x * factor).sin()


class Part(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.linear, self.read = nn.Linear(8, 8), read

    def forward(self, x):
        return self.read(self.linear(x))


@contextlib.contextmanager
def others(block):
    """In place of what is there: functions made anew for each call, which hold the block."""
    before = turned, factor
    THIS.turned, THIS.factor = (lambda x: (x * block.scale).cos()), block.scale
    try:
        yield
    finally:
        THIS.turned, THIS.factor = before


class Block(nn.Module):
    def __init__(self, read, scale):
        super().__init__()
        self.part, self.scale = Part(read), scale

    def forward(self, x):
        with others(self) if self.scale else contextlib.nullcontext():
            x = x + self.part(x)
        return x * x


class Model(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.blocks = nn.ModuleList(Block(read, scale) for scale in (0.5, 0.0, 2.0))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def trained(read, plan):
    """Three steps, of two forwards before their backward; bytes that were recomputed; what is left of the model."""
    torch.manual_seed(3)
    model, found, recomputed = Model(read), [], 0
    attached = mindspeed_mem.attach(model, plan) if plan else None
    for _ in range(3):
        losses = [model(torch.randn(4, 8)).mean() for _ in range(2)]
        sum(losses).backward()
        found += [*(loss.detach() for loss in losses), *(one.grad.clone() for one in model.parameters())]
        assert (turned is THE_OTHER, factor) == (True, 1.0)
    if attached is not None:
        recomputed = attached.engine.report().recomputed_bytes
        attached.detach()
    alive = weakref.ref(model)
    del model, attached, losses
    gc.collect()
    return found, recomputed, alive()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("read", [by_name, by_module, by_number])
def test_a_second_run_finds_it(read, plan, caplog):
    plain, *_ = trained(read, None)
    found, recomputed, model = trained(read, PLANS[plan])
    assert same(found, plain)
    assert recomputed and "no effect" not in caplog.text and model is None

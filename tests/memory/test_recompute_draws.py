"""Operators that draw random numbers and put the generator back draw the same ones when they run again."""

import copy

import pytest
import torch
from torch import nn

import mindspeed_mem


class InAFork(nn.Module):
    def forward(self, x):
        with torch.random.fork_rng(devices=()):
            mask = torch.rand_like(x) > 0.3
        return torch.tanh(x * mask) * torch.sin(x * mask)


class PutsBack(nn.Module):
    def forward(self, x):
        state = torch.get_rng_state()
        mask = torch.rand_like(x) > 0.3
        torch.set_rng_state(state)
        return torch.tanh(x * mask) * torch.sin(x * mask)


class OfItsOwnSeed(nn.Module):
    def forward(self, x):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(5)
            return torch.tanh(x * (torch.rand_like(x) > 0.3))


class Block(nn.Module):
    def __init__(self, drawing):
        super().__init__()
        self.linear, self.drawing = nn.Linear(16, 16), drawing()

    def forward(self, x):
        return nn.functional.dropout(self.drawing(self.linear(x)), 0.1)


def gradients(model):
    """Of three steps of two micro-batches, both in flight at once."""
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        losses = [model(torch.ones(4, 16) + number).square().mean() for number in range(2)]
        for loss in reversed(losses):
            loss.backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
    return found, torch.get_rng_state()


@pytest.mark.parametrize("drawing", [InAFork, PutsBack, OfItsOwnSeed])
def test_the_same_numbers_are_drawn_again(drawing, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(drawing) for _ in range(2)))
    expected, state = gradients(copy.deepcopy(model))
    with mindspeed_mem.attach(model, {"recompute_config": {"select_recompute": {"drawing": True}}}) as attached:
        mine, mine_state = gradients(model)
        assert attached.engine.report().recomputed_bytes
    assert all(map(torch.equal, mine, expected)) and torch.equal(mine_state, state)
    assert "no effect" not in caplog.text

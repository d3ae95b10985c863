"""Operators that draw random numbers and put the generator back draw the same ones when they run again."""

import copy

import pytest
import torch
from torch import nn

import mindspeed_mem
from tests.worlds import on_ranks


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


class ForksAndDrops(InAFork):
    """It draws for itself at first, and later only where it puts back."""

    p = 0.5

    def forward(self, x):
        x = super().forward(x)
        return nn.functional.dropout(x, self.p) if self.p else x


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
    for step in range(3):
        for module in model.modules():
            if isinstance(module, ForksAndDrops):
                module.p = 0.5 if step < 2 else 0.0
        losses = [model(torch.ones(4, 16, device="cpu") + number).square().mean() for number in range(2)]
        for loss in reversed(losses):
            loss.backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
    return found, torch.get_rng_state()


@pytest.mark.parametrize("drawing", [InAFork, PutsBack, OfItsOwnSeed, ForksAndDrops])
def test_the_same_numbers_are_drawn_again(drawing, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(drawing) for _ in range(2)))
    expected, state = gradients(copy.deepcopy(model))
    with mindspeed_mem.attach(model, {"recompute_config": {"select_recompute": {"drawing": True}}}) as attached:
        mine, mine_state = gradients(model)
        assert attached.engine.report().recomputed_bytes
    assert all(map(torch.equal, mine, expected)) and torch.equal(mine_state, state)
    assert "no effect" not in caplog.text


def test_the_generator_that_is_looked_at_is_the_hosts():
    model = nn.Sequential(*(Block(InAFork) for _ in range(2)))
    expected, _ = gradients(copy.deepcopy(model))
    with mindspeed_mem.attach(model, {"recompute_config": {"select_recompute": {"drawing": True}}}):
        with torch.device("meta"):
            mine, _ = gradients(model)
    assert all(map(torch.equal, mine, expected))


class WithOthers(nn.Module):
    """The first rank draws from a generator of its own, which cannot be repeated; the other one from torch's."""

    def __init__(self):
        super().__init__()
        self.own = torch.Generator()

    def forward(self, x):
        torch.distributed.all_reduce(x.detach().clone())
        if torch.distributed.get_rank() == 0:
            return torch.tanh(x * torch.rand(x.shape, generator=self.own)) * x
        return nn.functional.dropout(torch.tanh(x), 0.5) * x


def on_two_ranks():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(WithOthers) for _ in range(2)))
    expected, _ = gradients(copy.deepcopy(model))
    for module in model.modules():
        if isinstance(module, WithOthers):
            module.own = torch.Generator()
    with mindspeed_mem.attach(model, {"recompute_config": {"select_recompute": {"drawing": True}}}):
        mine, _ = gradients(model)
    return all(map(torch.equal, mine, expected))


@pytest.mark.distributed
def test_what_does_not_repeat_itself_on_one_rank_is_kept_on_all():
    assert on_ranks(2, on_two_ranks) == [True, True]

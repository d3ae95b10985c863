"""Operators that run again write to parts of one storage that have version counters of their own (`unsafe_chunk`)."""

import pytest
import torch
from torch import nn

import mindspeed_mem
from tests.attachment.plain_models import same

WIDTH = 16
WHOLE = {"recompute_config": {"recompute": True}}
INNER = {"recompute_config": {"select_recompute": {"inner": True}}}


class Gates(nn.Module):
    """Backward wants the parts last of all, and nothing after them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        one, other, third = self.linear(x).unsafe_chunk(3, -1)
        return one.sigmoid_() + other.tanh_() + third.exp_()


class Handed(nn.Module):
    """Another module takes one part, before the other is there."""

    def __init__(self, saves):
        super().__init__()
        self.linear, self.act, self.saves = nn.Linear(WIDTH, 2 * WIDTH), nn.Hardtanh(), saves

    def forward(self, x):
        one, other = self.linear(x).unsafe_chunk(2, -1)
        one = one.sigmoid_() if self.saves else one.add_(1)
        return self.act(one.detach()) + one + other.tanh_()


class Returned(Gates):
    """Another operator saves the parts."""

    def forward(self, x):
        one, other, third = self.linear(x).unsafe_chunk(3, -1)
        return one.sigmoid_(), other.tanh_(), third.exp_()


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        made = self.inner(x)
        if isinstance(made, tuple):
            made = made[0] * made[1] + made[-1] if isinstance(self.inner, Returned) else made[0]
        return made


INNERS = {
    "gru": lambda: nn.GRU(WIDTH, WIDTH),
    "gru cell": lambda: nn.GRUCell(WIDTH, WIDTH),
    "lstm cell": lambda: nn.LSTMCell(WIDTH, WIDTH),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH).double(),
    "gates": Gates,
    "handed": lambda: Handed(False),
    "handed, saved": lambda: Handed(True),
    "returned": Returned,
}


def trained(inner, plan):
    """What five steps give, how many bytes were made again, and those left over."""
    torch.manual_seed(5)
    model = nn.Sequential(*[Block(INNERS[inner]()) for _ in range(3)])
    dtype = next(model.parameters()).dtype
    found = []
    with mindspeed_mem.attach(model, plan) as attached:
        for _ in range(5):
            model.zero_grad()
            loss = model(torch.randn(4, WIDTH, dtype=dtype)).square().mean()
            loss.backward()
            found += [loss.detach().clone(), *(one.grad.clone() for one in model.parameters())]
        del loss
        report = attached.engine.report()
    return found, report.recomputed_bytes, report.held_bytes


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("plan", [WHOLE, INNER], ids=["layers", "operators"])
def test_each_part_is_made_again_as_it_was(inner, plan):
    expected, _, _ = trained(inner, None)
    found, again, left = trained(inner, plan)
    assert same(found, expected)
    assert again and not left

"""A mode that sees every operator changes no bit of a gradient, whichever formula autograd chooses without it."""

import pytest
import torch
import torch.nn.functional as F

from mindspeed_mem.device.ledger import DeviceLedger
from mindspeed_mem.device.simulated import SimulatedBackend
from tests.guarding import Sandbag, guarded, limited_memory, numbers


def ties(x):
    return torch.cat([x, x.amax()[None, None].expand(1, x.shape[1]), x.amin()[None, None].expand(1, x.shape[1])])


def symmetric(x):
    return x.t() @ x


# The first are those whose backward gives other bits under a mode; then some of those that ask and give the same.
FUNCTIONS = {
    "prod": lambda x: x.prod(),
    "prod, zeros": lambda x: (x * (x > 0)).prod(),
    "prod, a dimension": lambda x: x.prod(0),
    "cumprod": lambda x: x.cumprod(0),
    "cumprod, zeros": lambda x: (x * (x > -1.5)).cumprod(0),
    "cumprod_": lambda x: x.clone().cumprod_(0),
    "cumprod_, a view": lambda x: _in_a_view(x),
    "masked_fill": lambda x: x.detach().masked_fill(x.detach() > 0, x[0, 0]) * x.detach(),
    "masked_fill_": lambda x: x.detach().clone().masked_fill_(x.detach() > 0, x[0, 0]) * x.detach(),
    "max": lambda x: -(ties(x).max()),
    "min": lambda x: -(ties(x).min()),
    "median": lambda x: -(x.median()),
    "nanmedian": lambda x: -(x.nanmedian()),
    "eigh": lambda x: torch.linalg.eigh(symmetric(x))[0],
    "eig": lambda x: torch.linalg.eig(symmetric(x))[0].abs(),
    "max, a dimension": lambda x: x.max(0)[0],
    "topk": lambda x: x.topk(3)[0],
    "sort": lambda x: x.sort()[0] * torch.arange(x.shape[1]),
    "gather": lambda x: x.gather(0, x.argsort(0)),
    "index": lambda x: x[torch.tensor([0, 0, 1])],
    "index_select": lambda x: x.index_select(0, torch.tensor([0, 0, 1])),
    "quantile": lambda x: x.quantile(0.3, dim=0),
    "atan2": lambda x: torch.atan2(x, x.flip(0)),
    "clamp": lambda x: x.clamp(max=x.mean()),
    "matrix_exp": lambda x: torch.matrix_exp(symmetric(x) / 100),
    "det": lambda x: torch.linalg.det(symmetric(x) + torch.eye(x.shape[1])),
    "inv": lambda x: torch.linalg.inv(symmetric(x) + torch.eye(x.shape[1])),
    "svd": lambda x: torch.linalg.svd(x)[1],
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x.flip(0)[None]),
    "cross entropy": lambda x: F.cross_entropy(x, torch.arange(x.shape[0])),
    "binary cross entropy": lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
    "ctc": lambda x: F.ctc_loss(
        x.log_softmax(1)[:, None], torch.tensor([[1, 2, 3]]), torch.tensor([x.shape[0]]), torch.tensor([3])
    ),
}


def _in_a_view(x):
    whole = x.clone()
    whole[2:6].cumprod_(0)
    return whole * 2


MODES = {
    "guard": lambda: guarded(Sandbag(None, pieces=0)),
    "ledger": lambda: DeviceLedger().watch(),
    "tracker": lambda: SimulatedBackend().tracker(),
}


def gradient(function, own=False):
    x = numbers(8, 12).requires_grad_()
    result = function(x)
    one = numbers(result.numel(), seed=1).reshape(result.shape)
    given = torch.autograd.grad(result, x, one) if own else torch.autograd.grad((result * one).sum(), x)
    return [tensor.numpy().tobytes() for tensor in (result.detach(), *given)]


@pytest.mark.parametrize("own", [False, True], ids=["in a sum", "last, with a gradient of its own"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_guard_changes_no_bit(name, own):
    expected = gradient(FUNCTIONS[name], own)
    with MODES["guard"]():
        assert gradient(FUNCTIONS[name], own) == expected


def everything(x):
    return sum(FUNCTIONS[name](x).sum() for name in list(FUNCTIONS)[:15])


def test_modes_in_each_other_change_no_bit():
    expected = gradient(everything)
    with MODES["ledger"](), MODES["guard"](), MODES["tracker"]():
        assert gradient(everything) == expected


def test_what_was_made_under_a_mode_may_run_backward_without_it():
    expected = gradient(everything)
    with MODES["guard"]():
        x = numbers(8, 12).requires_grad_()
        result = everything(x)
    given = torch.autograd.grad((result * numbers(1, seed=1).reshape(())).sum(), x)
    assert [tensor.numpy().tobytes() for tensor in (result.detach(), *given)] == expected


def test_before_and_behind_such_a_node_operators_are_guarded():
    with limited_memory() as memory:
        x = numbers(64, 64).requires_grad_()
        sandbag, others = Sandbag(memory), []
        with guarded(sandbag) as guard:
            y = x.exp()
            y.register_hook(lambda grad: (others.append(grad * 2), setattr(memory, "limit", None)) and None)
            z = y.prod(0)
            z.register_hook(lambda grad: others.append(grad * 2))
            memory.limit = memory.allocated + 1000
            torch.autograd.grad(z.sum(), x)
        memory.limit = None
    assert guard.lacks and sandbag.asked and len(others) == 2


def test_room_is_made_before_what_the_guard_does_not_see():
    with limited_memory() as memory:
        x = numbers(64, 64).requires_grad_()
        expected = torch.autograd.grad(x.prod(), x)[0]
        sandbag = Sandbag(memory)
        with guarded(sandbag):
            z, one = x.prod(), torch.ones(())
            memory.limit = memory.allocated + x.nbytes // 2
            found = torch.autograd.grad(z, x, one)[0]
        memory.limit = None
    assert sandbag.asked
    assert torch.equal(found, expected)

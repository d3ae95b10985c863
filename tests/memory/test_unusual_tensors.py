"""Tensors that are no memory of one layout and with a version counter: attached models train as they do without it."""

import pytest
import torch
from torch.autograd import forward_ad

import mindspeed_mem
from tests.attachment import plain_models
from tests.attachment.plain_models import PLANS, same

WIDTH = 16


class Block(plain_models.Block):
    """With another tensor to multiply with or to add, if there is one."""

    def forward(self, x, more=None):
        if more is not None:
            x = more @ x if more.shape[0] == more.shape[1] else x + more
        return super().forward(x)


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(WIDTH) for _ in range(3))

    def forward(self, x, *more):
        for block in self.blocks:
            x = block(x, *more)
        return x


def with_tangents(model, turn):
    """The gradient by the input, and its derivative in a direction."""
    x = torch.randn(4, WIDTH).requires_grad_()
    with forward_ad.dual_level():
        loss = model(forward_ad.make_dual(x, torch.ones_like(x))).square().mean()
        [gradient] = torch.autograd.grad(loss, x)
        return *forward_ad.unpack_dual(loss), *forward_ad.unpack_dual(gradient)


def of_mean(model, *given):
    loss = model(*given).square().mean()
    loss.backward()
    return [loss]


def sparse(model, turn):
    return of_mean(model, torch.randn(4, WIDTH), torch.randn(4, 4).relu().to_sparse())


def sparse_rows(model, turn):
    return of_mean(model, torch.randn(4, WIDTH), torch.randn(4, 4).relu().to_sparse_csr())


def sparse_in_the_end(model, turn):
    more = torch.randn(4, 4).relu()
    return of_mean(model, torch.randn(4, WIDTH), more if turn < 3 else more.to_sparse())


def nested(model, turn):
    x = torch.nested.nested_tensor([torch.randn(3 + turn % 2, WIDTH), torch.randn(2, WIDTH)])
    loss = torch.nested.to_padded_tensor(model(x), 0.0).square().mean()
    loss.backward()
    return [loss]


def of_inference(model, turn):
    with torch.inference_mode():
        more = torch.randn(4, WIDTH)
    return of_mean(model, torch.randn(4, WIDTH), more)


STEPS = [with_tangents, sparse, sparse_rows, sparse_in_the_end, nested, of_inference]


def trained(step, plan):
    """What five steps give, and how much was moved or made again."""
    torch.manual_seed(3)
    model = Stack()
    found = []
    with mindspeed_mem.attach(model, plan) as attached:
        for turn in range(5):
            model.zero_grad()
            found += [one.detach().clone() for one in step(model, turn)]
            found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
        report = attached.engine.report()
    return found, report.bytes_out + report.recomputed_bytes


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_model_trains_on_them_as_without_a_plan(step, plan):
    expected, _ = trained(step, None)
    found, elsewhere = trained(step, PLANS[plan])
    assert same(found, expected)
    recomputes = "recompute_config" in PLANS[plan]
    if step is not nested and not (step is with_tangents and recomputes):  # of those nothing leaves
        assert elsewhere

"""torch.func's transforms, and code that disables saved-tensor hooks, under plans and survival: as without them."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu

import mindspeed_mem
from tests.attachment.plain_models import MIXED, PLANS, TEXT, Block, Net, loss_of, results, same

NARROW = {"swap_config": {"swap": True, "op_swap": [{"op_name": "fc2", "backward_prefetch": 1, "layers": [0]}]}}
SURVIVES = {"plan": None, "survive": True}
ARGUMENTS = {
    **{name: {"plan": plan} for name, plan in PLANS.items()},
    "narrow": {"plan": NARROW},
    "survive": SURVIVES,
    "mixed survive": {"plan": MIXED, "survive": True},
}


class Learns(Block):
    """Has a gradient of its own in its forward."""

    def mlp(self, x):
        x = self.fc1(self.norm(x))
        x = self.act(x) + torch.func.grad(lambda x: x.tanh().square().sum())(x.detach())
        return self.fc2(self.drop(x * torch.func.vjp(torch.sin, x)[1](torch.ones_like(x))[0]))


class Differentiates(Block):
    """Goes through modules of its own in a transform."""

    def mlp(self, x):
        made, back = torch.func.vjp(lambda x: self.act(self.fc1(x)), self.norm(x))
        along = torch.func.jvp(lambda x: self.fc2(x), (made,), (torch.ones_like(made),))[1]
        each = torch.func.vmap(lambda x: self.fc2(self.act(x)))(made)
        return self.fc2(self.drop(made)) + back(made)[0] + along + each


class Transforms(nn.Module):
    """An operator that consists of one."""

    def forward(self, x):
        value, back = torch.func.vjp(torch.tanh, x)
        return value + back(torch.ones_like(x))[0]


def learning(model):
    model.blocks = nn.ModuleList(Learns(16) for _ in model.blocks)


def differentiating(model):
    model.blocks = nn.ModuleList(Differentiates(16) for _ in model.blocks)


def transforming(model):
    for block in model.blocks:
        block.act = Transforms()


def usual(model):
    loss = loss_of(model)
    loss.backward()
    return [loss]


def disabled(model):
    found = []
    for part in TEXT.split(2):
        with disable_saved_tensors_hooks("none here"):
            with disable_saved_tensors_hooks("nor here"):
                found.append(loss_of(model, part))
            with pytest.raises(RuntimeError, match="none here"), save_on_cpu():
                pass
        found.append(loss_of(model, part))
        (found[-1] + found[-2]).backward()
    return found


def beside(model):
    """Outside of layers, and one that raises."""
    value = torch.func.grad(lambda x: x.square().sum())(torch.ones(3))
    with pytest.raises(ZeroDivisionError):
        torch.func.grad(lambda x: 1 / 0)(torch.ones(3))
    return [*usual(model), value]


def compare(change, step, arguments):
    torch.manual_seed(0)
    model = Net()
    change(model)
    plain = results(copy.deepcopy(model), step)

    def within(model):
        with attached.step():
            return step(model)

    with mindspeed_mem.attach(model, **arguments) as attached:
        assert same(results(model, within), plain)
        assert attached.engine.survival is None or attached.engine.mover.evicted_bytes == 0
        return attached.engine.report()


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("change", [learning, transforming, differentiating])
@pytest.mark.needs_torch("2.7", "transforms refuse saved-tensor hooks")
def test_in_a_layer(change, name):
    figures = compare(change, usual, ARGUMENTS[name])
    assert name in ("narrow", "survive") or figures.bytes_out or figures.recomputed_bytes


def with_tangents(model):
    """A product with the Hessian, forward over reverse, of layers called by themselves; then training."""
    x = model.embedding(TEXT).detach()
    with forward_ad.dual_level():
        x = forward_ad.make_dual(x, torch.ones_like(x)).requires_grad_()
        y = x
        for block in model.blocks:
            y = block(y)
        (grad,) = torch.autograd.grad(y.square().mean(), x)
        product = forward_ad.unpack_dual(grad).tangent
    return [product, *usual(model)]


@pytest.mark.parametrize("name", ["whole", "parts", "mixed"])
def test_with_tangents_it_runs_natively(name):
    assert compare(lambda model: None, with_tangents, ARGUMENTS[name]).recomputed_bytes


@pytest.mark.parametrize("step", [disabled, beside])
@pytest.mark.parametrize("name", ["mixed", "survive", "mixed survive"])
@pytest.mark.needs_torch("2.7", "transforms refuse saved-tensor hooks")
def test_around_and_beside_the_model(step, name):
    compare(lambda model: None, step, ARGUMENTS[name])


@pytest.mark.needs_torch("2.7", "transforms refuse saved-tensor hooks")
def test_hooks_of_others_are_left_in_force():
    model = Net()
    learning(model)
    with save_on_cpu(), pytest.raises(RuntimeError, match="saved tensor hooks"):
        loss_of(model)
    with mindspeed_mem.attach(model, MIXED):
        with save_on_cpu(), pytest.raises(RuntimeError, match="saved tensor hooks"):
            loss_of(model)
        loss_of(model).backward()


def test_nothing_is_left_behind():
    names = ["_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable"]
    before = [getattr(torch._C._autograd, name) for name in names]
    with mindspeed_mem.attach(Net(), MIXED):
        assert before != [getattr(torch._C._autograd, name) for name in names]
    assert before == [getattr(torch._C._autograd, name) for name in names]

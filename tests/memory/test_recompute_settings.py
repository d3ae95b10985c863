"""What modules are set to between a forward and its backward is put back for the second run: the same bits."""

import copy
import gc

import pytest
import torch
from torch import nn

import mindspeed_mem
from mindspeed_mem.activation.storage.ledger import LEDGER
from tests.attachment.plain_models import TEXT, WHOLE, Block, Net, loss_of, same

PARTS = {"recompute_config": {"select_recompute": {"fc1": True, "act": True, "norm": True}}}
BOTH = {**WHOLE, "swap_config": {"swap": True, "smallest_bytes": 0, "op_swap": [], "swap_recompute_inputs": True}}


class Adapted(nn.Linear):
    """A linear with adapters of which one is active, as LoRA's are; only that one trains."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.down = nn.ModuleDict({name: nn.Linear(sizes[0], 2, bias=False) for name in "ab"})
        self.up = nn.ModuleDict({name: nn.Linear(2, sizes[1], bias=False) for name in "ab"})
        self.active, self.disabled, self.scale = ["a"], False, 0.7

    def forward(self, x):
        y = super().forward(x)
        for name in [] if self.disabled else self.active:
            y = y + self.scale * self.up[name](self.down[name](x))
        return y


class AdaptedBlock(Block):
    def __init__(self, width):
        super().__init__(width)
        self.fc1 = Adapted(width, 4 * width)


def adapted():
    model = Net(2)
    model.blocks = nn.ModuleList(AdaptedBlock(16) for _ in range(2))
    return model


def activate(model, name):
    for module in model.modules():
        if isinstance(module, Adapted):
            module.active = [name]
            for other in "ab":
                for part in (module.down, module.up):
                    part[other].requires_grad_(other == name)


def set_all(model, **values):
    for module in model.modules():
        for name in values.keys() & vars(module).keys():
            setattr(module, name, values[name])


def two_adapters(model):
    activate(model, "a")
    first = loss_of(model, TEXT[:2])
    activate(model, "b")
    second = loss_of(model, TEXT[2:])
    (first - 0.3 * second).backward()
    return [first, second]


def adapters_off(model):
    activate(model, "a")
    set_all(model, disabled=True)
    first = loss_of(model, TEXT[:2])
    set_all(model, disabled=False)
    second = loss_of(model, TEXT[2:])
    (first + second).backward()
    return [first, second]


def other_factor(model):
    loss = loss_of(model)
    set_all(model, scale=3.0)
    loss.backward()
    set_all(model, scale=0.7)
    return [loss]


def frozen(model):
    loss = loss_of(model)
    model.blocks[1].requires_grad_(False)
    loss.backward()
    model.blocks[1].requires_grad_(True)
    return [loss]


def lent_weights(model):
    """Each of two forwards with weights made from the model's own."""
    losses = []
    for factor, part in ((0.9, TEXT[:2]), (1.2, TEXT[2:])):
        lent = {name: one * factor for name, one in model.named_parameters()}
        found = torch.func.functional_call(model, lent, (part[:, :-1],))
        losses.append(nn.functional.cross_entropy(found.flatten(0, 1), part[:, 1:].flatten()))
    sum(losses).backward()
    return losses


def other_function(model):
    for block in model.blocks:
        block.turn = torch.tanh
    loss = loss_of(model)
    for block in model.blocks:
        block.turn = torch.sin
    loss.backward()
    return [loss]


class Turning(Block):
    def __init__(self, width):
        super().__init__(width)
        self.turn = torch.tanh

    def forward(self, x):
        return super().forward(self.turn(x))


def turning():
    model = Net(2)
    model.blocks = nn.ModuleList(Turning(16) for _ in range(2))
    return model


PROGRAMS = {
    two_adapters: adapted,
    adapters_off: adapted,
    other_factor: adapted,
    frozen: lambda: Net(2),
    lent_weights: lambda: Net(2),
    other_function: turning,
}


def trained(model, program, steps=4):
    torch.manual_seed(3)
    found = []
    for _ in range(steps):
        model.zero_grad()
        found += [loss.detach().clone() for loss in program(model)]
        found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
    return found


@pytest.mark.parametrize("plan", [WHOLE, PARTS, BOTH], ids=["whole", "parts", "inputs swapped"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_a_second_run_finds_what_the_first_found(program, plan):
    torch.manual_seed(0)
    model = PROGRAMS[program]()
    before = {name: (one, one.requires_grad) for name, one in model.named_parameters()}
    expected = trained(copy.deepcopy(model), program)
    with mindspeed_mem.attach(model, plan) as attached:
        assert same(trained(model, program), expected)
        assert attached.engine.report().recomputed_bytes
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is one for name, (one, _) in before.items())
    del model
    gc.collect()
    assert LEDGER.held.now == 0

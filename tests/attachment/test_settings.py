"""What a program sets on modules between a forward and its backward: a second run finds what the first one found."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call

import mindspeed_mem
from tests.attachment.plain_models import TEXT, Block, Net, same

WHOLE = {"recompute_config": {"recompute": True}}
PARTS = {"recompute_config": {"select_recompute": {"scaled": True, "fc1": True, "drop": True}}}


class Scaled(nn.Linear):
    """By the number of its use, by who is active, by numbers and a running mean that others set, and by its modules."""

    late = 1

    def __init__(self, width):
        super().__init__(width, width)
        self.number, self.active, self.by = 0, ["a"], {"a": 1.5, "b": 0.5}
        self.note, self.extra, self.seen, self.limits = None, 2, [], (-1, 2.0)
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x):
        self.seen.append(float(x.detach().mean()))
        for name in self.active:
            x = x * self.by[name]
        for module in self.children():
            x = x + module(x)
        x = super().forward(x) * (getattr(self, "extra", 1) + self.number) + self.bent()
        return torch.sin(self.late * x.clamp(*self.limits))

    def bent(self):
        return 0 if self.mean is None else self.mean.to_dense()


class ScaledBlock(Block):
    def __init__(self):
        super().__init__(16)
        torch.nn.init.normal_(self.norm.weight)
        torch.nn.init.normal_(self.norm.bias)
        self.scaled = Scaled(16)

    def forward(self, x):
        return self.scaled(self.norm(x)) + self.drop(self.fc1(x)).sum(-1, keepdim=True)


class Model(Net):
    def __init__(self):
        super().__init__(blocks=0)
        self.blocks = nn.ModuleList(ScaledBlock() for _ in range(2))

    @property
    def all_scaled(self):
        return [block.scaled for block in self.blocks]


def plainly(model):
    return model(TEXT).square().mean()


def used_with(model, name, values, at_last):
    """The model is used once with each of these, as shared blocks are, and then set to another."""
    total = 0
    for value in values:
        for one in model.all_scaled:
            setattr(one, name, value)
        total = total + plainly(model)
    for one in model.all_scaled:
        setattr(one, name, at_last)
    return total


def numbers(model):
    return used_with(model, "number", (3, 1), 7)


def names(model):
    return used_with(model, "active", (["a"], ["a", "b"], ["b"]), ["a"])


def modules_of_torch(model):
    loss = plainly(model)
    for block in model.blocks:
        block.drop.p = 0.7
    return loss


def training(model):
    loss = plainly(model.eval())
    model.train()
    return loss


def other_weights(model):
    """As in meta learning: the weights of this forward are made of the model's."""
    weights = {name: 0.5 * one + 0.1 for name, one in model.named_parameters()}
    return functional_call(model, weights, (TEXT,)).square().mean() + plainly(model)


def other_buffers(model):
    buffers = {name: one + 1 for name, one in model.named_buffers()}
    return functional_call(model, buffers, (TEXT,)).square().mean()


def detached_weights(model):
    """Gradients for what comes before alone."""
    weights = {name: one.detach() for name, one in model.blocks.named_parameters(prefix="blocks")}
    return functional_call(model, weights, (TEXT,)).square().mean() + plainly(model)


def buffers_of_any_kind(model):
    sparse = (torch.eye(16)[3].to_sparse(), torch.eye(16)[5].to_sparse())
    return used_with(model, "mean", (torch.ones(16), None, *sparse), torch.zeros(16))


def registered_anew(model):
    """It comes last among the parameters then."""
    loss = plainly(model)
    for block in model.blocks:
        weight = block.norm.weight
        del block.norm.weight
        block.norm.weight = weight
    return loss


def collectors(model):
    """Whoever runs the model gives it a new list for each forward."""
    total, lists = 0, []
    for _ in range(3):
        for one in model.all_scaled:
            one.seen = []
            lists.append(one.seen)
        total = total + plainly(model)
    for one in model.all_scaled:
        one.seen = []
    model.lists = lists
    return total


def frozen(model):
    loss = plainly(model)
    for block in model.blocks:
        block.fc1.requires_grad_(False)
        block.scaled.bias.requires_grad_(False)
    return loss


def came_and_went(model):
    """A block that asks whether it has something."""
    total = 0
    for there in (True, False):
        for one in model.all_scaled:
            one.extra = 4
            if not there:
                del one.extra
        total = total + plainly(model)
    for one in model.all_scaled:
        one.extra = 3
    return total


def gone_and_new(model):
    loss = plainly(model)
    for one in model.all_scaled:
        del one.number
        one.other = 5
    return loss


def first_set_later(model):
    return used_with(model, "late", (3, 2), 4)


def first_set_in_between(model):
    loss = plainly(model)
    for one in model.all_scaled:
        one.late = 4
    return loss


def first_set_instead(model):
    """As many attributes as before."""
    for one in model.all_scaled:
        if "extra" in vars(one):
            del one.extra
    return used_with(model, "late", (3, 2), 4)


def tuples(model):
    return used_with(model, "limits", ((-0.5, 0.5), (-2, 0.2)), (0, 0.1))


class Added(nn.Linear):
    """Among a module's own since later, with a setting that it has had from the start."""

    def __init__(self):
        super().__init__(16, 16)
        self.factor = 1

    def forward(self, x):
        return self.factor * torch.cos(super().forward(x))


def added(model):
    total = 0
    for one in model.all_scaled:
        torch.manual_seed(7)
        one.added = Added()
    for factor in (2, 3):
        for one in model.all_scaled:
            one.added.factor = factor
        total = total + plainly(model)
    weights = {name: 0.5 * one for name, one in model.named_parameters()}
    total = total + functional_call(model, weights, (TEXT,)).square().mean()
    for one in model.all_scaled:
        one.added.factor = 5
    return total


class Signed(nn.Module):
    def __init__(self):
        super().__init__()
        self.sign, self.at = 0.0, (1,)

    def forward(self, x):
        return torch.copysign(x, torch.full((), self.sign)) + x[self.at].mean(0)


def equal_but_others(model):
    for one in model.all_scaled:
        one.added = Signed()
    loss = plainly(model)
    for one in model.all_scaled:
        one.added.sign, one.added.at = -0.0, (True,)
    return loss


def at_its_address(model):
    """A module that has come for one that is gone."""
    for one in model.all_scaled:
        one.added = nn.Identity()
    plainly(model)
    for one in model.all_scaled:
        address = id(one._modules["added"])
        del one.added
        torch.manual_seed(7)
        tried = [Added.__new__(Added)]
        while id(tried[-1]) != address and len(tried) < 10_000:
            tried.append(Added.__new__(Added))
        one.added = tried[-1]
        one.added.__init__()
    return used_with(model, "number", (3, 1), 7) + factors(model)


def factors(model):
    loss = plainly(model)
    for one in model.all_scaled:
        one.added.factor = 5
    return loss


def exchanged_in_between(model):
    """Modules take each other's places, in another order, and one is new."""
    for one in model.all_scaled:
        torch.manual_seed(7)
        one.first, one.second = Added(), nn.Tanh()
    total = plainly(model)
    for one in model.all_scaled:
        one.first, one.second = one.second, one.first
    total = total + plainly(model)
    for one in model.all_scaled:
        first = one.second
        del one.first
        one.first, one.second = first, None
    total = total + plainly(model)
    for one in model.all_scaled:
        one.second = nn.Sigmoid()
    return total


class Begins(Added):
    """Counts its runs since some time."""

    def forward(self, x):
        if self.factor > 1:
            self.runs = getattr(self, "runs", 0) + 1
            x = x * self.runs
        return super().forward(x)


def begins_to_count(model):
    for one in model.all_scaled:
        torch.manual_seed(7)
        one.added = Begins()
    total = plainly(model)
    for one in model.all_scaled:
        one.added.factor = 2
    return total + plainly(model) + plainly(model)


class Builds(Added):
    """Makes a layer, a weight and a table when these are first asked for, and another table for each larger factor."""

    def __init__(self):
        super().__init__()
        self.layer, self.made_for = None, 1

    def forward(self, x):
        if self.factor > self.made_for:
            if self.layer is None:
                self.layer, self.own = nn.Linear(16, 16), nn.Parameter(torch.rand(16))
            self.made_for = self.factor
            self.table, self.kept = torch.linspace(0, 1, self.factor), nn.Buffer(torch.linspace(1, 2, self.factor))
        if self.layer is not None:
            x = self.layer(x) * self.own + self.table[: self.factor].sum() * self.kept[: self.factor].sum()
        return super().forward(x)


def builds_later(model):
    for one in model.all_scaled:
        torch.manual_seed(7)
        one.added = Builds()
    total = plainly(model)
    for factor in (2, 3):
        for one in model.all_scaled:
            one.added.factor = factor
        total = total + plainly(model)
    return total


CHANGES = [
    numbers,
    names,
    modules_of_torch,
    training,
    other_weights,
    other_buffers,
    detached_weights,
    buffers_of_any_kind,
    frozen,
    registered_anew,
    collectors,
    came_and_went,
    gone_and_new,
    first_set_later,
    first_set_in_between,
    first_set_instead,
    tuples,
    added,
    equal_but_others,
    at_its_address,
    exchanged_in_between,
    begins_to_count,
    builds_later,
]


def settings(model):
    return [dict(vars(module)) for module in model.modules()]


def stepped(model, change):
    torch.manual_seed(5)
    model.zero_grad(set_to_none=True)
    loss = change(model)
    before = settings(model)
    loss.backward()
    after = settings(model)
    for one, other in zip(before, after, strict=True):
        assert one.keys() == other.keys() and all(other[name] is one[name] for name in one)
    return [loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]


@pytest.mark.parametrize("plan", [WHOLE, PARTS], ids=["whole", "parts"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_bits(change, plan, caplog):
    model = Model()
    other = copy.deepcopy(model)
    plain = [stepped(other, plainly), stepped(other, change)]
    with mindspeed_mem.attach(model, plan) as attached:
        assert same(stepped(model, plainly), plain[0])  # what is tried is tried here
        assert same(stepped(model, change), plain[1])
        assert attached.engine.report().recomputed_by_operator
    assert "no effect" not in caplog.text
    assert [one.seen for one in model.all_scaled] == [one.seen for one in other.all_scaled]
    assert getattr(model, "lists", None) == getattr(other, "lists", None)


def test_nothing_is_held_of_what_modules_keep_themselves():
    model = Model()
    with mindspeed_mem.attach(model, WHOLE):
        plainly(model).backward()
        for number, one in enumerate(model.all_scaled):
            tensor = torch.ones(16)
            one.note = (1, tensor) if number else tensor  # was plain when it was looked at
        loss = plainly(model)
        held = [weakref.ref(tensor), weakref.ref(model.all_scaled[0].note)]
        del tensor
        for one in model.all_scaled:
            one.note = None
        assert all(reference() is None for reference in held)
        loss.backward()
        with torch.no_grad():
            other = {name: (one + 1).requires_grad_() for name, one in model.named_parameters()}
        loss = functional_call(model, other, (TEXT,)).square().mean()
        held = [weakref.ref(one) for one in other.values()]
        loss.backward()
        del other, loss
        gc.collect()
        assert all(reference() is None for reference in held)


class Counting(Scaled):
    """Counts its runs, and in the first makes what later ones use: a program's settings are put back, not these."""

    def __init__(self, width):
        super().__init__(width)
        self.runs, self.made, self.times = 0, False, itertools.count()  # whose number nobody can put back

    def forward(self, x):
        self.runs += 1
        if not self.made:
            self.made, self.kept, _ = True, torch.full((), 1.25), next(self.times)
        return super().forward(x) * self.kept


def test_what_modules_set_themselves_is_not_made_twice():
    model = Model()
    for block in model.blocks:
        block.scaled = Counting(16)
    other = copy.deepcopy(model)
    plain = [stepped(other, change) for change in (numbers, numbers)]
    with mindspeed_mem.attach(model, WHOLE) as attached:
        kept = []
        for _ in range(2):
            kept.append((stepped(model, numbers), [one.kept for one in model.all_scaled]))
        assert attached.engine.report().recomputed_by_operator
    assert all(same(found, wanted) for (found, _), wanted in zip(kept, plain, strict=True))
    assert all(one is two for one, two in zip(kept[0][1], kept[1][1], strict=True))
    assert [next(one.times) for one in model.all_scaled] == [1, 1]
    assert [one.runs for one in model.all_scaled] == [one.runs for one in other.all_scaled] == [4, 4]


class Noise(nn.Module):
    """Draws from a generator of its own: does not repeat itself. Is equal to all."""

    __hash__ = nn.Module.__hash__

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()
        self.generator.manual_seed(3)

    def __eq__(self, other):
        return True

    def forward(self, x):
        return x * torch.rand(x.shape, generator=self.generator)


def test_another_module_is_tried_anew(caplog):
    model = Model()
    other = copy.deepcopy(model)

    def exchanged(model):
        for block in model.blocks:
            block.drop = Noise()
        return plainly(model)

    def back(model):
        taken.append([block.drop for block in model.blocks])  # it lives on
        for block in model.blocks:
            block.drop = nn.Dropout(0.1)
        return plainly(model)

    taken = []
    plain = [stepped(other, change) for change in (plainly, exchanged, back)]
    with mindspeed_mem.attach(model, WHOLE) as attached:
        runs = [0]
        for change, wanted in zip((plainly, exchanged, back), plain, strict=True):
            assert same(stepped(model, change), wanted)
            runs.append(sum(one.runs for one in attached.engine.report().recomputed_by_operator if not one.op))
            assert ("each run changes drop.generator" in caplog.text) == (change is not plainly)
    assert runs == [0, 2, 2, 4]


class Growing(Scaled):
    """Makes a module of its own in its first run."""

    def forward(self, x):
        if not hasattr(self, "grown"):
            self.grown = nn.Tanh()
        return super().forward(x)


def test_what_a_first_run_makes_is_there_when_settings_are_put_back():
    model = Model()
    for block in model.blocks:
        block.scaled = Growing(16)
    other = copy.deepcopy(model)

    def once(model):
        loss = plainly(model)
        for one in model.all_scaled:
            one.number = 7
        return loss

    plain = [stepped(other, change) for change in (once, numbers)]
    with mindspeed_mem.attach(model, WHOLE) as attached:
        assert same(stepped(model, once), plain[0])
        assert same(stepped(model, numbers), plain[1])
        assert attached.engine.report().recomputed_by_operator


class Collecting(Scaled):
    """Collects in a list, which the program takes away, and sometimes counts what it has seen."""

    def __init__(self, width, counts):
        super().__init__(width)
        self.collected, self.counted = [], 0 if counts else None

    def forward(self, x):
        if self.counted is not None:
            self.counted += 1
        x = super().forward(x)
        self.collected.append(x.detach().mean((0, 1)))
        return torch.sin(x)


@pytest.mark.parametrize("counts", [False, True])
def test_what_a_program_has_taken_away_stays_as_it_was(counts):
    model = Model()
    for block in model.blocks:
        block.scaled = Collecting(16, counts)
    other = copy.deepcopy(model)
    taken = []

    def collected(one):
        total = 0
        for _ in range(3):
            for inner in one.all_scaled:
                inner.collected = []
            total = total + plainly(one)
            taken.append([inner.collected for inner in one.all_scaled])
        return total

    plain = [stepped(other, collected) for _ in range(2)]
    with mindspeed_mem.attach(model, WHOLE) as attached:
        assert all(same(stepped(model, collected), one) for one in plain)
        assert attached.engine.report().recomputed_by_operator
    assert all(len(lists) == 1 for run in taken for lists in run)

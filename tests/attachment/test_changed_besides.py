"""What an operator changes besides its result, wherever that lies, counts once and is as without recompute: it is put
back after second runs, or there are none."""

import argparse
import contextlib
import contextvars
import copy
import gc
import itertools
import random
import sys
import types
import warnings
import weakref
from collections import OrderedDict, deque

import numpy
import pytest
import torch
from torch import nn

import mindspeed_mem
from mindspeed_mem.activation.storage.ledger import LEDGER
from tests.attachment.plain_models import same

PARTS = {"recompute_config": {"select_recompute": {"part": True}}}
THIS = sys.modules[__name__]
mean = torch.zeros(())
package = types.ModuleType("package")


class Class:
    mean, last = torch.zeros(()), (0, 0)


class Slots:
    __slots__ = ("runs", "unset")

    def __init__(self):
        self.runs = 0


class Attributes(dict):
    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


class Ordered(OrderedDict):
    def update(self, *args):
        raise TypeError("not this way")


def variable():
    runs = 0

    def count(part, x):
        nonlocal runs
        runs += 1
        return runs

    return count


def variable_of_one_around():
    runs = 0

    def count(part, x):
        def inside():
            nonlocal runs
            runs += 1

        inside()
        return runs

    return count


def tensor_put_in_its_place():
    global mean
    mean = torch.zeros(())

    def count(part, x):
        global mean
        mean = 0.9 * mean + x.detach().square().mean()
        return mean

    return count


def of_a_class():
    Class.mean, Class.last = torch.zeros(()), (0, 0)

    def count(part, x):
        Class.mean = Class.mean + x.detach().square().mean()
        Class.last = (Class.last[1], Class.last[1] + 1)
        return Class.mean + Class.last[1]

    return count


def of_a_file():
    THIS.runs = 0

    def count(part, x):
        THIS.runs += 1
        return THIS.runs

    return count


def of_a_file_in_a_package():
    THIS.package = types.ModuleType("package")
    package.inside = types.ModuleType("package.inside")
    package.inside.runs = 0

    def count(part, x):
        package.inside.runs += 1
        return package.inside.runs

    return count


def of(kept):
    """An object that counts."""
    kept.runs = 0

    def count(part, x):
        kept.runs += 1
        return kept.runs

    return count


def of_a_function():
    def count(part, x):
        count.runs += 1
        return count.runs

    count.runs = 0
    return count


def default_argument():
    def count(part, x, seen=[]):  # noqa: B006
        seen.append(1)
        return len(seen)

    return count


def argument():
    kept = types.SimpleNamespace(runs=0)
    part_of = {"others": (kept,)}

    def add(x, of):
        of.runs += 1
        return of.runs

    return lambda part, x: add(x, part_of["others"][0])


def ordered():
    seen = Ordered()

    def count(part, x):
        seen[len(seen)] = 1
        return len(seen)

    return count


def which_was_used_last():
    kept = OrderedDict.fromkeys(range(5))

    def count(part, x):
        kept.move_to_end(next(iter(kept)))
        return next(iter(kept))

    return count


def some_bytes():
    kept = bytearray(1)

    def count(part, x):
        kept[0] += 1
        return kept[0]

    return count


def past_its_version():
    def count(part, x):
        part.table.data.mul_(0.9).add_(x.detach().square().mean())
        return part.table.clone()

    return count


def tensor_around():
    kept = torch.zeros((), requires_grad=True)

    def count(part, x):
        with torch.no_grad():
            return kept.add_(1).clone()

    return count


def module_of_another():
    other = nn.BatchNorm1d(8)

    def count(part, x):
        return other(x).mean().detach() + other.running_mean.mean()

    return count


def older_generator():
    drawn = numpy.random.RandomState(3)
    return lambda part, x: drawn.rand()


def context_variable():
    kept = contextvars.ContextVar("runs", default=0)

    def count(part, x):
        kept.set(kept.get() + 1)
        return kept.get()

    return count


def iterator():
    numbers = itertools.count(1)
    return lambda part, x: next(numbers)


def generator():
    def one_by_one():
        yield from range(1, 100)

    numbers = [one_by_one()]
    return lambda part, x: next(numbers[0])


def parameter():
    def count(part, x):
        with torch.no_grad():
            part.scale.mul_(0.9)
        return part.scale.detach().clone()

    return count


REFUSED = {iterator: "an iterator", generator: "an iterator", parameter: "its parameters"}
WAYS = {
    **{
        way.__name__: way
        for way in (
            variable,
            variable_of_one_around,
            tensor_put_in_its_place,
            of_a_class,
            of_a_file,
            of_a_file_in_a_package,
            of_a_function,
            default_argument,
            argument,
            ordered,
            which_was_used_last,
            some_bytes,
            past_its_version,
            tensor_around,
            module_of_another,
            older_generator,
            context_variable,
            *REFUSED,
        )
    },
    **{
        f"of {kind.__name__}": lambda kind=kind: of(kind())
        for kind in (types.SimpleNamespace, argparse.Namespace, Slots, Attributes, nn.Identity)
    },
}


class Numbered:
    """Numbers what is made of it, which no run goes on with."""

    numbers = itertools.count()

    def __init__(self):
        self.number = next(self.numbers)
        self.runs = 0
        self.unused = types.SimpleNamespace(rest=iter((1, 2)))


class Closed:
    """Neither says what class it is of, nor what it has."""

    @property
    def __class__(self):
        raise RuntimeError("no class")

    def __getattr__(self, name):
        raise RuntimeError(name)


def raises(*_):
    raise RuntimeError("not this way")


HIDDEN = dict.fromkeys(("__len__", "__iter__", "__getitem__", "keys", "values", "items", "copy", "__eq__"), raises)
HIDDEN["__hash__"] = object.__hash__


def dead():
    return weakref.proxy(nn.Identity())


def quantized():
    with warnings.catch_warnings(action="ignore"):
        return torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8)


ODD = {
    "numbered": Numbered,
    "closed": Closed,
    "dead": dead,
    "proxy": lambda: weakref.proxy(MANY),
    "quantized": quantized,
    **{
        f"a {base.__name__} of its own": lambda base=base: type("Own", (base,), HIDDEN)([(1, 2)])
        for base in (dict, list, OrderedDict, deque, tuple)
    },
}
MANY = nn.ModuleList(nn.Identity() for _ in range(99))


class Part(nn.Module):
    """Uses what it counts, or only shows it."""

    def __init__(self, count, uses):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.count, self.uses, self.found = count, uses, 0.0
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("table", torch.zeros(()))

    def forward(self, x):
        self.found = self.count(self, x)
        return torch.sin(self.linear(self.norm(x)) * (1 + 0.1 * self.uses * self.found))


class Block(nn.Module):
    def __init__(self, *args):
        super().__init__()
        self.part = Part(*args)

    def forward(self, x):
        return x + self.part(x)


class Model(nn.Module):
    def __init__(self, *args):
        super().__init__()
        self.blocks = nn.ModuleList(Block(*args) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def trained(way, uses, plan):
    torch.manual_seed(3)
    random.seed(3)
    count = way()
    model, results = Model(count, uses), []
    attached = mindspeed_mem.attach(model, plan) if plan else None
    for _ in range(2):
        losses = [model(torch.randn(4, 8)).square().mean() for _ in range(2)]
        found = [torch.as_tensor(block.part.found, dtype=torch.float64) for block in model.blocks]
        sum(losses).backward()
        results += [
            *(loss.detach() for loss in losses),
            *found,
            *(one.grad.clone() for one in model.parameters() if one.grad is not None),
        ]
    results += [*model.buffers(), *(one.detach() for one in model.parameters())]
    if attached is not None:
        attached.detach()
    return results


@pytest.mark.parametrize("uses", [True, False], ids=["used", "kept"])
@pytest.mark.parametrize("way", WAYS)
def test_it_counts_once(way, uses, caplog):
    plain = trained(WAYS[way], uses, None)
    assert same(trained(WAYS[way], uses, PARTS), plain)
    again = "" if WAYS[way] is context_variable else "run again, it gives other values"  # from what it was then
    why_not = REFUSED.get(WAYS[way], again if uses else "")
    assert (why_not in caplog.text) if why_not else ("no effect" not in caplog.text)


class Recurrent(nn.Module):
    """Writes what it makes into a state that it is given, deep in there, as Hugging Face's linear attention does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, state):
        made = self.linear(x).sin() + state.layers[0].kept[0]
        state.layers[0].kept[0].copy_(made)
        return made


class GivesState(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Recurrent()

    def forward(self, x):
        layer = types.SimpleNamespace(kept={0: torch.zeros_like(x)})
        return self.part(x, types.SimpleNamespace(layers=[layer]))


class Recurring(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([GivesState(), GivesState()])

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))


def test_what_stores_its_graph_in_what_it_is_given_leaves_nothing_behind(caplog):
    """Also where no backward follows."""
    model, x = Recurring(), torch.randn(64, 8)
    plain = copy.deepcopy(model)
    plain(x).sum().backward()
    with mindspeed_mem.attach(model, PARTS):
        for _ in range(2):
            model(x)
        model(x).sum().backward()
        gc.collect()
        assert LEDGER.held.now == 0
    assert same([one.grad for one in model.parameters()], [one.grad for one in plain.parameters()])
    assert "part in layers 0-1: it keeps what it computes in argument 1 (a SimpleNamespace)" in caplog.text


class GivesViews(nn.Module):
    """Gives views of what has been written to since: autograd numbers the node of one when that is asked for, and has
    none for one of several."""

    def __init__(self, parts):
        super().__init__()
        self.part, self.parts = Kept(), parts

    def forward(self, x):
        base = x * 2
        views = [base[:8]] if self.parts == 1 else list(base.chunk(self.parts))
        base.mul_(0.5)
        return self.part(x, types.SimpleNamespace(views=views))


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, views):
        return self.linear(x).sin()


@pytest.mark.parametrize("parts, why_not", [(1, ""), (2, "what it may change cannot be looked at (RuntimeError: ")])
def test_views_in_what_it_is_given_are_not_what_it_computes(parts, why_not, caplog):
    x = torch.randn(16, 8, requires_grad=True)
    model = nn.Sequential(GivesViews(parts))
    plain = copy.deepcopy(model)
    plain(x).sum().backward()
    with mindspeed_mem.attach(model, PARTS, layers=["0"]):
        model(x).sum().backward()
        assert why_not in caplog.text if why_not else "no effect" not in caplog.text
    assert same([one.grad for one in model.parameters()], [one.grad for one in plain.parameters()])


class Counting(nn.Module):
    """Counts in what it is given, by its position or name."""

    def __init__(self, uses):
        super().__init__()
        self.linear, self.uses = nn.Linear(8, 8), uses

    def forward(self, x, kept, *, also):
        kept.runs += 1
        also.inside.runs += 1
        return torch.sin(self.linear(x) * (1 + self.uses * kept.runs * also.inside.runs))


class Calling(nn.Module):
    def __init__(self, uses):
        super().__init__()
        self.part = Counting(uses)

    def forward(self, x, kept, also):
        return x + self.part(x, kept, also=also)


class Net(nn.Module):
    def __init__(self, uses):
        super().__init__()
        self.blocks = nn.ModuleList(Calling(uses) for _ in range(2))

    def forward(self, x, kept, also):
        for block in self.blocks:
            x = block(x, kept, also)
        return x


@pytest.mark.parametrize("uses", [0.0, 0.1], ids=["kept", "used"])
def test_what_it_changes_in_arguments_counts_once_in_each_step(uses, caplog):
    """Each has objects of its own."""

    def run(plan):
        torch.manual_seed(3)
        model, found = Net(uses), []
        attached = mindspeed_mem.attach(model, plan) if plan else contextlib.nullcontext()
        with attached:
            for _ in range(3):
                kept = types.SimpleNamespace(runs=0), types.SimpleNamespace(inside=types.SimpleNamespace(runs=0))
                losses = [model(torch.randn(4, 8), *kept).square().mean() for _ in range(2)]
                sum(losses).backward()
                found += [*losses, *(one.grad.clone() for one in model.parameters())]
                found += [torch.tensor([kept[0].runs, kept[1].inside.runs])]
        return found

    assert same(run(PARTS), run(None))
    assert ("no effect" in caplog.text) == bool(uses)


shape = iter(())


def test_an_attribute_is_not_the_variable_of_that_name(caplog):
    """Which a program may go on with, as with its data."""
    trained(lambda: lambda part, x: 0.1 * x.shape[0], True, PARTS)
    assert "no effect" not in caplog.text


@pytest.mark.parametrize("kind", ODD)
def test_odd_objects_are_in_nobodys_way(kind, caplog):
    def holds():
        odd = ODD[kind]()
        return lambda part, x: 0.5 if odd is None else 0.3

    assert same(trained(holds, True, PARTS), trained(holds, True, None))
    assert "no effect" not in caplog.text


class Nameless(type):
    @property
    def __module__(cls):
        raise RuntimeError("of no module")


def test_what_holds_an_object_that_nobody_can_look_at_is_kept(caplog):
    def holds():
        odd = Nameless("Odd", (), {})()
        return lambda part, x: 0.5 if odd is None else 0.3

    assert same(trained(holds, True, PARTS), trained(holds, True, None))
    assert "what it may change cannot be looked at (RuntimeError: of no module)" in caplog.text


def test_a_table_that_has_grown_is_named_in_the_error():
    """In a forward between this one and its backward."""

    def table(part, x):
        if len(x) > part.table.numel() // 8:
            part.table = torch.linspace(0, 1, len(x) * 8).view(-1, 8)
        return x * part.table[: len(x)]

    model = Model(table, True)
    with mindspeed_mem.attach(model, PARTS):
        loss = model(torch.randn(4, 8)).mean()
        model(torch.randn(9, 8)).mean().backward()
        with pytest.raises(RuntimeError, match=r"part of layer 1 saved a .* in memory of .* bytes instead of .*grows"):
            loss.backward()

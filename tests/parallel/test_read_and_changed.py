"""What forward reads, draws and changes in place: one device's numbers, or an error that names the operator.

DTensor alone has other numbers, or refuses: where that is so no more, what is done about it can go.
"""

import gc
import re
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from mindspeed_mem import parallel
from tests.parallel_models import full
from tests.worlds import on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.needs_torch("2.13", "DTensor's rules")]


def changed(x, *changes):
    x = x * 1
    for change in changes:
        change(x)
    return x.square().sum()


class With(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.InstanceNorm1d(2, track_running_stats=True)
        self.gru, self.bag, self.two = nn.GRU(4, 4, batch_first=True), nn.EmbeddingBag(4, 4), nn.Bilinear(4, 4, 2)
        self.same, self.act = nn.Identity(), nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
        self.function = function

    def forward(self, x):
        return self.function(self, self.fc(x))


def gathered(y):
    """What is written into plain tensors, which forward makes."""
    columns, total = torch.zeros(4, 4, dtype=y.dtype), torch.zeros((), dtype=y.dtype)
    for number in range(4):
        columns[:, number] = y[:, number] * number
        total += y[number].square().sum()
        with torch.no_grad():
            columns[:, 3] = y[number]
    columns[0].add_(y[3])
    return y.sum() + total + columns.square().sum()


PLACES, ROWS = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 2, 2], [0, 0, 3, 3]]), torch.tensor([0, 2])
WEIGHTS = torch.arange(16.0, dtype=torch.float64).view(4, 4)
SAME = {
    "into a plain tensor": lambda m, y: gathered(y),
    "added where others say": lambda m, y: changed(
        y,
        lambda x: x.scatter_add_(0, PLACES, WEIGHTS),
        lambda x: x.index_put_((ROWS, ROWS), y[0, :2]),
        lambda x: x.index_add_(1, ROWS, y[:, :2]),
        lambda x: x.index_copy_(0, ROWS, y[2:]),
        lambda x: x.masked_scatter_(WEIGHTS % 3 == 0, y),
        lambda x: x.put_(ROWS, y[0, :2]),
    ),
    "picked": lambda m, y: (
        (y.take(ROWS) + y.index_put((ROWS,), y[:2]).sum() + y.masked_select(y > 0).sum()).square().sum()
    ),
    "quantiles": lambda m, y: y.quantile(0.3, 0).square().sum() + y.norm(0),
    "recurrent": lambda m, y: m.gru(y[None])[0].sum() + m.bag((y > 0).long()).sum() + m.two(y, y).square().sum(),
    "item of a sum": lambda m, y: y.sum() * y.sum().item(),
    "float and int of a sum": lambda m, y: y.sum() * float(y.sum()) * int(1 + y.sum().abs()),
    "truth of a sum": lambda m, y: y.sum() * (2 if (y * torch.eye(4)[:, :1]).sum() else 1),
    "lists": lambda m, y: y.sum() * y.sum(1).tolist()[1],
    "arrays": lambda m, y: y.sum() * float(y.detach().numpy()[3, 3]),
    "assigned": lambda m, y: changed(y, lambda x: x.__setitem__((slice(None), 0), y[:, 1])),
    "assigned rows": lambda m, y: changed(y, lambda x: x.__setitem__(slice(1, 3), 0)),
    "assigned where": lambda m, y: changed(y, lambda x: x.__setitem__(y > 0, 1.0)),
    "changed in place": lambda m, y: changed(y, lambda x: x.mul_(2), lambda x: F.relu6(x, inplace=True)),
    "running statistics of rows": lambda m, y: m.norm(y.view(-1, 2, 2)).square().mul(torch.arange(2.0)).sum(),
    "relu6": lambda m, y: (F.relu6(y * 9) + F.logsigmoid(y) + F.hardswish(y)).sum(),
    "greatest": lambda m, y: F.adaptive_max_pool1d(y[:, None], 2).square().sum(),
    "running product": lambda m, y: (y * (y > 0)).cumprod(0).sum() + y.trace() + y.cummax(0).values.sum(),
    "angle": lambda m, y: F.cosine_embedding_loss(y, y.sigmoid(), torch.ones(4)),
    "noise": lambda m, y: (y * torch.rand_like(y)).sum() + (y * torch.bernoulli(y.detach().sigmoid())).sum(),
    "channels dropped": lambda m, y: F.dropout1d(y[:, None], 0.5).square().sum() + F.alpha_dropout(y, 0.5, True).sum(),
    "dropped in place": lambda m, y: changed(
        y,
        lambda x: F.dropout(x, 0.5, inplace=True),
        lambda x: F.alpha_dropout(x, 0.5, True, True),
        lambda x: F.dropout1d(x[:, None], 0.5, inplace=True),
        lambda x: F.feature_alpha_dropout(x[:, None], 0.5, True, inplace=True),
    ),
    "drawn in place": lambda m, y: (
        (y * torch.empty_like(y).uniform_()).sum()
        + (y * torch.empty_like(y).log_normal_() * torch.empty_like(y).geometric_(0.5)).sum()
    ),
    "dropped by functions": lambda m, y: (
        (torch.dropout(y, 0.5, train=True) + torch.dropout_(y * 1, 0.5, True)).square().sum()
        + (torch.alpha_dropout(y, 0.5, True) * torch.native_dropout(y, 0.5, True)[0]).sum()
    ),
}
REFUSED = {
    "strides": (lambda m, y: y.as_strided((2, 2), (1, 4)).sum(), ":as_strided: inputs (4, 4)"),
    "divided in place": (
        lambda m, y: changed(y, lambda x: x[:, 0].__itruediv__(2), lambda x: x[0].__itruediv__(2)),
        ":div_: (4,) whole is a",
    ),
    "a view": (lambda m, y: changed(y, lambda x: x[:, 0].zero_(), lambda x: x[0].zero_()), ":zero_: (4,) whole is a"),
    "a piece": (
        lambda m, y: (
            y.sum() + changed(y.detach(), lambda x: x.chunk(2, 1)[0].mul_(2), lambda x: x.chunk(2, 0)[0].mul_(2))
        ),
        ":mul_: (",
    ),
    "unbound": (
        lambda m, y: y.sum() + changed(y.detach(), lambda x: x.unbind(1)[0].mul_(2), lambda x: x.unbind(0)[0].mul_(2)),
        ":mul_: (4,) whole is a view",
    ),
    "a sum": (lambda m, y: y.sum() + y.detach().sum(0).fill_(3).sum() + y.detach().sum(1).fill_(3).sum(), "is a sum"),
    "no rule in backward": (
        lambda m, y: torch.ops.aten.log_sigmoid(y).sum(),
        ", backward (aten.log_sigmoid_backward.default): inputs (4, 4)",
    ),
}
PLANS = {
    "rows": {"": {"in_strategy": (("x", None),)}},
    "columns": {"fc": {"parameter_plan": {"weight": ("x", None), "bias": ("x",)}}},
    "sums": {"fc": {"parameter_plan": {"weight": (None, "x")}}},
}


def stepped(model, x):
    torch.manual_seed(4)
    loss = model(x)
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [full(one).double() for one in (loss, *grads, *model.buffers())]


WRONG_BY = {"assigned": "columns", "angle": "columns"}
"""The plan with which it does not the others; else by rows."""


def alone(function, way, mesh):
    """The model with parameters split as in the plan, and nothing of ours."""
    model, plan = With(function).double(), PLANS[way].get("fc", {}).get("parameter_plan", {})
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in [(name, tensor) for name, tensor in own.items() if tensor is not None]:
                target = parallel.placements(plan.get(name, ()) if module is model.fc else (), mesh, None, "")
                new = distribute_tensor(tensor.detach(), mesh, target)
                own[name] = nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new
    return model


def torchs_own(function, way, mesh, x, wanted):
    """How far DTensor alone is from one device, or what it says."""
    torch.manual_seed(3)
    model, x = alone(function, way, mesh), distribute_tensor(x, mesh, [Shard(0) if way == "rows" else Replicate()])
    model.forward = implicit_replication()(model.forward)  # as ours does, in forward
    try:
        found = stepped(model, x)
    except Exception as error:  # whatever it says
        return str(error)
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def outcomes(ways):
    mesh, found = parallel.mesh("cpu", x=2), {}
    torch.manual_seed(3)
    x = torch.randn(4, 4, dtype=torch.float64)
    for name, function in (SAME | {name: function for name, (function, _) in REFUSED.items()}).items():
        for way, plan in ((way, PLANS[way]) for way in ways):
            torch.manual_seed(3)
            wanted = stepped(With(function).double(), x)
            if way == ways[0]:
                found[name, "torch's"] = torchs_own(function, WRONG_BY.get(name, "rows"), mesh, x, wanted)
            torch.manual_seed(3)
            model = parallel.semi_auto(With(function).double(), mesh, plan)
            try:
                pairs = zip(stepped(model, x), wanted, strict=True)
                found[name, way] = max(float((a - b).abs().max()) for a, b in pairs)
            except parallel.StrategyError as error:
                found[name, way] = str(error)
    return found


@pytest.mark.parametrize("ways", [["rows"], pytest.param(["columns", "sums"], marks=pytest.mark.sweep)])
def test_one_devices_numbers_or_the_operators_name(ways):
    everyone = on_ranks(2, outcomes, ways)
    for name in {*SAME, *REFUSED}:
        torchs = [found[name, "torch's"] for found in everyone]
        assert any(isinstance(one, str) or one > 1e-3 for one in torchs), (name, "torch masters it now")
    for found in everyone:
        for (name, way), outcome in found.items():
            if way == "torch's":
                continue
            if isinstance(outcome, str):
                wanted = REFUSED[name][1] if name in REFUSED else "it is a sum; use the operator that is not in place"
                assert wanted in outcome and (name in REFUSED or way == "sums"), (name, way, outcome)
            else:
                assert outcome < 1e-12, (name, way, outcome)
        refused = {name for (name, way), outcome in found.items() if isinstance(outcome, str) and way != "torch's"}
        assert refused >= set(REFUSED)


ROW, WHOLE = (("x", None),), ((None, None),)
COPIES = {
    # what: (function, rows, what is said, or None: one device's numbers)
    "an operator's": (lambda m, y: F.relu_(y), {":relu_": {"in_strategy": WHOLE}}, ":relu_: .* strategy of :relu_ 0"),
    "a module's": (lambda m, y: m.act(y), {"act": {"in_strategy": WHOLE}}, "act.1:relu: .* strategy of act, input 0"),
    "a view of a module's": (
        lambda m, y: m.same(y)[:, :2].zero_(),
        {"same": {"in_strategy": WHOLE}},
        ":zero_: .* strategy of same, input 0",
    ),
    "what is returned as it came": (
        lambda m, y: m.same(y).zero_(),
        {"same": {"out_strategy": WHOLE}},
        ":zero_: .* strategy of same, output 0",
    ),
    "a view that is returned": (
        lambda m, y: y.t().zero_(),
        {":t": {"out_strategy": WHOLE}},
        ":zero_: .* strategy of :t, output 0",
    ),
    "an assignment": (
        lambda m, y: m.same(y).__setitem__(0, 1.0),
        {"same": {"in_strategy": WHOLE}},
        ":setitem: .* strategy of same, input 0",
    ),
    "running statistics": (
        lambda m, y: m.norm(y.view(-1, 2, 2)),
        {"norm:instance_norm": {"in_strategy": (None, ("x",), ("x",))}},
        "norm:instance_norm: its running statistics are the copy",
    ),
    "made by a module": (lambda m, y: m.act(y), {"fc": {"out_strategy": WHOLE}}, None),
    "where it lies": (lambda m, y: m.act(y), {"act": {"in_strategy": ROW}}, None),
    "cloned": (lambda m, y: m.same(y).clone().zero_(), {"same": {"in_strategy": WHOLE}}, None),
}


def changed_copies():
    mesh, found = parallel.mesh("cpu", x=2), {}
    torch.manual_seed(3)
    x = torch.randn(4, 4, dtype=torch.float64)
    for name, (function, rows, _) in COPIES.items():

        def first(m, y, function=function):
            function(m, y)
            return y.square().sum()

        torch.manual_seed(3)
        wanted = stepped(With(first).double(), x)
        torch.manual_seed(3)
        try:
            mine = stepped(parallel.semi_auto(With(first).double(), mesh, {"": {"in_strategy": ROW}, **rows}), x)
            found[name] = max(float((a - b).abs().max()) for a, b in zip(mine, wanted, strict=True))
        except parallel.StrategyError as error:
            found[name] = str(error)
    return found


def test_a_copy_that_a_strategy_asks_for_is_not_changed():
    for found in on_ranks(2, changed_copies):
        for name, (_, _, said) in COPIES.items():
            if said is None:
                assert found[name] < 1e-12, (name, found[name])
            else:
                assert isinstance(found[name], str) and re.match(said, found[name]), (name, found[name])


class Broken(RuntimeError):
    """A user's."""


def own_error(kind):
    """What comes of a user's error in the middle of forward, and whether anything still holds a tensor of that call."""
    made = []

    def forward(model, y):
        y = y.sin()
        made.append(weakref.ref(y))
        return y.exp().sum()

    def pack(tensor):
        if made:
            raise kind("mine")
        return tensor

    model, said = parallel.semi_auto(With(forward), parallel.mesh("cpu", x=2), PLANS["rows"]), None
    gc.collect()
    gc.disable()  # what holds itself would stay
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.ones(4, 4))
    except Exception as error:
        said = type(error) is kind and str(error)
    held = made[0]() is not None
    gc.enable()
    return said, held


@pytest.mark.parametrize("kind", [Broken, RuntimeError])
def test_an_error_that_goes_on_as_it_is_holds_nothing(kind):
    assert on_ranks(2, own_error, kind) == [("mine", False)] * 2

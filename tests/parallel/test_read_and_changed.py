"""What forward reads, draws and changes in place: one device's numbers, or an error that names the operator."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_mem import parallel
from tests.parallel_models import full
from tests.worlds import on_ranks

pytestmark = pytest.mark.distributed


def changed(x, *changes):
    x = x * 1
    for change in changes:
        change(x)
    return x.square().sum()


class With(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.InstanceNorm1d(2, track_running_stats=True)
        self.function = function

    def forward(self, x):
        return self.function(self, self.fc(x))


SAME = {
    "item of a sum": lambda m, y: y.sum() * y.sum().item(),
    "float and int of a sum": lambda m, y: y.sum() * float(y.sum()) * int(1 + y.sum().abs()),
    "truth of a sum": lambda m, y: y.sum() * (2 if y.sum() else 1),
    "lists": lambda m, y: y.sum() * y.sum(1).tolist()[1],
    "arrays": lambda m, y: y.sum() * float(y.detach().numpy()[3, 3]),
    "assigned": lambda m, y: changed(y, lambda x: x.__setitem__((slice(None), 0), y[:, 1])),
    "assigned rows": lambda m, y: changed(y, lambda x: x.__setitem__(slice(1, 3), 0)),
    "assigned where": lambda m, y: changed(y, lambda x: x.__setitem__(y > 0, 1.0)),
    "changed in place": lambda m, y: changed(y, lambda x: x.mul_(2), lambda x: F.relu6(x, inplace=True)),
    "running statistics of rows": lambda m, y: m.norm(y.view(-1, 2, 2)).square().mul(torch.arange(2.0)).sum(),
    "relu6": lambda m, y: (F.relu6(y * 9) + F.logsigmoid(y) + F.hardswish(y)).sum(),
    "greatest": lambda m, y: F.adaptive_max_pool1d(y[:, None], 2).square().sum(),
    "running product": lambda m, y: y.cumprod(0).sum() + y.trace() + y.cummax(0).values.sum(),
    "angle": lambda m, y: F.cosine_embedding_loss(y, y.sigmoid(), torch.ones(4)),
    "noise": lambda m, y: (y * torch.rand_like(y)).sum() + (y * torch.bernoulli(y.detach().sigmoid())).sum(),
    "channels dropped": lambda m, y: F.dropout1d(y[:, None], 0.5).square().sum() + F.alpha_dropout(y, 0.5, True).sum(),
    "drawn in place": lambda m, y: (y * torch.empty_like(y).uniform_()).sum(),
}
REFUSED = {
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
        lambda m, y: F.multilabel_soft_margin_loss(y, (y > 0).double()),
        ":multilabel_soft_margin_loss, backward (aten.log_sigmoid_backward.default): inputs (4, 4)",
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


def outcomes(ways):
    mesh, found = parallel.mesh("cpu", x=2), {}
    torch.manual_seed(3)
    x = torch.randn(4, 4, dtype=torch.float64)
    for name, function in (SAME | {name: function for name, (function, _) in REFUSED.items()}).items():
        for way, plan in ((way, PLANS[way]) for way in ways):
            torch.manual_seed(3)
            wanted = stepped(With(function).double(), x)
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
    for found in on_ranks(2, outcomes, ways):
        for (name, way), outcome in found.items():
            if isinstance(outcome, str):
                wanted = REFUSED[name][1] if name in REFUSED else "it is a sum; use the operator that is not in place"
                assert wanted in outcome and (name in REFUSED or way == "sums"), (name, way, outcome)
            else:
                assert outcome < 1e-12, (name, way, outcome)
        assert {name for (name, _), outcome in found.items() if isinstance(outcome, str)} >= set(REFUSED)


def in_place_by_row():
    mesh = parallel.mesh("cpu", x=2)
    rows = {"": {"in_strategy": (("x", None),)}, ":relu_": {"in_strategy": ((None, None),)}}
    model = parallel.semi_auto(With(lambda m, y: (F.relu_(y), y.sum())[1]), mesh, rows)
    with pytest.raises(parallel.StrategyError, match=":relu_: .* in the copy that in_strategy asks for"):
        model(torch.ones(4, 4))


def test_a_row_does_not_have_a_copy_changed():
    on_ranks(2, in_place_by_row)

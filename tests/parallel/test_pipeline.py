"""Pipeline stages and recompute by layer: the numbers of one device that takes the same micro-batches."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_mem import parallel
from tests.parallel_models import Bottleneck
from tests.worlds import on_ranks

pytestmark = pytest.mark.distributed
STEPS = 3


class ResNet(nn.Module):
    """Parts of its forward are no modules: they belong to the stage before them."""

    def __init__(self, width=4, classes=6):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Bottleneck(width, width, 4 * width, 1), Bottleneck(4 * width, width, 4 * width, 1))
        self.layer2 = Bottleneck(4 * width, 2 * width, 8 * width, 2)
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x):
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


class Residual(nn.Module):
    """Two tensors go from stage to stage."""

    def __init__(self, hidden=6):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(hidden, hidden) for _ in range(4))
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        y = torch.tanh(self.a(x))
        z = self.b(y)
        return self.d(self.drop(torch.sigmoid(self.c(z) * y)) + z)


MODELS = {
    "resnet": (ResNet, (3, 24, 24), {2: {"layer2": 1}, 4: {"layer1.1": 1, "layer2": 2, "fc": 3}}),
    "residual": (Residual, (6,), {2: {"c": 1}}),
}


def built(kind, stages=None, again=()):
    torch.manual_seed(0)
    kind, *_ = MODELS[kind]
    model = kind().double()
    for path, number in (stages or {}).items():
        model.get_submodule(path).pipeline_stage = number
    for path in again:
        model.get_submodule(path).recompute()
    return model


def batches(kind, size=8):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(size, *MODELS[kind][1], generator=generator, dtype=torch.float64)
        yield x, torch.randint(6, (size,), generator=generator)


def alone(kind, parts):
    """Losses and parameters of one device that takes the batch in so many parts."""
    model = built(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for x, target in batches(kind):
        optimizer.zero_grad()
        found = [F.cross_entropy(model(one), two) for one, two in zip(x.chunk(parts), target.chunk(parts), strict=True)]
        sum(found).div(parts).backward()
        optimizer.step()
        losses.append(float(sum(found)) / parts)
    return losses, model.state_dict()


def error(one, other):
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in other)


def piped(kind, axes, stages, micro_batches, again=(), replicas=1, **more):
    mesh = parallel.mesh("cpu", **axes)
    pipe = parallel.pipeline(built(kind, stages, again), mesh, micro_batches, loss=F.cross_entropy, **more)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9)
    losses = []
    for x, target in batches(kind):
        optimizer.zero_grad()
        losses.append(float(pipe.step(x, target=target)))
        optimizer.step()
    wanted, state = alone(kind, micro_batches * replicas)
    mine = pipe.whole_state_dict()
    if replicas > 1:  # each replica's running statistics are of its own part
        mine, state = (
            {k: v for k, v in one.items() if "running" not in k and "num_" not in k} for one in (mine, state)
        )
    most = max(abs(one - two) for one, two in zip(losses, wanted, strict=True))
    return {
        "losses": most,
        "values": error(mine, state),
        "names": mine.keys() ^ state.keys(),
        "share": sum(one.numel() for one in pipe.parameters()) / sum(one.numel() for one in built(kind).parameters()),
        "orders": pipe.orders,
    }


CASES = {
    "1f1b": ("resnet", {"pp": 2}, 2, 4, {}),
    "gpipe, two tensors between stages": ("residual", {"pp": 2}, 2, 4, {"schedule": "gpipe"}),
    "virtual stages": ("resnet", {"pp": 2}, 4, 4, {}),
    "one in flight": ("residual", {"pp": 2}, 2, 4, {"max_inflight_micro_batches": 1}),
    "recomputed": ("resnet", {"pp": 2}, 2, 2, {"again": ("layer1.0", "layer2", "bn1")}),
    "recomputed virtual stages": ("resnet", {"pp": 2}, 4, 2, {"again": ("layer1", "layer2.conv2", "fc")}),
}


def all_of(names):
    found = {}
    for name in names:
        kind, axes, stages, micro_batches, more = CASES[name]
        found[name] = piped(kind, axes, MODELS[kind][2][stages], micro_batches, **more)
    return found


def test_one_devices_numbers_on_two_ranks():
    for rank in on_ranks(2, all_of, list(CASES)):
        for name, found in rank.items():
            assert found["losses"] < 1e-12 and found["values"] < 1e-12 and not found["names"], (name, found)
            assert 0 < found["share"] < 1, name
        flights = [count for name in ("1f1b", "one in flight") for count in [rank[name]["orders"][0][:2]]]
        assert [one[0] for one in flights[0]] == ["forward"] * 2, "the first rank is one ahead"
        assert [one[0] for one in flights[1]] == ["forward", "backward"]


def test_replicas_and_four_stages():
    stages = MODELS["resnet"][2]
    for found in on_ranks(4, piped, "resnet", {"dp": 2, "pp": 2}, stages[2], 2, replicas=2):
        assert found["losses"] < 1e-12 and found["values"] < 1e-12 and not found["names"], found
    for found in on_ranks(4, piped, "resnet", {"pp": 4}, stages[4], 4):
        assert found["losses"] < 1e-12 and found["values"] < 1e-12 and not found["names"], found


def drawn_apart():
    """A stage without parameters, and replicas that have drawn different ones."""
    mesh = parallel.mesh("cpu", dp=2, pp=2)
    torch.manual_seed(torch.distributed.get_rank())
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()).double()
    model[2].pipeline_stage = 1
    pipe = parallel.pipeline(model, mesh, 2, loss=F.cross_entropy)
    for x, target in batches("residual"):
        pipe.step(x, target=target)
    return mesh.get_local_rank("pp"), {name: one.grad for name, one in pipe.named_parameters()}, pipe.state_dict()


def test_replicas_begin_alike():
    found = [(gradients, state) for stage, gradients, state in on_ranks(4, drawn_apart) if not stage]
    (one, first), (other, second) = found
    assert one and all(torch.equal(one[name], other[name]) for name in one)
    assert all(torch.equal(first[name], second[name]) for name in one)


# ---- what cannot be


def refused():
    mesh = parallel.mesh("cpu", pp=2)
    found = {}

    def told(name, make):
        try:
            make()
            found[name] = "nothing"
        except ValueError as problem:
            found[name] = str(problem)

    def begin(stages, batch=8, model=None, **more):
        model = built("residual", stages) if model is None else model
        pipe = parallel.pipeline(model, mesh, 2, loss=F.cross_entropy, **more)
        return pipe.step(torch.randn(batch, 6, dtype=torch.float64), target=torch.zeros(batch, dtype=torch.long))

    told("axis", lambda: begin({"c": 1}, axis="stages", schedule="zigzag"))
    told("one", lambda: begin({}))
    told("gap", lambda: begin({"b": 1, "d": 3}))
    told("kind", lambda: begin({"b": "1", "c": 1}))
    told("backwards", lambda: begin({"a": 1, "b": 0}))
    told("later", lambda: begin({"c": 0, "b": 1}))
    told("far", lambda: begin({"a": 0, "b": 1, "c": 2, "d": 3}))
    told("batch", lambda: begin({"c": 1}, batch=7))
    pipe = parallel.pipeline(built("residual", {"c": 1}), mesh, 2, loss=F.cross_entropy)
    x, target = torch.randn(8, 6, dtype=torch.float64), torch.zeros(8, dtype=torch.long)
    told("nested", lambda: pipe.step({"x": x}, target=[target]))
    with torch.no_grad():
        told("no gradients", lambda: pipe.step(x, target=target))
    tied = built("residual", {"c": 1})
    tied.d.weight = tied.a.weight
    told("tied", lambda: begin({}, model=tied))

    class Branches(Residual):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    torch.manual_seed(0)
    branches = Branches().double()
    branches.c.pipeline_stage = 1
    told("branches", lambda: begin({}, model=branches))
    return found


def test_what_is_refused_and_why():
    told = on_ranks(2, refused)[0]
    assert "no axis 'stages' (it has pp)" in told["axis"] and "allowed: 1f1b, gpipe" in told["axis"]
    assert "1 pipeline stages and the mesh 2 ranks" in told["one"] and "from 0 to 1" in told["one"]
    assert "no module has pipeline_stage 2, but one has 3" in told["gap"]
    assert "b.pipeline_stage: got '1'; a number from 0 on" in told["kind"]
    assert "1 of 2 stages run: of a, one is called first or never" in told["backwards"]
    assert "c.weight is of stage 0, but it is used in stage 1" in told["later"]
    assert "stage 2 takes a tensor that stage 0 made" in told["far"]
    assert "a batch of 7 does not divide by 1 replicas times 2 micro-batches" in told["batch"]
    assert "target is a tensor" in told["nested"] and "input 0 holds tensors in a dict" in told["nested"]
    assert "gradients are off here" in told["no gradients"]
    assert "d.weight of stage 1 is a.weight of stage 0" in told["tied"]
    assert "torch.export cannot trace the model" in told["branches"]


# ---- recompute, without ranks


def gradients(model, x):
    model.zero_grad()
    torch.manual_seed(3)
    model(x).square().sum().backward()
    return {name: one.grad.clone() for name, one in model.named_parameters()} | {
        name: one.clone() for name, one in model.named_buffers()
    }


def saved_bytes(model, x):
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: held.append(one.nbytes) or one, lambda one: one):
        model(x)
    return sum(held)


def test_recompute_changes_no_bit_and_keeps_less():
    x = torch.randn(4, 3, 24, 24, dtype=torch.float64)
    plain, mine = built("resnet"), built("resnet", again=("layer1", "layer2.conv2", "bn1"))
    wanted = gradients(plain, x)
    for model in (mine, copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        found = gradients(copy.deepcopy(built("resnet", again=("layer1", "layer2.conv2", "bn1"))), x)
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert model.layer1.forward.inner.__self__ is model.layer1, "a copy runs its own weights"
    assert saved_bytes(mine, x) < 0.7 * saved_bytes(plain, x)
    mine.layer1.recompute(active=False).recompute(active=False)
    assert "forward" not in mine.layer1.__dict__ and "forward" in mine.bn1.__dict__


def test_dropout_draws_the_same_again():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    wanted = gradients(model, x)
    found = gradients(model.recompute(), x)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def split_with_recompute():
    mesh = parallel.mesh("cpu", dp=2)
    model = parallel.semi_auto(
        built("resnet", again=("layer1",)),
        mesh,
        {"": {"in_strategy": (("dp", None, None, None),)}, "layer2": {"recompute": True}},
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for x, target in batches("resnet"):
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        optimizer.step()
    state = {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in model.state_dict().items()}
    return error(state, alone("resnet", 1)[1])


def test_running_statistics_of_split_models_are_updated_once():
    assert max(on_ranks(2, split_with_recompute)) < 1e-12


class _Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.pipeline_stage = 1

    def forward(self, x):
        return self.b(self.a(x + 1 if x.sum() > 0 else x))


def _refused_twice_and_other_sizes():
    mesh, x, said = parallel.mesh(pp=2), torch.randn(4, 4), []
    branches = _Branches()
    branches.a.recompute()
    pipe = parallel.pipeline(branches, mesh, 2, loss=F.mse_loss)
    fine = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fine[1].pipeline_stage = 1
    other = parallel.pipeline(fine, mesh, 2, loss=F.mse_loss)
    other.step(x, target=x)
    for one, batch in ((pipe, x), (pipe, x), (other, torch.randn(8, 4))):
        with pytest.raises(parallel.StrategyError) as error:
            one.step(batch, target=batch)
        said.append(str(error.value))
    return said, "forward" in branches.a.__dict__


def test_a_refused_step_says_so_again_and_batches_of_another_size_do_not_end_the_process():
    for (first, again, sizes), recomputed in on_ranks(2, _refused_twice_and_other_sizes):
        assert "cannot trace" in first and "cannot trace" in again and recomputed
        assert "first one's" in sizes

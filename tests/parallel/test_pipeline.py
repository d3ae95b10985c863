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

pytestmark = [pytest.mark.distributed, pytest.mark.needs_torch("2.13", "DTensor's rules")]
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


class Fields(nn.Module):
    """Stages that take and make several tensors, by name, not contiguous, of other kinds; the output is a dict."""

    def __init__(self):
        super().__init__()
        self.embed, self.first = nn.Embedding(8, 6), nn.Linear(6, 6)
        self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.second.weight  # tied within a stage
        self.second.pipeline_stage = 1
        self.register_buffer("scale", torch.full((6,), 0.5), persistent=False)

    def forward(self, x):
        ids = x.argmax(-1)
        taken = {"x": self.first(self.embed(ids)) * self.scale, "more": (ids, (x * 2).t())}
        y = self.second(taken["x"]) + taken["more"][1].t()
        return {"logits": self.last(y) + taken["more"][0][:, None], "size": 6, "extra": y.square().mean()}


def sequential(*layers, cut=(1,), frozen=(), again=()):
    model = nn.Sequential(*layers)
    for number, index in enumerate(cut, 1):
        model[index].pipeline_stage = number
    for index in frozen:
        model[index].requires_grad_(False)
    for path in again:
        model.get_submodule(path).recompute()
    return model


def linear():
    return nn.Linear(6, 6)


def nested():
    """Recomputed within what is recomputed."""
    inner = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Dropout(0.0))
    return sequential(nn.Sequential(linear(), inner), linear(), again=("0", "0.1", "0.1.0", "1"))


def of_fields(made, target):
    return F.mse_loss(made["logits"], target) + made["extra"] * made["size"]


KINDS = {
    "fields": (Fields, of_fields),
    "frozen first": (lambda: sequential(linear(), linear(), frozen=[0]), F.mse_loss),
    "frozen last": (lambda: sequential(linear(), linear(), frozen=[1]), F.mse_loss),
    "bare": (lambda: sequential(nn.Tanh(), linear(), nn.Tanh(), linear(), cut=(1, 2, 3)), F.mse_loss),
    "nested": (nested, F.mse_loss),
}


def kinds(names):
    """Two steps, whose gradients add up, and an evaluation, against one device."""
    mesh, found = parallel.mesh("cpu", pp=2), {}
    for name in names:
        make, loss = KINDS[name]
        torch.manual_seed(0)
        model = make().double()
        alone = copy.deepcopy(model)
        for one in alone.modules():
            one.recompute(active=False)
        pipe = parallel.pipeline(model, mesh, 2, loss=loss)
        generator = torch.Generator().manual_seed(1)
        errors = []
        for size in (8, 4):  # the last batch is smaller
            x, target = (torch.randn(size, 6, generator=generator, dtype=torch.float64) for _ in range(2))
            wanted = sum(loss(alone(a), b) for a, b in zip(x.chunk(2), target.chunk(2), strict=True)) / 2
            wanted.backward()
            errors.append(float(pipe.step(x, target=target) - wanted.detach()))
        state = pipe.whole_state_dict()
        assert state.keys() == alone.state_dict().keys(), "names as in the model"
        errors.append(error(state, alone.state_dict()))
        evaluated = pipe.evaluate(x, target=target)
        errors.append(float(evaluated - loss(alone.eval()(x), target)) if name != "fields" else 0.0)
        errors.append(error(pipe.whole_state_dict(), state))
        theirs = dict(alone.named_parameters())
        for key, one in pipe.named_parameters():
            assert (one.grad is None) == (theirs[key].grad is None), key
            errors.append(0.0 if one.grad is None else float((one.grad - theirs[key].grad).abs().max()))
        found[name] = max(map(abs, errors))
    return found


def test_stages_of_all_kinds_train_and_evaluate():
    for found in on_ranks(2, kinds, list(KINDS)):
        assert max(found.values()) < 1e-12, found


def raising():
    """What ranks say of an exception on one of them; then they go on."""
    mesh, said = parallel.mesh("cpu", pp=2), []
    pipe = parallel.pipeline(built("residual", {"c": 1}), mesh, 2, loss=F.cross_entropy)
    x, target = next(batches("residual"))
    pipe.step(x, target=target)
    before = {name: one.grad.clone() for name, one in pipe.named_parameters()}
    first = next(iter(dict(pipe.named_parameters()).values()))

    def attempt(labels):
        try:
            pipe.step(x, target=labels)
            said.append("nothing")
        except Exception as problem:
            said.append(f"{type(problem).__name__}: {problem}")

    attempt(target + 100)  # the last stage's loss

    def boom(gradient):
        raise ArithmeticError("in backward")

    for rank in range(2):
        handle = first.register_hook(boom) if mesh.get_rank() == rank else None
        attempt(target)
        if handle is not None:
            handle.remove()
    same = all(torch.equal(one.grad, before[name]) for name, one in pipe.named_parameters())
    pipe.step(x, target=target)
    doubled = all(torch.allclose(one.grad, 2 * before[name]) for name, one in pipe.named_parameters())
    return said, same, doubled


def test_an_exception_on_one_rank_is_told_to_the_others():
    (one, *fine), (other, *more) = on_ranks(2, raising, timeout=60)
    assert one[0].startswith("StrategyError: rank 1 raised IndexError: Target") and other[0].startswith("IndexError")
    assert "in backward" in one[2] and "rank 1 raised ArithmeticError: in backward" in one[2]
    assert "rank 0 raised ArithmeticError: in backward" in other[1]
    assert all((*fine, *more))


def clipped(axes, stages, micro_batches, norm_type, replicas=1):
    """Two clipped steps, and one with a gradient that is not finite on one rank, which all leave out."""
    pipe = parallel.pipeline(built("resnet", stages), parallel.mesh("cpu", **axes), micro_batches, loss=F.cross_entropy)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9)
    alone = built("resnet")
    reference = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
    norms, wanted = [], []
    parts = micro_batches * replicas
    for x, target in list(batches("resnet"))[:2]:
        optimizer.zero_grad()
        reference.zero_grad()
        pipe.step(x, target=target)
        norms.append(pipe.clip_grad_norm_(0.1, norm_type))
        optimizer.step()
        for one, two in zip(x.chunk(parts), target.chunk(parts), strict=True):
            (F.cross_entropy(alone(one), two) / parts).backward()
        wanted.append(nn.utils.clip_grad_norm_(alone.parameters(), 0.1, norm_type))
        reference.step()
    unclipped = pipe.clip_grad_norm_(1e9, norm_type)
    mine, theirs = pipe.whole_state_dict(), dict(alone.named_parameters())
    if torch.distributed.get_rank() == 0:
        next(pipe.parameters()).grad.view(-1)[0] = float("nan")
    stopped = not torch.isfinite(pipe.clip_grad_norm_(0.1, norm_type))
    return {
        "values": error({name: mine[name] for name in theirs}, theirs),
        "norms": max(float((one - two).abs() / two) for one, two in zip(norms, wanted, strict=True)),
        "clipped": min(float(one) for one in norms) > 0.1 >= float(unclipped) - 1e-6,
        "stopped": stopped,
    }


def test_gradients_of_all_stages_are_clipped_together():
    stages = MODELS["resnet"][2]
    for norm_type in (2.0, 1, float("inf")):
        for found in on_ranks(2, clipped, {"pp": 2}, stages[4], 2, norm_type):
            assert max(found["values"], found["norms"]) < 1e-12 and found["clipped"] and found["stopped"], found
    ranks = on_ranks(4, clipped, {"dp": 2, "pp": 2}, stages[2], 2, 2.0, replicas=2)
    for rank, found in enumerate(ranks):  # the other replica has a pipeline of its own
        assert max(found["values"], found["norms"]) < 1e-12 and found["clipped"], found
        assert found["stopped"] == (rank in (0, 1)), found


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
    told("target", lambda: pipe.step(x, target=target[:4]))
    told("one rank", lambda: pipe.step(x[: 8 - mesh.get_rank()], target=target[: 8 - mesh.get_rank()]))
    told("sizes", lambda: pipe.step(x[: 8 - 4 * mesh.get_rank()], target=target[: 8 - 4 * mesh.get_rank()]))
    told("clip", lambda: pipe.clip_grad_norm_(-1.0, 0))
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

    class Inner(Residual):
        def forward(self, x):
            y = self.a(x)
            return self.d(self.c(self.b(y))), y

    torch.manual_seed(0)
    inner = Inner().double()
    inner.c.pipeline_stage = 1
    told("inner", lambda: begin({}, model=inner))
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
    assert "max_norm: got -1.0; a number from 0 on; norm_type: got 0; a number above 0" in told["clip"]
    assert "gradients are off here" in told["no gradients"]
    assert "d.weight of stage 1 is a.weight of stage 0" in told["tied"]
    assert "torch.export cannot trace the model" in told["branches"]
    assert "inputs and target have batches of 8, 4" in told["target"]
    assert "a batch of 7 does not divide" in told["one rank"], "rank 0 has 8"
    assert "the ranks have different tensors" in told["sizes"]
    assert "output 1 of the model is not made by the last stage" in told["inner"]


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


class _Counter(nn.Module):
    """What it returns depends on buffers that it changes: in place, and by another tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones((), dtype=torch.float64))
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def forward(self, x):
        self.seen += 1
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean()
        return (x * self.seen).tanh() * self.mean


def test_the_second_run_finds_buffers_as_the_first_did():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), _Counter()), nn.Linear(8, 8), _Counter()).double()
    nn.utils.parametrizations.spectral_norm(model[1])
    x, mine = torch.randn(4, 8, dtype=torch.float64), copy.deepcopy(model)
    mine[0].recompute()
    mine[0][1].recompute()
    mine.recompute()
    for _ in range(2):
        wanted, found = gradients(model, x), gradients(mine, x)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def split_with_recompute():
    mesh = parallel.mesh("cpu", dp=2)
    model = parallel.semi_auto(
        built("resnet", again=("layer1", "layer1.0", "layer1.0.bn2")),
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


def _refused_twice():
    mesh, x, said = parallel.mesh(pp=2), torch.randn(4, 4), []
    branches = _Branches()
    branches.a.recompute()
    pipe = parallel.pipeline(branches, mesh, 2, loss=F.mse_loss)
    for _ in range(2):
        with pytest.raises(parallel.StrategyError) as error:
            pipe.step(x, target=x)
        said.append(str(error.value))
    return said, "forward" in branches.a.__dict__


def test_a_refused_step_says_so_again():
    for (first, again), recomputed in on_ranks(2, _refused_twice):
        assert "cannot trace" in first and "cannot trace" in again and recomputed


def loaded():
    """Goes on from a whole state, and from a rank's own, as if it had not stopped; what is wrong changes nothing."""
    mesh = parallel.mesh("cpu", pp=2)

    def fresh(seed):
        torch.manual_seed(seed)
        model = sequential(linear(), nn.BatchNorm1d(6), linear(), cut=(2,)).double()
        return parallel.pipeline(model, mesh, 2, loss=F.mse_loss)

    def trained(pipe):
        x, target = torch.arange(48.0, dtype=torch.float64).view(8, 6).sin(), torch.ones(8, 6, dtype=torch.float64)
        loss = pipe.step(x, target=target)
        for one in pipe.parameters():
            one.data.sub_(one.grad, alpha=0.1)
            one.grad = None
        return float(loss)

    first = fresh(0)
    trained(first)
    whole, own = first.whole_state_dict(), {name: one.clone() for name, one in first.state_dict().items()}
    wanted, found, problems = trained(first), [], []
    pipe = fresh(1)
    trained(pipe)  # exported already
    for state in (whole, own):
        pipe.load_state_dict(state)
        found.append(trained(pipe))
        found.append(
            all(torch.equal(one, first.whole_state_dict()[name]) for name, one in pipe.whole_state_dict().items())
        )
    before = pipe.whole_state_dict()
    name = next(iter(own))
    for wrong in (dict(list(own.items())[1:]), own | {"no.such": own[name]}, whole | {name: torch.ones(7)}):
        with pytest.raises(parallel.StrategyError) as caught:
            pipe.load_state_dict(wrong)
        problems.append(str(caught.value))
    pipe.load_state_dict({"no.such": own[name]}, strict=False)
    same = all(torch.equal(one, before[name]) for name, one in pipe.whole_state_dict().items())
    return found == [wanted, True] * 2, same, name, problems


def test_a_state_is_loaded_by_the_names_of_the_model():
    for fits, same, name, (missing, unknown, shape) in on_ranks(2, loaded, timeout=120):
        assert fits and same
        assert f"{name}: it is missing" in missing and "no.such: the model has no such tensor" in unknown
        assert f"{name}: got shape (7,); the model's is " in shape

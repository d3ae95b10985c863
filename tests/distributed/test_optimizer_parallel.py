"""Optimizers in parallel on real ranks: the bits of the plain optimizer, which every rank runs beside them."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist

from mindspeed_mem.optimizer_parallel import OptimizerParallelError, parallelize
from tests.models import DEVICE
from tests.sweeping import but
from tests.worlds import on_ranks

pytestmark = pytest.mark.distributed

STEPS = 3
ELEMENTWISE = {
    "Adadelta": {},
    "Adagrad": {"weight_decay": 0.1},
    "Adam": {"amsgrad": True},
    "Adamax": {},
    "AdamW": {"fused": True},
    "ASGD": {"weight_decay": 0.1},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}
CASES = [
    *itertools.product(ELEMENTWISE.items(), ("grouping", "sharding"), (torch.float32,)),
    *itertools.product(ELEMENTWISE.items(), ("sharding",), (torch.bfloat16,)),
    (("AdamW", {}), "grouping", torch.bfloat16),
    (("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}), "sharding", torch.float32),
    (("AdamW", {"foreach": True}), "sharding", torch.float32),
    (("Adafactor", {}), "grouping", torch.float32),
]


def parameters(dtype=torch.float32):
    """Of all kinds: of odd sizes, smaller than the number of ranks, a scalar, transposed, with gaps, frozen."""
    generator = torch.Generator().manual_seed(7)

    def values(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    made = [values(300, 7), values(1), values(()), values(33, 20).t(), values(30, 40)[:, ::3], values(2), values(129)]
    found = [torch.nn.Parameter(one) for one in made]
    found[-1].requires_grad_(False)
    assert not found[3].is_contiguous() and not found[4].is_contiguous()
    return found


def groups(found):
    return [{"params": found[:3]}, {"params": found[3:], "lr": 0.02, "weight_decay": 0.05}]


def set_gradients(found, step):
    """The same on all ranks; in step 1 one parameter gets none."""
    generator = torch.Generator().manual_seed(100 + step)
    for index, parameter in enumerate(found):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if not parameter.requires_grad or (step, index) == (1, 0):
            parameter.grad = None
        else:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)


def differences(one, other):
    """Where two state dicts, or lists of parameters, differ, by type, shape, dtype or any bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [f"keys {one.keys() ^ other.keys()}"] * (one.keys() != other.keys())
        return keys + [f"{k}.{d}" for k in one.keys() & other.keys() for d in differences(one[k], other[k])]
    if isinstance(one, list) and isinstance(other, list):
        return differences(dict(enumerate(one)), dict(enumerate(other)))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one.detach().cpu(), other.detach().cpu()) else ["values"]
    return [] if one == other else [f"{one!r} is not {other!r}"]


def train(optimizers, copies, steps, schedulers=()):
    for step in steps:
        for optimizer, found in zip(optimizers, copies, strict=True):
            optimizer.zero_grad()
            set_gradients(found, step)
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


def against_plain(cases):
    """Each case's differences to the plain optimizer, which are none, and what this rank holds of its states."""
    found = {}
    for number, ((name, settings), mode, dtype) in enumerate(cases):
        kind = getattr(torch.optim, name)
        plain, mine, again = parameters(dtype), parameters(dtype), parameters(dtype)
        reference = kind(groups(plain), **settings)
        # Small messages: parameters span several of them.
        parallel = parallelize(kind(groups(mine), **settings), None, mode, message_bytes=3000)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (reference, parallel)]
        train([reference, parallel], [plain, mine], range(STEPS), schedulers)
        wrong = differences(plain, mine)
        whole = parallel.state_dict()
        wrong += differences(reference.state_dict(), whole)
        # Back into the plain optimizer, and into a parallel one of the other mode.
        other = "sharding" if mode == "grouping" and name in ELEMENTWISE else "grouping"
        loaded = parallelize(kind(groups(again), **settings), None, other)
        loaded.load_state_dict(copy.deepcopy(whole))
        reference = kind(groups(plain), **settings)
        reference.load_state_dict(copy.deepcopy(whole))
        with torch.no_grad():
            for to, of in zip(again, plain, strict=True):
                to.copy_(of)
        train([reference, parallel, loaded], [plain, mine, again], range(STEPS, 2 * STEPS))
        wrong += differences(plain, mine) + differences(plain, again)
        held = sum(v.numel() for s in parallel.state.values() for v in s.values() if torch.is_tensor(v) and v.dim())
        full = sum(v.numel() for s in reference.state.values() for v in s.values() if torch.is_tensor(v) and v.dim())
        found[f"{number} {name} {mode} {dtype}"] = (wrong, held, full)
    return found


@pytest.mark.parametrize("size", but([1, 2, 3], 3))
def test_any_optimizer_trains_to_the_same_bits(size):
    cases = CASES if size == 3 else CASES[1::3]
    ranks = on_ranks(size, against_plain, cases)
    assert len(ranks[0]) == len(cases)
    for case, (_, _, full) in ranks[0].items():
        assert [rank[case][0] for rank in ranks] == [[]] * size, case
        if "Adafactor" not in case:
            assert sum(rank[case][1] for rank in ranks) == full  # every state is on one rank, and on one only
            share = max(rank[case][1] for rank in ranks) / full if full else 0
            assert share < 0.45 or size < 3 or "grouping" in case, case


def adafactor_of_mixed_types():
    """Differences to the plain one, for groups of several types: torch's eps for all is that of the first."""
    found = {}
    for foreach in (False, True):
        copies = []
        for _ in range(2):
            generator = torch.Generator().manual_seed(3)
            dtypes = (torch.bfloat16, torch.float32, torch.float32) * 2
            values = (torch.randn(9, 9, generator=generator).to(DEVICE, one) for one in dtypes)
            copies.append(list(map(torch.nn.Parameter, values)))
        reference, inner = (torch.optim.Adafactor(groups(one), foreach=foreach) for one in copies)
        optimizers = reference, parallelize(inner, None, "grouping")
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            gradients = [3e-3 * torch.randn(9, 9, generator=generator) for _ in copies[0]]
            for optimizer, params in zip(optimizers, copies, strict=True):
                for index, (param, gradient) in enumerate(zip(params, gradients, strict=True)):
                    param.grad = None if index == step else gradient.to(param)
                optimizer.step()
        states = [optimizer.state_dict() for optimizer in optimizers]
        found[foreach] = differences(*copies) + differences(*states)
        assert all(torch.isfinite(param).all() for param in copies[0])
    return found


def test_adafactor_of_mixed_types_has_the_eps_of_the_whole_group():
    assert on_ranks(2, adafactor_of_mixed_types) == [{False: [], True: []}] * 2


def corners():
    """Everything else that a training script does with an optimizer; returns what went wrong."""
    wrong = []
    for mode in ("grouping", "sharding"):
        plain, mine = parameters(), parameters()
        reference = torch.optim.AdamW(groups(plain))
        inner = torch.optim.AdamW(groups(mine))
        train([reference, inner], [plain, mine], [0])  # states that are there already, and a scheduler
        schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, 0.1) for one in (reference, inner)]
        parallel = parallelize(inner, dist.group.WORLD, mode)
        train([reference, parallel], [plain, mine], [1], schedulers)
        # a new group, and parameters whose memory or freezing changes on the way
        more = [[torch.nn.Parameter(torch.arange(200.0, device=DEVICE))] for _ in range(2)]
        reference.add_param_group({"params": more[0], "lr": 0.5})
        parallel.add_param_group({"params": more[1], "lr": 0.5})
        for found in (plain, mine):
            found[0].data = found[0].data.clone()
            found[6].requires_grad_(True)
            found[1].requires_grad_(False)
        train([reference, parallel], [plain + more[0], mine + more[1]], [2, 3], schedulers)
        # a closure, which computes the gradients
        losses = []
        for optimizer, found in ((reference, plain), (parallel, mine)):

            def closure(optimizer=optimizer, found=found):
                optimizer.zero_grad()
                loss = sum((one**2).sum() for one in found)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
        wrong += differences(*losses)
        # a loss scale that overflows once: the step is left out, and nothing moves
        for step, factor in enumerate((1.0, float("inf"), 1.0)):
            for optimizer, found in ((reference, plain), (parallel, mine)):
                scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
                optimizer.zero_grad()
                (scaler.scale(sum((one * (step + 1)).sum() for one in found)) * factor).backward()
                scaler.step(optimizer)
                scaler.update()
        wrong += differences(plain + more[0], mine + more[1])
        alone = parallel.state_dict(only_on=0)
        wrong += differences(alone, {**reference.state_dict(), **({} if dist.get_rank() == 0 else {"state": {}})})
        figures = parallel.figures()
        held = sum(v.numel() * 4 for s in parallel.state.values() for v in s.values())
        wrong += [f"{figures}"] * (figures.state_bytes != held or len(figures.bytes_by_rank) != dist.get_world_size())
        for bad in ([parameters()], [{"params": parameters()[:-1]}, {"params": more[0]}]):
            try:
                parallel.load_state_dict(
                    torch.optim.AdamW(
                        [{"params": [*one]} if isinstance(one, list) else one for one in bad]
                    ).state_dict()
                )
                wrong.append("a state dict of other groups was loaded")
            except ValueError as error:
                wrong += [] if "groups of" in str(error) else [str(error)]
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            try:
                copied(parallel)
                wrong.append(f"{copied.__name__} gave an optimizer without parts")
            except OptimizerParallelError as error:
                wrong += [] if "no parts" in str(error) else [str(error)]
    return wrong


def refusals():
    """What each rank is told."""
    told = []
    for parameter, mode in ((torch.ones(2 + dist.get_rank()), "grouping"), (torch.ones(400), "sharding")):
        parameter.requires_grad_(True)
        try:
            parallel = parallelize(torch.optim.SGD([parameter], lr=1.0), None, mode)
            parameter.grad = torch.ones(400).to_sparse()
            parallel.step()
        except OptimizerParallelError as error:
            told.append(str(error))
    group = dist.new_group([0])
    try:
        parallelize(torch.optim.LBFGS([parameter]), group, "grouping")
    except OptimizerParallelError as error:
        told.append(error.problems)
    return told


def several():
    return corners(), refusals()


def test_the_rest_of_a_training_script():
    ranks = on_ranks(3, several)
    assert [wrong for wrong, _ in ranks] == [[]] * 3
    for rank, (_, (others, sparse, last)) in enumerate(ranks):
        assert "ranks [1, 2] of the process group have other parameters" in others
        assert "sparse gradient" in sparse and "grouping" in sparse
        assert len(last) == (1 if rank == 0 else 2) and "LBFGS" in last[0]


def saved():
    found = parameters()
    parallel = parallelize(torch.optim.AdamW(groups(found)), None, "sharding")
    train([parallel], [found], range(STEPS))
    return [one.detach().clone() for one in found], parallel.state_dict()


def continued(values, state):
    results = []
    for mode in ("grouping", "sharding"):
        found = parameters()
        with torch.no_grad():
            for to, of in zip(found, values, strict=True):
                to.copy_(of)
        parallel = parallelize(torch.optim.AdamW(groups(found)), None, mode)
        parallel.load_state_dict(state)
        train([parallel], [found], range(STEPS, 2 * STEPS))
        results.append([one.detach().clone() for one in found])
    return results


def test_a_state_dict_is_loaded_at_another_number_of_ranks():
    values, state = on_ranks(2, saved)[0]
    found = parameters()
    reference = torch.optim.AdamW(groups(found))
    train([reference], [found], range(2 * STEPS))
    for size in (1, 3):
        for results in on_ranks(size, continued, values, state):
            for result in results:
                assert differences([one.detach() for one in found], result) == []


def by_checkpoint_functions(mode):
    """The next step of a model and optimizer that torch.distributed.checkpoint's functions have filled, and of those
    that went on. Of one parameter some ranks have nothing to step."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def made():
        torch.manual_seed(3)
        model = torch.nn.Linear(2, 1, bias=False)
        return model, parallelize(torch.optim.AdamW(model.parameters(), lr=0.1), None, mode)

    def step(model, optimizer):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    step(model, optimizer)
    weights, states = (copy.deepcopy(one) for one in get_state_dict(model, optimizer))
    other, filled = made()
    get_state_dict(other, filled)  # as loading a checkpoint starts
    set_state_dict(other, filled, model_state_dict=weights, optim_state_dict=states)
    get_state_dict(other, filled)  # at once, before any step
    for one in ((model, optimizer), (other, filled)):
        step(*one)
    return model.weight.detach(), other.weight.detach()


@pytest.mark.parametrize("mode", ["grouping", "sharding"])
def test_ranks_without_a_part_take_part_in_checkpoint_functions(mode):
    found = on_ranks(3, by_checkpoint_functions, mode, timeout=60)
    assert all(torch.equal(one, found[0][0]) for pair in found for one in pair)


def hooked(mode):
    """What hooks around state dicts were called with, on the optimizer given and on the one that stands for it, and
    where they have changed the states."""
    values = parameters()
    plain = torch.optim.Adam(groups(values))
    called = []

    def saved(optimizer, state):
        called.append(("after saving", optimizer is mine, [one["exp_avg"].shape for one in state["state"].values()]))
        return {**state, "more": 1}

    def given(optimizer, state):
        called.append(("before loading", optimizer is mine, [one["exp_avg"].shape for one in state["state"].values()]))
        state["param_groups"] = [{**group, "lr": 0.5} for group in state["param_groups"]]

    plain.register_load_state_dict_pre_hook(given)
    first = plain.register_state_dict_post_hook(saved)
    mine = parallelize(plain, None, mode)
    mine.register_state_dict_pre_hook(lambda optimizer: called.append(("before saving", optimizer is mine)))
    mine.register_load_state_dict_pre_hook(lambda optimizer, state: {**state, "state": {}} if "more" in state else None)
    mine.register_load_state_dict_post_hook(
        lambda optimizer: called.append(("after loading", optimizer is mine, optimizer.param_groups[0]["lr"]))
    )
    train([mine], [values], range(2))
    state = mine.state_dict()
    first.remove()
    again = {key: value for key, value in state.items() if key != "more"}
    mine.load_state_dict(again)
    wrong = differences(mine.state_dict()["state"], state["state"])
    kept = again["param_groups"][0]["lr"]
    mine.load_state_dict(state)
    return called, state["more"], wrong, kept, mine.state_dict()["state"]


@pytest.mark.parametrize("mode", ["grouping", "sharding"])
def test_hooks_around_state_dicts_are_called_as_by_any_optimizer_with_whole_states(mode):
    shapes = [one.shape for one in parameters()[:-1]]
    wanted = [
        ("before saving", True),
        ("after saving", True, shapes),
        ("before loading", True, shapes),
        ("after loading", True, 0.5),
        ("before saving", True),
        ("before loading", True, shapes),
        ("after loading", True, 0.5),
        ("before saving", True),
    ]
    for called, more, wrong, kept, left in on_ranks(3, hooked, mode):
        assert called == wanted
        assert (more, wrong, kept, left) == (1, [], 1e-3, {}), "the state dict given is not changed"

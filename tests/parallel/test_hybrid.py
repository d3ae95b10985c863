"""Collectives written by the user, and regions on local parts: the numbers and gradients of one device."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

from mindspeed_mem import parallel
from mindspeed_mem.parallel import StrategyError
from tests.worlds import on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.needs_torch("2.13", "DTensor's rules")]


def tensors():
    torch.manual_seed(5)
    return [torch.randn(*shape, dtype=torch.float64) for shape in ((8, 16), (16, 32), (32, 8), (8,))]


def plain():
    """The loss on one device, and the gradients."""
    x, w1, w2, b = leaves = [one.requires_grad_() for one in tensors()]
    loss = (torch.relu(x @ w1) @ w2 + b).square().mean()
    loss.backward()
    return loss.detach(), [one.grad for one in leaves]


def furthest(ours, theirs):
    return max(float((one - two).abs().max()) for one, two in zip(ours, theirs, strict=True))


def by_hand(size):
    """Megatron's two splits of an MLP, the collectives placed by hand, without and with sequence parallelism."""
    mesh = parallel.mesh("cpu", tp=size)
    rank, loss, grads = mesh.get_local_rank("tp"), *plain()
    x, w1, w2, b = tensors()
    columns = slice(rank * 32 // size, (rank + 1) * 32 // size)
    rows = slice(rank * 8 // size, (rank + 1) * 8 // size)
    a, b1, b2, c = mine = [one.clone().requires_grad_() for one in (x, w1[:, columns], w2[columns], b)]
    whole = parallel.all_reduce(torch.relu(parallel.copy(a, axis="tp") @ b1) @ b2, axis="tp") + c
    out = whole.square().mean()
    out.backward()
    wanted = [grads[0], grads[1][:, columns], grads[2][columns], grads[3]]
    found = [furthest([out, *(one.grad for one in mine)], [loss, *wanted])]

    a, b1, b2, c = mine = [one.clone().requires_grad_() for one in (x[rows], w1[:, columns], w2[columns], b)]
    inner = torch.relu(parallel.all_gather(a, axis="tp") @ b1) @ b2
    part = parallel.reduce_scatter(inner, axis="tp") + parallel.copy(c, axis="tp")
    out = parallel.all_gather(part, 0, axis="tp", alike=True).square().mean()
    out.backward()
    wanted = [grads[0][rows], grads[1][:, columns], grads[2][columns], grads[3]]
    return [*found, furthest([out, *(one.grad for one in mine)], [loss, *wanted])]


def transposes(size):
    """<A x, y> = <x, A' y>, summed over ranks, for each map and its backward; and backward of backward is the map."""
    parallel.mesh("cpu", tp=size)
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    sent = [(rank + to) % 3 for to in range(size)]
    maps = {
        "all_gather": lambda x: parallel.all_gather(x, 1, axis="tp"),
        "reduce_scatter": lambda x: parallel.reduce_scatter(x, 1, axis="tp"),
        "all_to_all": lambda x: parallel.all_to_all(x, axis="tp"),
        "unequal": lambda x: parallel.all_to_all(x[: sum(sent)], sent, axis="tp"),
        "broadcast": lambda x: parallel.broadcast(x, size - 1, axis="tp"),
    }
    found = {}
    for name, function in maps.items():
        x = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
        y = function(x)
        other = torch.randn_like(y, requires_grad=True)
        (back,) = torch.autograd.grad(y, x, other, create_graph=True)
        (again,) = torch.autograd.grad(back, other, x)
        sides = torch.stack([(y * other).sum(), (back * x).sum()]).detach()
        torch.distributed.all_reduce(sides)
        found[name] = float((sides[0] - sides[1]).abs()), furthest([again], [y])
    return found


def disagreeing():
    """What is said of all_to_alls that would hang, or mix up rows; each rank returns its messages."""
    parallel.mesh("cpu", tp=2)
    rank = torch.distributed.get_rank()
    x = torch.ones(3, 2)
    calls = {
        "received": dict(sent=[1, 2], received=[1, 1] if rank else [1, 3]),
        "rows": dict(sent=[1, 1]),
        "ranks": dict(sent=[1, 1, 1]),
        "negative": dict(sent=[4, -1]),
        "odd": {},
        "widths": dict(x=torch.ones(3, 2 + rank), sent=[1, 2]),
    }
    found = {}
    for name, given in calls.items():
        with pytest.raises(StrategyError) as caught:
            parallel.all_to_all(given.pop("x", x), **given, axis="tp")
        found[name] = str(caught.value)
    for call in (lambda: parallel.copy(x, axis="dp"), lambda: parallel.reduce_scatter(x, axis="tp")):
        with pytest.raises(StrategyError) as caught:
            call()
        found[len(found)] = str(caught.value)
    got = parallel.all_to_all(x * rank + torch.arange(3)[:, None], [1, 2] if rank else [2, 1], axis="tp")
    return found, got[:, 0].tolist()


def one_rank_alone():
    """What the ranks are told where one of them does something else, or cannot do it; then they go on together."""
    parallel.mesh("cpu", tp=2)
    rank = torch.distributed.get_rank()
    x, wide = torch.ones(4, 4), torch.ones(4, 4 + 2 * rank)
    split = parallel.local(lambda x: x, (("tp", None),), (("tp", None),), name="split")
    many = parallel.local(lambda *given: given[0], (None,), ((None, None),), name="many")
    back = parallel.local(lambda x: (x, x)[: 1 + rank], None, ((None, None),), name="back")
    parallel.all_reduce(wide[:, :4], axis="tp"), split(x)
    calls = {
        "gather": lambda: parallel.all_gather(wide, axis="tp"),
        "seen": lambda: parallel.all_reduce(x[: 4 - rank], axis="tp"),  # rank 0 has had this shape
        "broadcast": lambda: parallel.broadcast(x.double() if rank else x, axis="tp"),
        "copy": lambda: parallel.copy(wide, axis="tp"),
        "rows": lambda: parallel.all_to_all(torch.ones(4 - rank, 2), axis="tp"),
        "other": lambda: (parallel.all_gather if rank else parallel.all_reduce)(x, axis="tp"),
        "dimension": lambda: parallel.all_gather(x, 2 * rank, axis="tp"),
        "scatter": lambda: parallel.reduce_scatter(torch.ones(4 - rank, 4), axis="tp"),
        "no gradients": lambda: (
            torch.no_grad()(parallel.all_reduce)(x, axis="tp") if rank else parallel.all_reduce(x, axis="tp")
        ),
        "local": lambda: split(torch.ones(4 - rank, 4)),
        "tensors": lambda: many(*[x] * (1 + rank)),
        "shapes": lambda: split(torch.ones(4 + 2 * rank, 4)),
        "returned": lambda: back(x),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises(StrategyError) as caught:
            call()
        found[name] = "\n".join(caught.value.problems)
    with pytest.raises(ValueError) as caught:
        parallel.local(lambda x: x if not rank else [].index(3), None, ((None, None),), name="part")(x)
    raised = str(caught.value)
    given = torch.ones(4, 4, requires_grad=not rank)  # the others hold the place only
    got = parallel.broadcast(given, axis="tp")
    (got.sum() * (1 + rank)).backward()
    return found, float(given.grad.sum()) if given.grad is not None else None, raised


def regions(shape):
    """`local` against one device, and what torch's local_map makes of the same."""
    mesh = parallel.mesh("cpu", **shape)
    loss, grads = plain()

    def mlp(x, w1, w2, b):  # b enters after the sum: each rank has its whole gradient
        return parallel.all_reduce(torch.relu(x @ w1) @ w2, axis="tp") + b

    def megatrons(x, w1, w2, b):
        return parallel.all_reduce(torch.relu(parallel.copy(x, axis="tp") @ w1) @ w2, axis="tp") + b

    def gathered(x, w1, w2, b):
        return parallel.all_gather(torch.relu(x @ w1), 1, axis="tp") @ w2 + b

    split = ((None, None), (None, "tp"), ("tp", None), (None,))
    cases = {
        "mlp": parallel.local(mlp, split, ((None, None),)),
        "megatrons": parallel.local(megatrons, split, ((None, None),)),
        "gathered": parallel.local(gathered, (*split[:2], None, None), ((None, None),)),
        "as it comes": parallel.local(lambda x, w1, w2, b: torch.relu(x @ w1) @ w2 + b, None, ((None, None),)),
    }
    if "dp" in shape:
        cases["batch too"] = parallel.local(mlp, (("dp", None), *split[1:]), (("dp", None),))
    found = {}
    for name, function in cases.items():
        mine = [distribute_tensor(one, mesh).requires_grad_() for one in tensors()]
        out = function(*mine).square().mean()
        out.backward()
        same = [one.grad.placements == one.placements for one in mine]
        found[name] = furthest([out.full_tensor(), *(one.grad.full_tensor() for one in mine)], [loss, *grads]), same
    return found


def torchs_local_map():
    """The largest error of a gradient with torch's own local_map, as it is and with the split alone looked at."""
    mesh = parallel.mesh("cpu", tp=2)
    _, grads = plain()
    found = []
    inputs = ([Replicate()], [Shard(1)], [Shard(0)], [Replicate()])
    for grad_placements in (None, ([Partial()], [Shard(1)], [Shard(0)], [Partial()])):

        def mlp(x, w1, w2, b):
            return parallel.all_reduce(torch.relu(x @ w1) @ w2, axis="tp") + b

        function = local_map(mlp, [Replicate()], inputs, grad_placements, mesh, redistribute_inputs=True)
        mine = [distribute_tensor(one, mesh).requires_grad_() for one in tensors()]
        function(*mine).square().mean().backward()
        found.append([furthest([one.grad.full_tensor()], [two]) for one, two in zip(mine, grads, strict=True)])
    return found


def modules():
    """A module as a region: its parameters are arguments."""
    mesh = parallel.mesh("cpu", dp=2)
    torch.manual_seed(5)
    module, x = nn.Linear(4, 4).double(), torch.randn(6, 4, dtype=torch.float64)
    module(x).square().sum().backward()
    grads = [one.grad.clone() for one in module.parameters()]
    for name, one in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(distribute_tensor(one.detach(), mesh)))
    parallel.local(module, (("dp", None),), (("dp", None),))(x).square().sum().backward()
    return furthest([one.grad.full_tensor() for one in module.parameters()], grads)


def refusals():
    mesh = parallel.mesh("cpu", tp=2)
    rank = torch.distributed.get_rank()
    x = torch.ones(4, 4)
    calls = [
        lambda: parallel.local(lambda x: x, out_strategy=None),
        lambda: parallel.local(lambda x: x, ("tp",), ((None, None),)),
        lambda: parallel.local(lambda x: x, ((None, "tp"), None), ((None, "tp"),))(x),
        lambda: parallel.local(lambda x: x, ((None, "tp"),), ((None, None),), name="forgotten")(x * torch.arange(4)),
        lambda: parallel.local(lambda x: x[: 2 + rank], None, (("tp", None),), name="uneven")(x),
        lambda: parallel.local(lambda x: DTensor.from_local(x, mesh), None, ((None, None),), name="wrapped")(x),
        lambda: parallel.local(lambda x: (x, x), None, ((None, None),), name="two")(x),
    ]
    found = []
    for call in calls:
        with pytest.raises(StrategyError) as caught:
            call()
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_splits_by_hand_are_one_device(size):
    for errors in on_ranks(size, by_hand, size):
        assert max(errors) < 1e-12


@pytest.mark.parametrize("size", [2, 4])
def test_backward_is_the_transpose(size):
    for found in on_ranks(size, transposes, size):
        assert all(max(errors) < 1e-10 for errors in found.values()), found


def test_rows_that_ranks_do_not_agree_on_are_refused_on_all_before_they_are_sent():
    (found, first), (others, second) = on_ranks(2, disagreeing, timeout=30)
    assert found == others
    assert "rank 0 receives [1, 3], and is sent [1, 1]" in found["received"]
    assert "rank 1 receives [1, 1], and is sent [2, 2]" in found["received"]
    assert "rank 1 has 3 rows and sends [1, 1] to 2 ranks" in found["rows"]
    assert "sends [1, 1, 1] to 2 ranks" in found["ranks"] and "[4, -1]" in found["negative"]
    assert "sent=" in found["odd"] and "all_to_all of rows of (3,) float32" in found["widths"]
    assert "there are tp" in found[6] and "cannot be split evenly" in found[7]
    assert (first, second) == ([0, 1, 1], [2, 2, 3])


def test_what_one_rank_does_alone_is_told_to_all_of_them():
    (found, gradient, told), (others, _, raised) = on_ranks(2, one_rank_alone, timeout=30)
    assert raised == "3 is not in list" and told == f"part failed on a rank: ValueError: {raised}"
    assert found == others and gradient == 4 * 4 * (1 + 2)
    for name, text in {
        "gather": "rank 1 calls all_gather(dim=0, alike=False) of (4, 6) float32",
        "seen": "on axis 'tp', rank 0 calls all_reduce of (4, 4) float32\n"
        "on axis 'tp', rank 1 calls all_reduce of (3, 4)",
        "broadcast": "rank 1 calls broadcast(source=0) of (4, 4) float64",
        "copy": "rank 1 calls copy of (4, 6)",
        "rows": "equal parts of (3, 2) float32: its rows cannot be divided evenly over 2 ranks",
        "other": "rank 0 calls all_reduce of (4, 4) float32\non axis 'tp', rank 1 calls all_gather",
        "dimension": "rank 1 calls all_gather(dim=2, alike=False) of (4, 4) float32: it has no dimension 2",
        "scatter": "(3, 4) float32: dimension 0 cannot be split evenly over 2 ranks",
        "no gradients": "float32 without gradients",
        "local": "split, input 0: dimension 0 of (3, 4) cannot be split evenly",
        "tensors": "many: 1 strategies for 2 tensors",
        "shapes": "split: the ranks have different tensors: (4, 4) torch.float32 whole False",
        "returned": "back: 1 strategies in out_strategy for 2 tensors",
    }.items():
        assert text in found[name], (name, found[name])


@pytest.mark.parametrize("shape", [{"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_gradients_of_a_region_are_derived(shape):
    for found in on_ranks(2 if shape == {"tp": 2} else 4, regions, shape):
        assert all(error < 1e-12 and all(same) for error, same in found.values()), found


def test_torchs_local_map_is_still_wrong():
    """When this fails, torch derives gradients itself: see whether `local` still has to."""
    for untold, split_looked_at in on_ranks(2, torchs_local_map):
        assert untold[0] > 0.1 and split_looked_at[0] < 1e-12
        assert split_looked_at[3] > 0.1  # that the others are split does not make this gradient a sum


def test_a_module_as_a_region():
    assert max(on_ranks(2, modules)) < 1e-12


def test_what_local_refuses():
    for found in on_ranks(2, refusals):
        assert "out_strategy" in found[0] and "no strategy" in found[1] and "2 strategies for 1" in found[2]
        assert found[3].startswith("forgotten, output 0") and "all_reduce or all_gather" in found[3]
        assert found[4].startswith("uneven, output 0") and "(2, 4), (3, 4)" in found[4]
        assert "wrapped, output 0 is a DTensor" in found[5] and "two: 1 strategies" in found[6]


def taken_at_their_word(size):
    """The same with calls that are no longer compared: one rank alone wants a gradient, and all take part in it."""
    from mindspeed_mem.parallel import meshes

    compared, meshes.COMPARED = meshes.COMPARED, 2
    try:
        mesh = parallel.mesh("cpu", tp=size)
        rank, found = mesh.get_local_rank("tp"), []
        double = parallel.local(lambda x: parallel.all_reduce(x, axis="tp"), out_strategy=[(None,)])
        for _ in range(4):
            x = torch.full((3,), 2.0, requires_grad=rank == 0)
            y = parallel.broadcast(x, axis="tp")
            (y * (rank + 1)).sum().backward()
            found.append(
                (y.tolist(), x.grad.tolist() if rank == 0 else None, double(torch.ones(2)).full_tensor().tolist())
            )
        return found
    finally:
        meshes.COMPARED = compared


def test_after_many_calls_the_ranks_are_taken_at_their_word():
    for rank, found in enumerate(on_ranks(2, taken_at_their_word, 2)):
        assert found == [([2.0] * 3, [3.0] * 3 if rank == 0 else None, [2.0] * 2)] * 4

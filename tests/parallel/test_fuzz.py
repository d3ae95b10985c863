"""Random graphs with random strategies on random meshes: one device's numbers, or a StrategyError that names where."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import distribute_tensor

from mindspeed_mem import parallel
from mindspeed_mem.parallel import StrategyError
from tests.parallel_models import full
from tests.worlds import on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.needs_torch("2.13", "DTensor's rules")]
SIZE = 8  # of each dimension: all of a graph's tensors are [8, 8, 8]

ONE = {
    "relu": F.relu,
    "gelu": F.gelu,
    "softmax": lambda x: F.softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (SIZE,)),
    "rms_norm": lambda x: F.rms_norm(x, (SIZE,)),
    "transpose": lambda x: x.transpose(0, 2),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "max": lambda x: x + x.amax(0, keepdim=True),
    "norm": lambda x: F.normalize(x, dim=1),
    "heads": lambda x: x.view(SIZE, SIZE, 2, 4).transpose(1, 2).reshape(SIZE, 2 * SIZE, 4).reshape(SIZE, SIZE, SIZE),
    "flatten": lambda x: (x.flatten(0, 1) * 2).view(SIZE, SIZE, SIZE),
    "halves": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "pieces": lambda x: torch.stack([x.unbind(0)[n] for n in range(SIZE)], 1),
    "some": lambda x: x + x[:, [0]],
    "mask": lambda x: x.masked_fill(torch.ones(SIZE, SIZE).tril().bool(), 0.0),
    "convolution": lambda x: F.conv1d(x, torch.ones(SIZE, SIZE, 3, dtype=x.dtype) / 10, padding=1),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: F.group_norm(x, 2),
    "pool": lambda x: F.max_pool2d(x, 3, 1, 1),
    "cumsum": lambda x: x.cumsum(1) / SIZE,
    "dropout": lambda x: F.dropout(x.contiguous(), 0.2),  # what is drawn depends on how it lies in memory
    "in place": lambda x: (x * 1).mul_(2).add_(1),
    "attention": lambda x: (
        F.scaled_dot_product_attention(*[x.view(SIZE, SIZE, 2, 4).transpose(1, 2)] * 3).transpose(1, 2).flatten(2)
    ),
    "hybrid": lambda x: x,  # taken apart below
}
TWO = {
    "add": torch.add,
    "mul": lambda x, y: x * y.sigmoid(),
    "matmul": lambda x, y: x @ y / SIZE,
    "einsum": lambda x, y: torch.einsum("abc,adc->abd", x, y) / SIZE,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "linear": lambda x, y: F.linear(x, y[0]),
    "loss": lambda x, y: x + F.mse_loss(x, y),
}
MESHES = {2: [{"a": 2}], 4: [{"a": 4}, {"a": 2, "b": 2}]}


def strategy(draw, axes):
    """A random one for three dimensions."""
    entries = [None] * 3
    for axis in axes:
        dim = draw.choice([0, 1, 2, None])
        if dim is not None:
            entries[dim] = (
                axis
                if entries[dim] is None
                else (*([entries[dim]] if isinstance(entries[dim], str) else entries[dim]), axis)
            )
    return tuple(entries)


def graph(seed, axes):
    """Steps: operator, the tensors it reads, and its strategies."""
    draw = random.Random(seed)
    steps = []
    for count in range(3, 3 + draw.randint(3, 7)):
        name = draw.choice([*ONE, *TWO])
        reads = [draw.randrange(max(0, count - 4), count) for _ in range(2 if name in TWO else 1)]
        ways = [strategy(draw, axes) if draw.random() < 0.6 else None for _ in reads]
        steps.append((name, reads, ways, (strategy(draw, axes),) if draw.random() < 0.3 else None))
    return steps


def run(steps, leaves, wrap):
    values = list(leaves)
    for number, (name, reads, ways, out) in enumerate(steps):
        values.append(
            wrap(f"{number}.{name}", ONE.get(name) or TWO[name], ways, out)(*[values[read] for read in reads])
        )
    return sum(value.square().mean() for value in values[-3:])


def by_hand(mesh, name, ways, out):
    """A region: twice its part, whole again along the first axis."""
    axis = mesh.mesh_dim_names[0]

    def doubled(x):
        rows = x.chunk(mesh.size(0), 0)[mesh.get_local_rank(0)] * 2
        return parallel.all_gather(rows, 0, axis=axis)

    inside = parallel.local(doubled, ((None,) * 3,), ((None,) * 3,), mesh=mesh, name=name)
    return parallel.shard(inside, tuple(ways), out, mesh=mesh, name=name)


def outcomes(shape, seeds):
    """Per seed: the largest difference, or what was refused."""
    mesh, found = parallel.mesh("cpu", **shape), {}
    for seed in seeds:
        steps = graph(seed, list(shape))
        torch.manual_seed(seed)
        plain = [torch.randn(SIZE, SIZE, SIZE, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        mine = [distribute_tensor(one.detach(), mesh).requires_grad_() for one in plain]

        def one_device(name, function, ways, out):
            return (lambda x: x * 2) if name.endswith("hybrid") else function

        def split(name, function, ways, out):
            if name.endswith("hybrid"):
                return by_hand(mesh, name, ways, out)
            return parallel.shard(function, tuple(ways), out, mesh=mesh, name=name)

        torch.manual_seed(seed)
        wanted = run(steps, plain, one_device)
        wanted.backward()
        torch.manual_seed(seed)
        try:
            loss = run(steps, mine, split)
            loss.backward()
        except StrategyError as error:
            found[seed] = str(error)
            continue
        pairs = [(loss, wanted), *((a.grad, b.grad) for a, b in zip(mine, plain, strict=True) if b.grad is not None)]
        found[seed] = max(float((full(a) - b.detach()).abs().max() / (1 + b.detach().abs().max())) for a, b in pairs)
    return found


def check(size, seeds):
    for shape in MESHES[size]:
        everyone = on_ranks(size, outcomes, shape, seeds, timeout=30 + 5 * len(seeds))
        for seed in seeds:
            results = [found[seed] for found in everyone]
            refused = [one for one in results if isinstance(one, str)]
            assert len(refused) in (0, size), (shape, seed, results)
            if refused:
                number = refused[0].partition(".")[0]
                assert number.isdigit(), (shape, seed, refused[0])  # the step that it names
            else:
                assert max(results) < 1e-12, (shape, seed, results, graph(seed, list(shape)))
        equal = sum(not isinstance(everyone[0][seed], str) for seed in seeds)
        assert equal > len(seeds) * 0.6, [one for one in everyone[0].values() if isinstance(one, str)]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_random_graphs(size):
    # The last three: a batch and merged dimensions split over two axes, a norm that gets a sum as gradient.
    check(size, [*range(4), 161, 171, 428])


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("size", [2, 4])
def test_many_random_graphs(size, part):
    check(size, range(100 + part * 50, 150 + part * 50))


def test_graphs_have_all_operators():
    names = {name for seed in range(100) for name, *_ in graph(seed, ["a"])}
    assert names == {*ONE, *TWO} and math.prod([SIZE] * 3) == 512

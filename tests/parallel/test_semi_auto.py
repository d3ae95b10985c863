"""Semi-automatic mode: real models split over gloo ranks train with the numbers of one device; what was moved is told."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from mindspeed_mem import parallel
from tests.parallel_models import MODELS, compared, full, trained
from tests.worlds import on_ranks

pytestmark = pytest.mark.distributed
MESHES = [{"dp": 2}, {"tp": 2}, {"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}]


def ranks_of(shape):
    size = 1
    for one in shape.values():
        size *= one
    return size


def counted(comm):
    """The totals of CommDebugMode by our names."""
    names = {
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "all_reduce": "all_reduce",
        "all_to_all_single": "all_to_all",
        "shard_dim_alltoall": "all_to_all",
    }
    found = {}
    for key, times in comm.get_comm_counts().items():
        name = names[str(key).split(".")[-1]]
        found[name] = found.get(name, 0) + times
    return found


# ---- the original description's pair of MatMuls


def pair(size, first_strategy, second_strategy):
    mesh = parallel.mesh("cpu", mp=size)
    torch.manual_seed(0)
    leaves = [torch.randn(*shape, dtype=torch.float64) for shape in ((8, 16), (16, 32), (32, 8))]
    x, w1, w2 = plain = [one.clone().requires_grad_() for one in leaves]
    wanted = (x @ w1) @ w2
    wanted.square().sum().backward()
    first = parallel.shard(torch.matmul, first_strategy, name="first")
    second = parallel.shard(torch.matmul, second_strategy, name="second")
    mine = [distribute_tensor(one, mesh).requires_grad_() for one in leaves]
    with parallel.recording() as report, CommDebugMode() as comm:
        y = second(first(mine[0], mine[1]), mine[2])
        y.square().sum().backward()
    errors = [float((full(one) - two).abs().max()) for one, two in [(y, wanted), *zip(mine, plain, strict=True)][:1]]
    errors += [float((full(one.grad) - two.grad).abs().max() / two.grad.abs().max()) for one, two in zip(mine, plain)]
    return max(errors), report, counted(comm)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", ["names", "numbers", "Layout"])
def test_the_pair_of_matmuls(size, form):
    """Rows of the first, columns of the second: the whole is gathered in between, and nothing else is."""
    layout = parallel.Layout((size,), ("mp",))
    strategies = {
        "names": ((("mp", None), (None, None)), ((None, None), (None, "mp"))),
        "numbers": (((size, 1), (1, 1)), ((1, 1), (1, size))),
        "Layout": (
            (layout("mp", "None"), layout("None", "None")),
            (layout("None", "None"), layout("None", "mp")),
        ),
    }
    for error, report, counts in on_ranks(size, pair, size, *strategies[form]):
        assert error < 1e-12
        forward = [move for move in report.moves if not move.backward and move.collectives]
        (gathered,) = forward
        part = 8 // size * 32 * 8  # bytes of a rank's rows
        assert gathered[1:5] == ("second, input 0", (8, 32), "mp:0", "whole") and gathered.asked
        assert gathered.collectives == (("all_gather", "mp", part * (size - 1)),)
        assert report.totals() == counts == {"all_gather": 3, "reduce_scatter": 1, "all_reduce": 1}
        back = next(move for move in report.moves if move.source == "mp:sum" and move.target == "mp:0")
        assert back.backward and back.operator == "second, input 0"


# ---- models


def against_one_device(kind, shape, dtype, steps=5):
    with CommDebugMode() as comm:
        mesh = parallel.mesh("cpu", **shape)
        found = compared(kind, mesh, MODELS[kind][2](shape), dtype, 0)
        comm.comm_counts.clear()
        found = compared(kind, mesh, MODELS[kind][2](shape), dtype, steps)
    return found


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("kind", ["resnet", "gpt"])
def test_training_is_that_of_one_device(kind, shape):
    mesh = {**shape}
    for found in on_ranks(ranks_of(shape), differences, kind, mesh, torch.float64):
        assert found["loss"] < 1e-12 and found["tensors"] < 1e-12 and found["learned"] > 0.01, found


@pytest.mark.parametrize("kind", ["resnet", "gpt"])
def test_training_in_fp32(kind):
    for found in on_ranks(4, differences, kind, {"dp": 2, "tp": 2}, torch.float32):
        assert found["loss"] < 1e-6 and found["tensors"] < 1e-6, found

"""Split models beside the rest: the modes of the docs, gradient accumulation, checkpoints that other meshes load, what
is refused by name."""

import contextlib
import io
import os
import re
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from mindspeed_mem import parallel
from mindspeed_mem.gemini import GeminiDDP
from mindspeed_mem.optimizer_parallel import parallelize
from tests.worlds import on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.needs_torch("2.13", "DTensor's rules")]
PLAN = {
    "": {"in_strategy": (("dp", None),)},
    "0": {"parameter_plan": {"weight": ("tp", None), "bias": ("tp",)}},
    "2": {"parameter_plan": {"weight": (None, "tp")}},
}


PAGE = Path(__file__).parents[2] / "docs/parallel.md"


def modes(program, port):
    """What the program of the docs prints on the first of these ranks, each of which starts it as torchrun does."""
    torch.distributed.destroy_process_group()
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, {})
    return printed.getvalue()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_the_modes_of_the_docs_have_one_devices_loss_and_send_what_is_said(size):
    program = re.search(r"^```python\n(# modes.py\n.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1]
    model, batches = plainly(program)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    printed, *others = on_ranks(size, modes, program, port)
    assert re.findall(r"^(\w+): loss (.*)$", printed, re.MULTILINE) == [
        (mode, f"{loss:.4f}") for mode in ("data", "semi_automatic", "automatic", "hybrid")
    ]
    assert not any(others) and "outside the model" not in printed
    data, semi_automatic, automatic, hybrid = (totals(one) for one in printed.split("in all: ")[1:])
    assert hybrid["tp"] > semi_automatic["tp"] and "tp" not in data and "tp" not in automatic
    if size == 4:
        assert data["dp"] > semi_automatic["dp"] == hybrid["dp"] > automatic["dp"]


def plainly(program):
    """Model and batches of the program, on one device."""
    made = {}
    exec(program.partition("torch.distributed.init_process_group()")[0], made)
    torch.manual_seed(0)
    return made["MLP"](), [torch.randn(8, 16) for _ in range(3)]


def totals(text):
    """Bytes that a rank sent, by axis."""
    found = re.findall(r"(dp|tp) (\d+)", text.partition("bytes sent per rank: ")[2].partition("\n")[0])
    return {axis: int(sent) for axis, sent in found}


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()


def split(**axes):
    return parallel.semi_auto(built(), parallel.mesh("cpu", **axes), PLAN)


def train(model, steps, optimizer=None):
    """Each step in two parts."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-2)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.randn(8, 8, generator=generator, dtype=torch.float64)).square().mean().div(2).backward()
        optimizer.step()
    return optimizer


def whole(model):
    tensors = (getattr(one, "full_tensor", lambda one=one: one)() for one in model.parameters())
    return [one.detach() for one in tensors]


def saved(folder, axes):
    model = split(**axes)
    optimizer = train(model, range(3))
    parameters, states = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": states}, checkpoint_id=folder)
    return whole(model)


def resumed(folder, axes):
    model = split(**axes)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    parameters, states = get_state_dict(model, optimizer)
    held = {"model": parameters, "optimizer": states}
    dcp.load(held, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
    train(model, range(3, 5), optimizer)
    return whole(model)


def test_a_checkpoint_goes_on_on_another_mesh(tmp_path):
    alone = built()
    optimizer = train(alone, range(3))
    for one, two in zip(on_ranks(2, saved, str(tmp_path), {"dp": 1, "tp": 2})[0], whole(alone), strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-12)
    train(alone, range(3, 5), optimizer)
    for rank in on_ranks(4, resumed, str(tmp_path), {"dp": 2, "tp": 2}):
        for one, two in zip(rank, whole(alone), strict=True):
            assert torch.allclose(one, two, rtol=0, atol=1e-12)


@torch._dynamo.config.patch(disable=False)  # which ranks on a CPU set, as they leave out torch.compile
def compiled(how):
    """Parameters after three steps of a split model that is compiled, and of one that is not."""
    found, again = [], {**PLAN, "0": {**PLAN["0"], "recompute": True}}
    for change in (lambda model: model, how):
        torch._dynamo.reset()
        model = parallel.semi_auto(built(), parallel.mesh("cpu", dp=1, tp=2), again)
        train(change(model), range(3))
        found.append(whole(model))
    torch._dynamo.reset()
    return all(map(torch.equal, *found))


def as_one(model):
    return torch._dynamo.optimize("eager")(model)


def in_parts(model):
    for number, part in enumerate(model):
        model[number] = as_one(part)
    return model


@pytest.mark.parametrize("how", [as_one, in_parts])
def test_a_split_model_may_be_compiled(how):
    assert all(on_ranks(2, compiled, how))


def shared(axes, modes):
    """How far off parameters are with optimizer parallelism over dp, after going on from its own state dict, too."""
    alone, found = built(), {}
    optimizer = train(alone, range(3))
    train(alone, range(3, 5), optimizer)
    for mode in modes:
        model = split(**axes)
        mesh = parallel.mesh("cpu", **axes)
        optimizer = parallelize(torch.optim.AdamW(model.parameters(), 1e-2), mesh.get_group("dp"), mode)
        train(model, range(3), optimizer)
        states = optimizer.state_dict()
        plain, again = (torch.optim.AdamW(model.parameters(), 1e-2) for _ in range(2))
        plain.load_state_dict(states)
        optimizer = parallelize(again, mesh.get_group("dp"), modes[0])
        optimizer.load_state_dict(states)
        train(model, range(3, 5), optimizer)
        held = sum(v.numel() for s in optimizer.state.values() for v in s.values() if v.dim())
        pairs = zip(whole(model), whole(alone), strict=True)
        worst = max(float((one - two).abs().max()) for one, two in pairs)
        found[mode] = worst, held, {type(v).__name__ for s in plain.state.values() for v in s.values() if v.dim()}
    return found


def test_optimizers_in_parallel_over_what_is_whole():
    ranks = on_ranks(4, shared, {"dp": 2, "tp": 2}, ["sharding", "grouping"])
    for rank in ranks:
        for mode, (worst, _, kinds) in rank.items():
            assert worst < 1e-12 and kinds == {"DTensor"}, mode
    elements = 2 * (8 * 16 + 16 + 16 * 8 + 2 * 8)  # of each state; the last bias is whole on both tp ranks
    assert sum(rank["sharding"][1] for rank in ranks) == elements


def refused():
    model, found = split(dp=1, tp=2), []
    for make in (
        lambda: parallelize(torch.optim.AdamW(model.parameters()), None, "sharding"),
        lambda: GeminiDDP(model, torch.device("cpu")),
    ):
        try:
            make()
            found.append("nothing")
        except ValueError as error:
            found.append(str(error))
    return found


def test_what_cannot_be_says_so():
    for parallel_optimizer, chunks in on_ranks(2, refused):
        assert "of shape (16, 8) is split over the mesh axis 'tp', whose ranks are in" in parallel_optimizer
        assert "0.weight and 3 other parameters are DTensors (semi_auto, FSDP2)" in chunks


def trained(others):
    for _ in range(others):
        torch.distributed.new_group()
    model = split(dp=2, tp=2)
    train(model, range(2))
    return whole(model)


def test_groups_that_are_gone_are_forgotten():
    """The same processes, with groups of their own for each case, which go by other names."""
    alone = built()
    train(alone, range(2))
    for others in (3, 0):
        for one, two in zip(on_ranks(4, trained, others)[0], whole(alone), strict=True):
            assert torch.allclose(one, two, rtol=0, atol=1e-12)

"""Split models beside the rest: gradient accumulation, checkpoints that other meshes load, what is refused by name."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from mindspeed_mem import parallel
from mindspeed_mem.gemini import GeminiDDP
from mindspeed_mem.optimizer_parallel import parallelize
from tests.worlds import on_ranks

pytestmark = pytest.mark.distributed
PLAN = {
    "": {"in_strategy": (("dp", None),)},
    "0": {"parameter_plan": {"weight": ("tp", None), "bias": ("tp",)}},
    "2": {"parameter_plan": {"weight": (None, "tp")}},
}


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


def refused():
    model, found = split(dp=2, tp=1), []
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


def test_what_takes_plain_parameters_says_so():
    for parallel_optimizer, chunks in on_ranks(2, refused):
        assert "parameters are DTensors (semi_auto, FSDP2)" in parallel_optimizer
        assert "0.weight and 3 other parameters are DTensors (semi_auto, FSDP2)" in chunks

"""Modules that several layers share are operators of the layer that runs."""

import copy
import inspect
from types import MethodType

import pytest
from torch import nn

import mindspeed_mem
from tests.attachment.plain_models import PLANS, Net, accumulated, at_once, loss_of, results, same


class Sharing(Net):
    def __init__(self):
        super().__init__()
        for block in self.blocks[1:]:
            block.fc1, block.norm = self.blocks[0].fc1, self.blocks[0].norm


def swaps(layer):
    entry = {"op_name": "fc1", "backward_prefetch": 1, "layers": [layer]}
    return {"swap_config": {"swap": True, "smallest_bytes": 0, "op_swap": [entry]}}


def recomputes(layer):
    return {"swap_config": {"swap": True, "op_swap": []}, "recompute_config": {"select_recompute": {"norm": [layer]}}}


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("plan", [swaps, recomputes])
def test_the_layer_that_runs_decides(plan, layer, caplog):
    model = Sharing()
    plain = results(copy.deepcopy(model), accumulated)
    with mindspeed_mem.attach(model, plan(layer)) as attached:
        assert same(results(model, accumulated), plain)
        figures = attached.engine.report()
        found = (*figures.moved_by_operator, *figures.recomputed_by_operator)
        assert {(one.layer, one.op) for one in found} == {(layer, "fc1" if plan is swaps else "norm")}
    assert "share" not in caplog.text
    assert not any(name.startswith("_mindspeed") for one in model.modules() for name in vars(one))


def test_what_is_asked_of_it_is_asked_in_all_layers():
    model = Sharing()
    plain = results(copy.deepcopy(model), accumulated)
    with mindspeed_mem.attach(model, None) as attached:
        model.blocks[0].fc1.swap()
        assert same(results(model, accumulated), plain)
        found = attached.engine.report().moved_by_operator
        assert {(one.layer, one.op) for one in found} == {(layer, "fc1") for layer in range(3)}


@pytest.mark.parametrize("survive", [True, False])
@pytest.mark.parametrize("plan", PLANS)
def test_bits(plan, survive):
    model = Sharing()
    plain = results(copy.deepcopy(model), at_once)
    with mindspeed_mem.attach(model, PLANS[plan], survive=survive) as attached:

        def step(model):
            with attached.step():
                return at_once(model)

        assert same(results(model, step), plain)


def test_other_names_are_said(caplog):
    model = Net()
    model.blocks[0].fc1 = model.blocks[1].other = nn.Linear(16, 64)
    with mindspeed_mem.attach(model, None):
        loss_of(model).backward()
    (line,) = [one.getMessage() for one in caplog.records if "share" in one.getMessage()]
    assert line.startswith(
        "layers 0, 1 share a Linear under different names: in all of them it counts as operator other"
    )


def test_a_model_that_is_a_layer_and_has_a_forward_of_its_own():
    """It is gone around twice."""
    model = nn.Sequential(nn.Linear(4, 4))

    def forward(self, given, extra=None):
        return self[0](given)

    model.forward = MethodType(forward, model)
    before = inspect.signature(model.forward)
    with mindspeed_mem.attach(model, None):
        assert inspect.signature(model.forward) == before
    assert model.forward.__func__ is forward

"""module.recompute() and module.swap(): before or after the model is attached, with a plan and without."""

import copy
import gc

import pytest
from torch import nn

import mindspeed_mem
from mindspeed_mem.activation.storage.ledger import LEDGER
from tests.attachment.plain_models import MIXED, SWAP, Net, accumulated, results, same


def ask(model):
    mindspeed_mem.recompute(model.blocks[0])
    model.blocks[1].fc1.recompute()
    mindspeed_mem.swap(model.blocks[1].drop, ahead=2)
    mindspeed_mem.swap(model.blocks[2])


def what(attached):
    """The layers and operators that were made again, and those that were moved."""
    figures = attached.engine.report()
    of = [figures.recomputed_by_operator, figures.moved_by_operator]
    return [{(one.layer, one.op) for one in found} for found in of]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("plan", [None, MIXED])
def test_single_modules(first, plan):
    model = Net(width=64)
    plain = results(copy.deepcopy(model), accumulated)
    if first:
        ask(model)
    with mindspeed_mem.attach(model, plan) as attached:
        if not first:
            ask(model)
        assert same(results(model, accumulated), plain)
        again, moved = what(attached)
        assert {(0, ""), (1, "fc1")} <= again and {(1, "drop"), (2, "fc1")} <= moved
        assert plan is not None or all(layer != 2 for layer, _ in again)
        model.blocks[0].recompute(active=False)
        mindspeed_mem.swap(model.blocks[2], None)
        model.blocks[1].recompute(active=False)  # it never did
        before = attached.engine.report().moved_by_operator
        plain = results(copy.deepcopy(model), accumulated)
        assert same(results(model, accumulated), plain)
        after = attached.engine.report().moved_by_operator
        assert plan or {one for one in before if one.layer == 2} == {one for one in after if one.layer == 2}
    gc.collect()
    assert LEDGER.held.now == 0


def test_recompute_goes_on_without_the_engine():
    model = Net()
    ran = []

    class Counted(nn.GELU):
        def forward(self, x):
            ran.append(True)
            return super().forward(x)

    model.blocks[0].act = Counted()

    def runs():
        ran.clear()
        accumulated(model)
        return len(ran)

    assert runs() == 2
    model.blocks[0].recompute()
    assert runs() == 4
    with mindspeed_mem.attach(model, None) as attached:
        assert runs() == 2  # of a second run by the engine nobody is told
        assert what(attached)[0] == {(0, "")}
        model.blocks[0].recompute(active=False)
        assert runs() == 2
        assert sum(one.runs for one in attached.engine.report().recomputed_by_operator) == 2
        model.blocks[0].recompute()
    assert runs() == 4
    model.blocks[0].recompute(active=False)
    assert runs() == 2 and "forward" not in vars(model.blocks[0])


def test_what_cannot_be_asked_is_refused():
    model = Net()
    with pytest.raises(ValueError, match="a whole number from 1 on"):
        model.blocks[0].swap(0)
    with pytest.raises(ValueError, match="active: got 5"):
        model.blocks[0].recompute(5)
    for ask in (mindspeed_mem.recompute, mindspeed_mem.swap):
        with pytest.raises(ValueError, match=r"\(\): got a list; allowed: a torch.nn.Module"):
            ask([model])
    model.blocks[0].fc1.swap()
    with pytest.raises(ValueError, match=r"decides itself about blocks.0.fc1.swap\(\)"):
        mindspeed_mem.attach(model, "auto", device_memory_gib=1)
    with mindspeed_mem.attach(model, SWAP) as attached:
        assert 0 in attached.engine.in_force.the_plan.layers_touched()

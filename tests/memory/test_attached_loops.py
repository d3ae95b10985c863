"""attach(model, "auto") on loops and models of other shapes: a plan is found, every bit the same, or it says why."""

import contextlib
import copy
import dataclasses
import logging
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mindspeed_mem
from tests.attachment.plain_models import TEXT, Net, loss_of, same

pytestmark = pytest.mark.usefixtures("limited_memory")

USUAL = TEXT.repeat(4, 4)


@dataclasses.dataclass
class Output:
    """As models return it; one refers to itself."""

    logits: torch.Tensor
    whole: Any = None


class Shaped(Net):
    """Takes and returns what ``takes`` and ``returns`` make of it."""

    takes, returns = staticmethod(lambda given: given), staticmethod(lambda found: found)

    def forward(self, given):
        return self.returns(super().forward(self.takes(given)))


def of_itself(logits):
    found = Output(logits)
    found.whole = [found, {"found": found}]
    return found


RETURNS = {
    "dataclass": (of_itself, lambda found: found.whole[0].logits),
    "unused first": (lambda found: {"loss": found.square().mean(), "logits": found}, lambda found: found["logits"]),
    "unknown": (lambda found: types.SimpleNamespace(logits=found), lambda found: found.logits),
}


def usual(model, get=lambda found: found, text=USUAL, run=lambda model, text: model(text)):
    text = text.clone()  # nobody else's: what is counted as held goes with it
    loss = functional.cross_entropy(get(run(model, text[:, :-1])).flatten(0, 1), text[:, 1:].flatten())
    loss.backward()
    return loss


def plainly(model, get=lambda found: found, run=lambda model, text: model(text)):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        loss = usual(model, get, run=run)
        optimizer.step()
        return loss

    return step


def in_backward(model):
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return lambda: usual(model)


def optimizer_first(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.step()
        optimizer.zero_grad()
        return usual(model)

    return step


def with_closure(model):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def closure():
        optimizer.zero_grad()
        return usual(model)

    return lambda: optimizer.step(closure)


def losses_and_weights(model, loop, steps, attached=None):
    torch.manual_seed(3)
    step, found = loop(model), []
    for _ in range(steps):
        with contextlib.nullcontext() if attached is None else attached.step():
            found.append(step().detach().clone())
    return [*found, *(one.detach().clone() for one in model.parameters())]


def settles(model, loop, steps=16):
    """The state in which it ends, bits being the same."""
    expected = losses_and_weights(copy.deepcopy(model), loop, steps)
    with mindspeed_mem.attach(model, "auto", device_memory_gib=0.5) as attached:
        assert same(losses_and_weights(model, loop, steps, attached), expected)
        return attached.engine.adaptation.state


@pytest.mark.parametrize("kind", RETURNS)
def test_what_a_model_returns(kind):
    torch.manual_seed(0)
    model = Shaped(2, 16)
    returns, get = RETURNS[kind]
    model.returns = returns
    assert settles(model, lambda model: plainly(model, get)) == "settled"


@pytest.mark.parametrize("loop", [in_backward, optimizer_first, with_closure])
def test_where_the_optimizer_steps(loop):
    torch.manual_seed(0)
    assert settles(Net(2, 16), loop) == "settled"


def test_what_is_never_seen_ends_the_search(caplog):
    """A model that runs as a whole under a checkpoint."""

    def run(model, text):
        return checkpoint(model, text, use_reentrant=False)

    torch.manual_seed(0)
    assert settles(Net(2, 16), lambda model: plainly(model, run=run)) == "off"
    assert caplog.text.count("no backward of the model was seen") == 1
    assert "stops planning: 10 training steps" in caplog.text


def steps_of(model, attached, sizes):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for size in sizes:
        with attached.step():
            text = TEXT.repeat(size, 4)
            logits = model({"batch": Output(text[:, :-1])})
            functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_inputs_within_others(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    file = tmp_path / "plan.yaml"

    def state(sizes):
        model = Shaped(2, 16)
        model.takes = lambda given: given["batch"].logits
        with mindspeed_mem.attach(model, "auto", device_memory_gib=0.5, adaptive_plan_file=file) as attached:
            steps_of(model, attached, sizes)
            return attached.engine.adaptation.state

    assert state([1] * 4 + [16] * 14) == "settled" and caplog.text.count("profiling again") == 1
    assert state([16] * 2) == "settled" and "is used: it was made for the same job" in caplog.text
    assert state([64] * 3) == "profile" and "micro_batch_size was 64 and is 256" in caplog.text


def test_inputs_that_cannot_be_seen(tmp_path, caplog):
    file = tmp_path / "plan.yaml"
    for _ in range(2):
        caplog.clear()
        model = Shaped(2, 16)
        model.takes = lambda given: given.text
        loop = plainly(model, run=lambda model, text: model(types.SimpleNamespace(text=text)))
        with mindspeed_mem.attach(model, "auto", device_memory_gib=0.5, adaptive_plan_file=file) as attached:
            for number in range(14):
                with attached.step():
                    loop()
                assert attached.engine.adaptation.state != "settled" or number > 4
            assert attached.engine.adaptation.state == "settled" and not file.exists()
        assert caplog.text.count("finds no tensor in what the model is given") == 1


def test_a_step_ends_with_its_last_optimizer():
    torch.manual_seed(0)
    model = Net(2, 16)
    some = list(model.parameters())
    first, second = torch.optim.SGD(some[:4], lr=0.1), torch.optim.SGD(some[4:], lr=0.1)
    profiled = []
    with mindspeed_mem.attach(model, "auto", device_memory_gib=0.5) as attached:
        for _ in range(16):
            with attached.step():
                for optimizer, text in ((first, TEXT), (second, TEXT.repeat(8, 4))):
                    loss_of(model, text.clone()).backward()
                    optimizer.step()
                    model.zero_grad()
            profiler = attached.engine.observation.profiler
            if profiler is not None and profiler.done:
                profiled = [one.direction for one in profiler.passes]
        assert attached.engine.adaptation.state == "settled"
    assert profiled[:4] == ["forward", "backward"] * 2


def test_evaluations_in_steps_are_not_profiled():
    model = Net(2, 16)
    step = plainly(model)
    with mindspeed_mem.attach(model, "auto", device_memory_gib=0.5) as attached:
        for number in range(34):
            with attached.step(), torch.set_grad_enabled(not 3 < number < 17):
                model(TEXT) if 3 < number < 17 else step()
        assert attached.engine.adaptation.state == "settled"


def test_what_a_model_only_hands_on_does_not_begin_its_backward():
    """The same input in all forwards, whose own backward comes last."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    text = torch.ones(2, 4, requires_grad=True)

    class HandsOn(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, given):
            return given, self.layers(given)

    shared, whole, reached = text * 2, HandsOn(), []
    with mindspeed_mem.attach(whole, {"recompute_config": {"recompute": True}}) as attached:
        begins = attached.engine.passes._backward_alone
        attached.engine.passes._backward_alone = lambda one: (reached.append(one), begins(one))
        for _ in range(3):
            whole(shared)[1].sum().backward(retain_graph=True)
    assert len(reached) == 3

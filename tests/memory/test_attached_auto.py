"""attach(model, "auto"): a plan is found while a plain model trains, with every bit the same."""

import contextlib
import copy
import gc
import logging

import pytest
import torch
from torch import nn

import mindspeed_mem
from mindspeed_mem.adaptive.run import adaptation
from mindspeed_mem.adaptive.run.planner import Planner
from mindspeed_mem.device.link_speed import measure_link
from tests.attachment.plain_models import TEXT, Net, loss_of, same
from tests.limited_runs import counted
from tests.worlds import on_ranks

pytestmark = pytest.mark.usefixtures("limited_memory")


USUAL = TEXT.repeat(8, 4)


class Training:
    """A model and its optimizer; a step has two micro-batches."""

    def __init__(self, model):
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters())
        torch.manual_seed(5)

    def step(self, attached=None, text=USUAL):
        self.optimizer.zero_grad()
        with contextlib.nullcontext() if attached is None else attached.step():
            losses = []
            for part in text.clone().chunk(2):
                losses.append(loss_of(self.model, part))
                losses[-1].backward()
            found = [one.detach().clone() for one in (*losses, *(one.grad for one in self.model.parameters()))]
            self.optimizer.step()
        return found


def expected_of(model, memory, steps):
    """What steps without a plan compute, and the bytes that such a job takes."""
    plain = Training(copy.deepcopy(model))
    found = [plain.step() for _ in range(steps - 1)]
    gc.collect()
    memory.reset_peak()
    found.append(plain.step())
    return found, memory.peak


def settled_within(attached, training, expected):
    """After how many steps a plan was settled on."""
    state, number = attached.engine.adaptation, None
    for count, found in enumerate(expected, 1):
        assert same(training.step(attached), found)
        if state.state == "settled" and number is None:
            number = count
    return number


@pytest.mark.host
def test_a_plan_is_found_and_kept(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    torch.manual_seed(0)
    model, kept = Net(3, 24), tmp_path / "plan.yaml"
    start = copy.deepcopy(model)
    with counted() as memory:
        expected, peak = expected_of(model, memory, 18)
        limit = 0.85 * peak / 2**30
        with mindspeed_mem.attach(model, "auto", device_memory_gib=limit, adaptive_plan_file=kept) as attached:
            assert settled_within(attached, Training(model), expected)
            evicted = attached.engine.mover.evicted_bytes
            figures = attached.engine.report()
            assert evicted and (figures.bytes_out > evicted or figures.recomputed_bytes)
            assert "settled on plan" in caplog.text and "adaptive memory plan (settled)" in attached.report()
        assert "attach's plan='auto'" in kept.read_text()
        del model, attached
        with mindspeed_mem.attach(start, "auto", device_memory_gib=limit, adaptive_plan_file=kept) as attached:
            assert settled_within(attached, Training(start), expected[:3]) == 2


@pytest.mark.parametrize("checkpointed", [None, False, True])
def test_where_checkpoints_of_the_model_leave_nothing_to_plan_is_told(checkpointed, caplog):
    caplog.set_level(logging.INFO)
    training = Training(Net(3, 16, checkpointed=checkpointed))
    with mindspeed_mem.attach(training.model, "auto", device_memory_gib=0.5) as attached:
        for _ in range(15):
            training.step(attached)
        assert attached.engine.adaptation.state == "settled"
        warned = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
        for text in ("".join(warned), attached.report()):
            assert ("there is nothing to plan in layers 0-2" in text) == (checkpointed is not None)


def test_larger_inputs_are_planned_for_again(caplog):
    caplog.set_level(logging.INFO)
    model = Net(2, 16)
    plain, texts = Training(copy.deepcopy(model)), [TEXT.repeat(2, 4)] * 3 + [TEXT.repeat(8, 8)] * 14
    expected = [plain.step(text=text) for text in texts]
    with mindspeed_mem.attach(model, "auto", device_memory_gib=0.5) as attached:
        mine = Training(model)
        assert all(same(mine.step(attached, text), found) for text, found in zip(texts, expected, strict=True))
        assert attached.engine.adaptation.state == "settled"
    assert caplog.text.count("profiling again") == 1


def test_steps_with_shorter_inputs_are_no_part_of_what_is_measured(caplog):
    caplog.set_level(logging.INFO)
    torch.manual_seed(0)
    model, short = Net(4, 24), TEXT.repeat(2, 4)
    texts = [USUAL] * 2 + [short] * 3 + [USUAL, short] * 12
    with counted() as memory:
        plain = Training(copy.deepcopy(model))
        expected = [plain.step(text=text) for text in texts]
        gc.collect()
        memory.reset_peak()
        plain.step()
        peak = memory.peak
        del plain
        with mindspeed_mem.attach(model, "auto", device_memory_gib=0.8 * peak / 2**30) as attached:
            mine = Training(model)
            for text, found in zip(texts, expected, strict=True):
                assert same(mine.step(attached, text), found)
            assert attached.engine.adaptation.state == "settled"
    assert "evicted beyond the plan" not in caplog.text


def test_what_a_step_ran_before_it_was_tried_again_is_no_part_of_it(caplog):
    def step(training, attached):
        calls.clear()
        return training.step(attached)

    def fail_once(*_):
        calls.append(None)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    class Again(Training):
        def step(self, attached=None):
            self.optimizer.zero_grad()
            return super().step() if attached is None else attached.run_step(super().step)

    caplog.set_level(logging.INFO)
    model, calls = Net(2, 16), []
    plain = Again(copy.deepcopy(model))
    expected = [plain.step() for _ in range(9)]
    model.blocks[1].register_forward_hook(fail_once)
    with mindspeed_mem.attach(model, "auto", device_memory_gib=0.5) as attached:
        mine = Again(model)
        for number, found in enumerate(expected, 1):
            assert same(step(mine, attached), found)
            if number == 5:
                assert len(attached.engine.observation.profiler.passes) in (4, 8)  # of one step, or of two
        assert attached.engine.adaptation.planner.problem.pipeline.micro_batches == 2
    assert "the allocator had to give back memory and retry" in caplog.text
    assert caplog.text.count("tried again with all activations swapped") == 9


@pytest.mark.parametrize(
    ("make", "arguments", "expected"),
    [
        pytest.param(Net, {}, "device_memory_gib: got None", marks=pytest.mark.host),
        (lambda: nn.ModuleList([Net(), Net()]), {"device_memory_gib": 0.5}, "whose models run one by one"),
        (Net, {"plan": None, "adaptive_plan_file": "plan.yaml"}, "allowed with plan='auto' only"),
    ],
)
def test_what_cannot_be_planned_is_refused(make, arguments, expected):
    with pytest.raises(ValueError, match="problem") as caught:
        mindspeed_mem.attach(make(), **{"plan": "auto", **arguments})
    assert expected in str(caught.value)


@pytest.mark.needs_torch("2.7", "a compiled layer runs its parts")
def test_a_layer_that_cannot_be_seen_between_others_ends_the_search(caplog):
    model = Net(3, 16)
    with mindspeed_mem.attach(model, "auto", device_memory_gib=0.5) as attached:
        model.blocks[1].compile(backend="eager")
        mine = Training(model)
        for _ in range(12):
            mine.step(attached)
        assert attached.engine.adaptation.state == "off"
    assert "layer 1 did not run in a step, or nothing inside could be seen" in caplog.text
    assert not any(record.exc_info for record in caplog.records)


def test_a_fault_of_the_planner_shows_where_it_is(caplog, monkeypatch):
    model = Net(2, 16)
    monkeypatch.setattr(Planner, "start", lambda self: max([]))
    with mindspeed_mem.attach(model, "auto", device_memory_gib=0.5) as attached:
        mine = Training(model)
        for _ in range(6):
            mine.step(attached)
        assert attached.engine.adaptation.state == "off"
    [record] = [one for one in caplog.records if "planning failed: max()" in one.getMessage() and one.exc_info]
    assert record.exc_info[0] is ValueError


def test_an_interrupted_search_is_made_again(monkeypatch):
    """Ctrl-C in a notebook, and on."""

    def interrupted(planner):
        monkeypatch.undo()
        raise KeyboardInterrupt

    model = Net(2, 16)
    expected = [Training(copy.deepcopy(model)).step()]
    monkeypatch.setattr(Planner, "start", interrupted)
    with mindspeed_mem.attach(model, "auto", device_memory_gib=0.5) as attached:
        mine = Training(model)
        assert same(mine.step(attached), expected[0])
        for _ in range(4):
            mine.step(attached)
        with pytest.raises(KeyboardInterrupt):
            mine.step(attached)
        for _ in range(4):
            mine.step(attached)
        assert attached.engine.adaptation.state == "settled"


class Mixer(nn.Module):
    """A layer of another kind, none of whose operators has a name of the blocks'."""

    def __init__(self, width):
        super().__init__()
        self.scale, self.into, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.out(self.into(self.scale(x)).cumsum(1).tanh())


@pytest.mark.host
def test_kinds_of_layers_that_alternate(caplog):
    """The first layer is of a class whose others come after a layer of another kind, with what that made as input."""
    caplog.set_level(logging.INFO)
    torch.manual_seed(0)
    model = Net(4, 24)
    model.blocks[1], model.blocks[3] = Mixer(24), Mixer(24)
    model.blocks.insert(0, Mixer(24))
    with counted() as memory:
        expected, peak = expected_of(model, memory, 18)
        with mindspeed_mem.attach(model, "auto", device_memory_gib=0.85 * peak / 2**30) as attached:
            assert settled_within(attached, Training(model), expected)
    assert "planning failed" not in caplog.text


class Skipping(Net):
    """A layer that not every step has."""

    skipped: int | None = None

    def forward(self, text):
        x = self.embedding(text)
        for number, block in enumerate(self.blocks):
            x = x if number == self.skipped else block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_layer_that_does_not_always_run(caplog, step):
    model = Skipping(3, 16)
    with mindspeed_mem.attach(model, "auto", device_memory_gib=0.5) as attached:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(18):
            model.skipped = 1 if number == step else None
            with attached.step():
                model(TEXT.clone()).square().mean().backward()
                optimizer.step()
            optimizer.zero_grad()
        state = attached.engine.adaptation.state
    assert state == "settled" and "planning failed" not in caplog.text


@pytest.mark.needs_torch("2.7", "a compiled layer runs its parts")
def test_what_cannot_be_seen_is_left_as_it_is(caplog):
    """Layers that are compiled as a whole after it, and steps that nobody tells of."""
    model = Net(2, 16)
    expected = [Training(copy.deepcopy(model)).step()]
    with mindspeed_mem.attach(model, "auto", device_memory_gib=0.5) as attached:
        for block in model.blocks:
            block.compile(backend="eager")
        loss_of(model).backward()
        model.zero_grad()
        mine = Training(model)
        assert same(mine.step(attached), expected[0])
        for _ in range(6):
            mine.step(attached)
        assert attached.engine.adaptation.state == "off"
    assert caplog.text.count("no effect on steps outside") == 1
    assert "attach's plan='auto' stops planning" in caplog.text


def on_a_slow_link(backend):
    """What a device's link would measure that is so many times as slow."""
    found = measure_link(backend)
    return found._replace(**{name: 1e-3 * getattr(found, name) for name in ("out", "back", "out_alone", "back_alone")})


@pytest.mark.needs_torch("2.7", "nothing of a compiled layer can leave")
@pytest.mark.parametrize("link", [measure_link, on_a_slow_link], ids=["swapped", "recomputed"])
def test_compiled_layers_are_planned_for_as_a_whole(link, monkeypatch):
    monkeypatch.setattr(adaptation, "measure_link", link)
    torch.manual_seed(0)
    model = Net(4, 24)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    with counted() as memory:
        expected, peak = expected_of(model, memory, 18)
        with mindspeed_mem.attach(model, "auto", device_memory_gib=0.85 * peak / 2**30) as attached:
            assert settled_within(attached, Training(model), expected)
            figures = attached.engine.report()
            if link is measure_link:
                assert figures.bytes_out > attached.engine.mover.evicted_bytes
            else:
                assert figures.recomputed_bytes and not attached.engine.in_force.config.swap.op_swap


class Gate(nn.Module):
    """A third of what its backward keeps is what the layer before returned."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        y = self.linear(x)
        return torch.tanh(y) + x * y


@pytest.mark.needs_torch("2.7", "nothing of a compiled layer can leave")
def test_plans_for_compiled_layers_count_what_the_next_keeps():
    torch.manual_seed(0)
    model, text = Net(1, 32), torch.arange(32 * 65).view(32, 65) * 7 % 31
    model.blocks = nn.ModuleList(Gate(32) for _ in range(6))
    for block in model.blocks:
        block.compile(backend="aot_eager")
    with counted() as memory:
        plain = Training(copy.deepcopy(model))
        expected = [plain.step(text=text) for _ in range(16)]
        gc.collect()
        floor = memory.allocated
        memory.reset_peak()
        plain.step(text=text)
        limit = floor + 0.75 * (memory.peak - floor)
        del plain
        with mindspeed_mem.attach(model, "auto", device_memory_gib=limit / 2**30) as attached:
            mine = Training(model)
            assert all(same(mine.step(attached, text), found) for found in expected)
            assert attached.engine.adaptation.state == "settled"
            [line] = [one for one in attached.engine.report().adaptive if "(settled)" in one]
            assert "beyond the plan" not in line


def test_of_layers_of_one_operator_nothing_may_be_kept_but_for_the_next():
    torch.manual_seed(0)
    model = Net(1, 24)
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24)) for _ in range(6))
    with counted() as memory:
        expected, peak = expected_of(model, memory, 14)
        with mindspeed_mem.attach(model, "auto", device_memory_gib=0.85 * peak / 2**30) as attached:
            assert settled_within(attached, Training(model), expected)


def on_rank(wrapper, steps):
    """Steps whose bits differ, the state at the end, bytes that left because memory had run out, and what was moved."""
    from tests.attachment.rank_cases import WRAPPERS, local

    torch.manual_seed(1)
    model = Net(3, 32)
    with counted() as memory:
        plain = Training(WRAPPERS[wrapper](copy.deepcopy(model)))
        expected = [local(plain.step()) for _ in range(steps)]
        peak = memory.peak
        del plain
        gc.collect()
        wrapped = WRAPPERS[wrapper](model)
        with mindspeed_mem.attach(wrapped, "auto", device_memory_gib=0.9 * peak / 2**30) as attached:
            mine = Training(wrapped)
            wrong = [number for number, found in enumerate(expected) if not same(local(mine.step(attached)), found)]
            figures = attached.engine.report()
            return wrong, attached.engine.adaptation.state, figures.bytes_out + figures.recomputed_bytes


@pytest.mark.distributed
@pytest.mark.parametrize("wrapper", ["fsdp", pytest.param("ddp", marks=pytest.mark.sweep)])
@pytest.mark.needs_torch("2.7", "FSDP2 does not run on a CPU")
def test_ranks_settle_together(wrapper):
    for wrong, state, moved in on_ranks(2, on_rank, wrapper, 18):
        assert wrong == [] and state == "settled" and moved

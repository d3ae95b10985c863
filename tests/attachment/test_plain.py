"""Plans on plain torch models: the same bits, less memory, and no trace once they are detached."""

import contextvars
import copy
import functools
import gc
import inspect
import logging
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional

import mindspeed_mem
from mindspeed_mem import parallel
from mindspeed_mem.activation.storage.ledger import LEDGER
from mindspeed_mem.plan import MemoryConfigError, load_memory_config
from tests.attachment.plain_models import (
    MIXED,
    PLANS,
    SAVED,
    STEPS,
    SWAP,
    TEXT,
    WHOLE,
    Block,
    Net,
    accumulated,
    loss_of,
    results,
    same,
)

PAGE = Path(__file__).parents[2] / "docs/any-model.md"


def traces(model):
    """What of ours is on a model, on its tensors or on classes."""
    kept = [f"{name}.{key}" for name, one in model.named_modules() for key in vars(one) if "mindspeed_mem" in key]
    kept += [name for name, one in model.named_parameters() if vars(one.untyped_storage())]
    kept += [name for name, one in model.named_modules() if "forward" in vars(one)]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return kept + [name for name, one in model.named_modules() if any(getattr(one, hook) for hook in hooks)]


@pytest.fixture
def attach():
    """Attaches, and detaches at the end."""
    made = []

    def attach(*args, **kwargs):
        made.append(mindspeed_mem.attach(*args, **kwargs))
        return made[-1]

    yield attach
    for one in made:
        one.detach()


CASES = [("swap", "accumulated"), ("mixed", "crossed"), ("whole", "broken"), ("mixed", "twice"), ("parts", "by_parts")]
CASES += [("whole", "of_inputs"), ("saved", "at_once")]
OTHERS = [pytest.param(*one, marks=pytest.mark.sweep) for one in product(PLANS, STEPS) if one not in CASES]


@pytest.mark.parametrize(("plan", "step"), CASES + OTHERS)
def test_bits_are_the_same(plan, step, attach):
    model = Net()
    plain = results(copy.deepcopy(model), STEPS[step])
    attached = attach(model, PLANS[plan])
    assert same(results(model, STEPS[step]), plain)
    gc.collect()
    assert LEDGER.held.now == 0
    figures = attached.engine.report()
    assert figures.bytes_out or figures.recomputed_bytes


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        ("mixed", {"checkpointed": False}),
        ("mixed", {"turns": 2}),
        pytest.param("saved", {"checkpointed": True}, marks=pytest.mark.sweep),
        pytest.param("whole", {"checkpointed": True}, marks=pytest.mark.sweep),
        pytest.param("whole", {"turns": 2}, marks=pytest.mark.sweep),
    ],
)
def test_blocks_that_run_twice_or_under_a_checkpoint(plan, changes, attach):
    model = Net(**changes)
    plain = results(copy.deepcopy(model), accumulated)
    attach(model, PLANS[plan])
    assert same(results(model, accumulated), plain)


class Halved(torch.nn.Module):
    """A block that writes over what it has saved, unseen by autograd, and saves it once more."""

    def __init__(self):
        super().__init__()
        self.one, self.act, self.two = torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16)

    def forward(self, x):
        kept = self.act(self.one(x))
        half = kept.data
        half.mul_(0.5)
        return self.two(half) + kept


@pytest.mark.parametrize("distance", [1, 5])
def test_what_is_saved_again_under_a_counter_of_its_own_leaves_once(distance, attach):
    model = Net()
    model.blocks = torch.nn.ModuleList(Halved() for _ in range(3))
    plain = results(copy.deepcopy(model), accumulated)
    layers = [{"backward_prefetch": distance, "layers": True}]
    attached = attach(model, {"swap_config": {"swap": True, "smallest_bytes": 0, "layer_swap": layers}})
    assert same(results(model, accumulated), plain)
    assert attached.engine.mover.bytes_in and LEDGER.held.now == 0


@pytest.mark.parametrize("plan", ["swap", "whole"])
def test_less_memory_is_held(plan, attach):
    model = Net()
    attach(model, PLANS[plan])
    results(model, accumulated)
    LEDGER.reset_peak()
    results(model, accumulated)
    assert LEDGER.held.peak < 0.6 * LEDGER.without.peak


def test_detach_leaves_no_trace(attach):
    model = Net()
    forward, state = Net.forward, model.state_dict().keys()
    model.norm.forward = own = functools.partial(type(model.norm).forward, model.norm)
    attached = attach(model, MIXED)
    results(model, accumulated)
    assert traces(model) and model.state_dict().keys() == state
    attached.detach()
    assert traces(model) == ["norm"] and Net.forward is forward and vars(model.norm)["forward"] is own
    attached.detach()  # again: nothing


def test_a_model_is_attached_again(attach):
    model = Net()
    plain = results(copy.deepcopy(model), accumulated)
    with mindspeed_mem.attach(model, WHOLE) as attached:
        loss = loss_of(model)
        assert attached.operators[2] == ("act", "drop", "fc1", "fc2", "norm")
    loss.backward()  # what has left comes back
    model.zero_grad()
    attach(model, SWAP)
    assert same(results(model, accumulated), plain)


def test_copies_and_pickles_train_like_it(attach):
    model = Net()
    plain = results(copy.deepcopy(model), accumulated)
    attach(model, SWAP)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(results(other, accumulated), plain)


def test_copies_of_an_attached_model_are_attached(attach):
    model = Net()
    plain = results(copy.deepcopy(model), accumulated)
    attached = attach(model, SWAP)
    other = copy.deepcopy(model)
    attached.detach()
    attach(other, WHOLE).detach()
    assert traces(other) == []
    assert same(results(other, accumulated), plain)


def test_blocks_that_change_places_leave_no_trace(attach):
    model = Net()
    attached = attach(model, SWAP)
    model.blocks.append(copy.deepcopy(model.blocks[0]))
    before, model.blocks[1] = model.blocks[1], Block(16)
    plain = copy.deepcopy(model)
    expected = results(plain, accumulated)
    assert same(results(model, accumulated), expected)
    attached.detach()
    assert traces(model) == traces(before) == []


def test_scripted_parts(attach):
    model = Net()
    plain = results(copy.deepcopy(model), accumulated)
    model.norm, model.blocks[0].fc1 = torch.jit.script(model.norm), torch.jit.script(model.blocks[0].fc1)
    attached = attach(model, SWAP)
    assert same(results(model, accumulated), plain)
    assert "fc1" not in attached.operators[0] and "fc1" in attached.operators[1]


def test_lists_count_on_and_have_names(attach):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = Net(), Net(2)

        def forward(self, text):
            return self.encoder(text) + self.decoder(text)

    plan = {"recompute_config": {"recompute": ["decoder.blocks:1"]}, "swap_config": {"swap": True, "op_swap": []}}
    attached = attach(Two(), plan)
    assert [*attached.operators] == [0, 1, 2, 3, 4]
    results(attached.model, accumulated)
    assert {one.layer for one in attached.engine.report().recomputed_by_operator} == {4}


def test_layers_may_be_named(attach):
    model = Net()
    plain = results(copy.deepcopy(model), accumulated)
    attached = attach(model, SWAP, layers=["embedding", "blocks", "norm"])
    assert same(results(model, accumulated), plain)
    assert [*attached.layers] == ["embedding", "blocks", "norm"] and len(attached.operators) == 5


def test_a_model_without_lists_is_one_layer(attach):
    model = nn.Sequential(nn.Linear(31, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    given = torch.randn(5, 31)

    def step(model):
        loss = model(given).square().sum()
        loss.backward()
        return [loss]

    plain = results(copy.deepcopy(model), step)
    attached = attach(model, {"recompute_config": {"select_recompute": {"1": True}}})
    assert same(results(model, step), plain)
    assert attached.engine.report().recomputed_bytes


def test_all_that_is_wrong_is_said_at_once():
    wrong = {"swap_config": {"swap": True, "op_swap": [{"op_name": "fc3", "backward_prefetch": 1, "layers": [0, 7]}]}}
    model = Net()
    with pytest.raises(MemoryConfigError) as caught:
        mindspeed_mem.attach(model, wrong, host_memory_gib=0)
    text = str(caught.value)
    assert "host_memory_gib: got 0" in text and "got layer 7; allowed: 0 to 2" in text
    assert "'fc3', which matches no operator in layer 0; did you mean" in text and "allowed: norm, fc1, act" in text
    assert traces(model) == []


@pytest.mark.parametrize(
    ("make", "arguments", "expected"),
    [
        (lambda: Net().to("meta"), {}, "it is on meta"),
        (lambda: nn.DataParallel(Net()), {}, "DistributedDataParallel"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), {}, "0.weight and 1 more has no shape yet; run the model once"),
        (Net, {"layers": ["block"]}, "got 'block'; did you mean 'blocks'"),
        (Net, {"layers": ["blocks", "blocks.0"]}, "'blocks.0' is within 'blocks'"),
        (Net, {"layers": "blocks"}, "got 'blocks' (str); allowed: a list"),
        (Net, {"layers": []}, "layers: got []"),
        (Net, {"host_memory_gib": float("inf")}, "host_memory_gib: got inf"),
        (lambda: None, {}, "model: got a NoneType"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), {}, "ScriptModule; allowed: a torch.nn.Module in Python"),
        (Net, {"plan": 5}, "plan: got 5"),
        (Net, {"plan": "Auto"}, "did you mean 'auto'?"),
        (Net, {"plan": {"swap_config": {"swap": True}}}, "say what is to be swapped by layer_swap or op_swap"),
        pytest.param(Net, {"plan": "auto"}, "this device does not say how much memory it has", marks=pytest.mark.host),
        (Net, {"plan": {"swap_config": {"swp": True}}}, "did you mean 'swap'"),
    ],
)
def test_what_cannot_be_attached_is_refused(make, arguments, expected):
    with pytest.raises(ValueError, match="problem") as caught:
        mindspeed_mem.attach(make(), **{"plan": SWAP, **arguments})
    assert expected in str(caught.value)


def test_one_model_at_a_time(attach):
    model = Net()
    attach(model, load_memory_config(SWAP))
    with pytest.raises(ValueError, match="it is attached already"):
        mindspeed_mem.attach(model, SWAP)
    with pytest.raises(ValueError, match="attach an nn.ModuleList of both"):
        mindspeed_mem.attach(Net(), SWAP)


@pytest.mark.parametrize("plan", ["swap", "whole"])
def test_a_model_that_is_gone_is_in_nobodys_way(plan, attach):
    results(mindspeed_mem.attach(Net(), PLANS[plan]).model, accumulated)
    model = Net()
    plain = results(copy.deepcopy(model), accumulated)
    attach(model, SWAP)
    assert same(results(model, accumulated), plain)


def test_two_threads_at_once_are_refused(attach):
    model = Net()
    plain = results(copy.deepcopy(model), accumulated)
    attach(model, SAVED)
    with ThreadPoolExecutor(1) as other:
        inside = model.blocks[1].register_forward_hook(lambda *_: other.submit(loss_of, model).result())
        with pytest.raises(RuntimeError, match="in two threads"):
            loss_of(model)
        inside.remove()
    assert same(results(model, accumulated), plain)


@pytest.mark.parametrize("plan", ["swap", None])
def test_replicas_of_an_attached_model_are_refused(plan, attach):
    """`nn.DataParallel` asks each module for one, as many as there are devices."""
    model = Net()
    attached = attach(model, PLANS.get(plan))
    for part in (model, model.blocks[1], model.blocks[1].fc1, copy.deepcopy(model)):
        with pytest.raises(
            RuntimeError, match="as DataParallel does; use torch's DistributedDataParallel, .* or detach"
        ):
            part._replicate_for_data_parallel()
    attached.detach()
    for part in model.modules():
        assert "_replicate_for_data_parallel" not in vars(part)
        assert part._replicate_for_data_parallel()._is_replica


def test_two_models_in_a_list(attach):
    models = nn.ModuleList([Net(), Net(2)])

    def step(models):
        losses = [loss_of(model) for model in models]
        sum(losses).backward()
        return losses

    plain = results(copy.deepcopy(models), step)
    attached = attach(models, {"recompute_config": {"recompute": True}})
    assert same(results(models, step), plain)
    assert len(attached.operators) == 5


class Tabled(Block):
    """A weight that is no parameter but a part of a tensor, and saved as a view of it."""

    def __init__(self):
        super().__init__(16)
        self.table = torch.randn(32, 16)[:16].requires_grad_()

    def forward(self, x):
        return super().forward(x) @ self.table.t()


def test_a_table_that_learns_is_no_activation(attach, caplog):
    model = Net(2)
    model.blocks = nn.ModuleList([Tabled(), Tabled()])
    attach(model, SWAP)
    with caplog.at_level(logging.WARNING):
        loss_of(model).backward()
    assert "table" not in caplog.text


class Skips(Block):
    """Runs in every other forward, and a part of it later only."""

    def __init__(self):
        super().__init__(16)
        self.late, self.forwards = nn.Linear(16, 16), 0

    def forward(self, x):
        self.forwards += 1
        if self.forwards % 2:
            return x
        return super().forward(x) + (self.late(x).exp() if self.forwards > 2 else 0)


def test_what_runs_later_than_at_first_is_not_said_to_have_no_effect(attach, caplog):
    models = nn.ModuleList([Net(), Net(2)])
    models[1].blocks = nn.ModuleList([Skips(), Skips()])

    def step(models):
        losses = [loss_of(model) for model in models]
        sum(losses).backward()
        return losses

    attach(models, {"recompute_config": {"select_recompute": {"late": True, "act": True}}})
    with caplog.at_level(logging.WARNING):
        results(models, step, times=8)
    assert "has no effect" not in caplog.text


def test_a_step_after_detach_is_told_once(attach, caplog):
    model = Net()
    attached = attach(model, SWAP, survive=True)
    with attached.step():
        results(model, accumulated)
    assert "no forward of the model" not in attached.report()
    attached.detach()
    for _ in range(2):
        with attached.step():
            results(model, accumulated)
    assert attached.run_step(lambda: 3) == 3
    assert [line for line in caplog.messages if "after detach()" in line] == [caplog.messages[-1]]


def encoder(dropout=0.1):
    block = nn.TransformerEncoderLayer(16, 2, 32, dropout, activation="gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(block, num_layers=2, enable_nested_tensor=False)


def test_torchs_attention_runs_again(attach, caplog):
    """It asks whether its query, key and value are one tensor."""

    def step(model):
        torch.manual_seed(3)
        loss = model(torch.randn(2, 5, 16)).square().mean()
        loss.backward()
        return [loss]

    model = encoder()
    plain = results(copy.deepcopy(model), step)
    attached = attach(model, {"recompute_config": {"select_recompute": {"self_attn": True}}})
    assert same(results(model, step), plain)
    rows = attached.engine.report().recomputed_by_operator
    assert {row.op for row in rows if row.bytes and row.runs} == {"self_attn"}
    assert [one for one in caplog.records if "no effect on self_attn" in one.message] == []


def test_each_row_of_the_docs_example_has_an_effect(caplog, capsys):
    program = re.search(r"^```python\n(# train.py\n.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1]
    exec(program, {})
    printed = capsys.readouterr().out
    moved = re.search(r"^ +0 +([\d.]+)", printed, re.MULTILINE)[1]
    assert float(moved) > 0.1 and "recomputed: self_attn of layer 3" in printed, printed
    assert not re.search(r"nothing was|\b0 second runs", printed), printed
    assert [one.message for one in caplog.records if one.levelno >= logging.WARNING] == []


def test_wrappers_are_not_in_names(attach):
    model = Net()
    plain = copy.deepcopy(model)
    for one in (model, plain):
        one.blocks[0] = checkpoint_wrapper(one.blocks[0])
        one.blocks[1].act = torch.compile(one.blocks[1].act, backend="eager")
    expected = results(plain, accumulated)
    attached = attach(model, MIXED)
    assert attached.operators[0] == attached.operators[1] == attached.operators[2]
    assert same(results(model, accumulated), expected)


def test_evaluation_keeps_nothing(attach):
    model = Net().eval()
    attached = attach(model, SWAP)
    with torch.no_grad():
        model(TEXT)
    assert attached.engine.report().bytes_out == 0


class Watched(Block):
    """Collects what its norm returns by a context variable, and looks at what its class's forward is."""

    collector = contextvars.ContextVar("collector", default=None)

    def forward(self, x):
        assert type(self).forward is Watched.forward and Watched.forward.__module__ == __name__
        normed = self.norm(x)
        if self.collector.get() is not None:
            self.collector.get().append(normed.square().mean())
        return x + self.fc2(self.act(self.fc1(normed)))


class Averaging(Block):
    """Saves tensors that it writes to whenever it trains: its own, and a batch norm's."""

    def __init__(self, width):
        super().__init__(width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.register_buffer("mean", torch.ones(width))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return x + self.batch_norm(self.mlp(x).transpose(1, 2)).transpose(1, 2) * self.mean


@pytest.mark.parametrize("plan", ["swap", "whole"])
def test_running_averages(plan, attach):
    model = Net()
    model.blocks = nn.ModuleList(Averaging(16) for _ in range(2))

    def step(model):
        return accumulated(model) + list(model.buffers())

    plain = results(copy.deepcopy(model), step)
    attached = attach(model, PLANS[plan])
    assert same(results(model, step), plain)
    assert attached.engine.report().recomputed_bytes or plan == "swap"


def test_what_a_forward_collects_is_collected_once(attach):
    model = Net()
    model.blocks = nn.ModuleList(Watched(16) for _ in range(2))

    def step(model):
        found = []
        token = Watched.collector.set(found)
        loss = loss_of(model)
        Watched.collector.reset(token)
        assert len(found) == 2
        (loss + sum(found)).backward()
        return [loss]

    plain = results(copy.deepcopy(model), step)
    attach(model, WHOLE)
    assert same(results(model, step), plain)


def test_signatures_stay(attach):
    model = Net()
    before = inspect.signature(model.forward)
    attach(model, SWAP)
    assert inspect.signature(model.forward) == before


def test_beside_recompute_on_single_modules_and_autocast(attach):
    model = Net()
    parallel.recompute(model.blocks[0])
    parallel.recompute(model.blocks[1].fc2)

    def step(model):
        with torch.autocast("cpu", torch.bfloat16):
            return accumulated(model)

    plain = results(copy.deepcopy(model), step)
    attach(model, MIXED)
    assert same(results(model, step), plain)
    assert same(results(copy.deepcopy(model), step, times=1), results(model, step, times=1))


class Gated(nn.Module):
    """Autocast casts its input twice: it is no leaf, whose cast would be kept."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return functional.silu(self.gate(x)) * self.up(x)


@pytest.mark.parametrize("with_backward", [False, True])
def test_what_takes_its_input_twice_is_recomputed_under_autocast(with_backward, attach):
    model = Net()
    for block in model.blocks:
        block.fc1, block.fc2 = Gated(), nn.Linear(16, 16)

    def step(model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model)
            if with_backward:
                loss.backward()
        if not with_backward:
            loss.backward()
        assert torch.is_autocast_cache_enabled()
        return [loss]

    plain = results(copy.deepcopy(model), step)
    attached = attach(model, {"recompute_config": {"select_recompute": {"fc1": True}}})
    assert same(results(model, step), plain)
    assert attached.engine.report().recomputed_bytes


@pytest.mark.parametrize("plan", ["swap", "mixed"])
def test_on_a_device_that_copies_as_late_as_it_may(plan, attach, monkeypatch):
    monkeypatch.setenv("MINDSPEED_MEM_DEVICE", "simulated")
    model = Net()
    plain = results(copy.deepcopy(model), STEPS["at_once"])
    assert attach(model, PLANS[plan]).engine.backend.type == "simulated"
    assert same(results(model, STEPS["at_once"]), plain)


def test_under_transforms_of_torch_func_it_runs_natively(attach):
    model = Net().eval()
    parameters = dict(model.named_parameters())

    def loss(parameters, text):
        return torch.func.functional_call(model, parameters, (text,)).square().mean()

    def gradients():
        of_each = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, TEXT[:, None])
        return [*torch.func.grad(loss)(parameters, TEXT).values(), *of_each.values()]

    expected = gradients()
    attach(model, MIXED)
    assert same(gradients(), expected)

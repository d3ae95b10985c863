"""Compiled code under limited memory: no guard sees what it allocates, so it finds room made before, in both passes."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import _disable_current_modes

import mindspeed_mem
from mindspeed_mem.activation import engine as engines
from mindspeed_mem.device import get_backend
from mindspeed_mem.device.limited_cpu import LimitedMemory
from mindspeed_mem.plan import load_memory_config
from tests.attachment.plain_models import TEXT, Net, loss_of
from tests.limited_runs import counted
from tests.sweeping import but
from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.usefixtures("limited_memory")

N = 1 << 16  # elements
AMPLE = 1 << 30  # bytes
HELD = 12  # activations of that size that backward needs


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y


def out_of_sight(graph, _):
    """As code that inductor has generated: no dispatch mode sees it. To generate some would take half a minute."""

    def run(args):
        with _disable_current_modes():
            return graph(*args)

    run._boxed_call = True
    return run


BACKEND = aot_autograd(fw_compiler=out_of_sight)


@pytest.fixture(scope="module")
def compiled():
    torch.compiler.reset()
    function = torch.compile(product, backend=BACKEND)
    x = torch.randn(N, requires_grad=True)
    function(x.sin(), x.cos()).square().sum().backward()
    yield function
    torch.compiler.reset()


@pytest.fixture
def engine():
    backend = get_backend("cpu")
    gc.collect()
    with LimitedMemory() as memory:
        backend.attach_ledger(memory)
        started = engines.start(load_memory_config(None), backend, survive=True)
        try:
            yield started, memory
        finally:
            engines.stop()
            backend.attach_ledger(None)


def gradient(engine, memory, run, forward_room=None, backward_room=None) -> torch.Tensor:
    """Of one micro-batch; so many bytes are free when the compiled function, and its backward, begin."""

    def limit(room):
        memory.limit = memory.allocated + (AMPLE if room is None else room)

    limit(None)
    torch.manual_seed(3)
    leaf = torch.randn(N, requires_grad=True)
    try:
        with engine.survival.guarded():
            engine.passes.begin_forward(0, 0)
            with engine.survival.holding_all():
                x = leaf
                for _ in range(HELD):
                    x = x.sin()
                y = x.cos()
                limit(forward_room)
                result = run(x, y)
                del x, y
                limit(None)
                loss = result.square().sum()
                result.register_hook(lambda _: limit(backward_room))
                del result
            engine.passes.end_forward(loss)
            engine.passes.begin_backward(loss)
            loss.backward()
            engine.passes.end_backward()
    finally:
        memory.limit = None
    return leaf.grad


@pytest.mark.parametrize("ran_before", [False, True])
@pytest.mark.parametrize(("forward", "backward"), [(N, None), (None, N)], ids=["forward", "backward"])
@pytest.mark.needs_torch("2.7", "compiled backwards allocate otherwise")
def test_room_is_made_before_compiled_code(engine, compiled, forward, backward, ran_before):
    engine, memory = engine

    def viewed(*args):
        """As Megatron's SwiGLU is."""
        return compiled(*args).view(1, -1)

    def run(*args):
        return engine.run_fused(viewed, args, {})

    expected = gradient(engine, memory, run if ran_before else viewed)
    assert not engine.mover.evictions
    with pytest.raises(torch.OutOfMemoryError):
        gradient(engine, memory, viewed, forward, backward)
    gc.collect()
    found = gradient(engine, memory, run, forward, backward)
    assert torch.equal(found, expected) and engine.mover.evictions


AROUND = {
    "a view": lambda compiled: lambda x, y: compiled(x, y).view(2, -1),
    "an operator": lambda compiled: lambda x, y: compiled(x, y) + 0,
    "two graphs": lambda compiled: lambda x, y: compiled(compiled(x, y), y),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.needs_torch("2.7", "compiled backwards allocate otherwise")
def test_what_a_backward_takes_is_known_wherever_compiled_code_is(engine, compiled, around):
    """What it takes is guessed first, known then; what it is given may leave to make that room."""
    engine, memory = engine
    call = around(compiled)
    expected = gradient(engine, memory, call)
    for _ in range(2):
        found = gradient(engine, memory, lambda *args: engine.run_fused(call, args, {}), None, N)
        assert torch.equal(found, expected)


def more_in_forward(table):
    return lambda x, y: torch.cat([x * y] * 9).view(9, -1).sum(0)


def more_in_backward(table):
    return lambda x, y: x * y + table[:9].sum()


@pytest.mark.parametrize(("makes", "forward", "backward"), [(more_in_forward, N, None), (more_in_backward, None, N)])
@pytest.mark.needs_torch("2.7", "compiled backwards allocate otherwise")
def test_code_that_takes_more_than_was_guessed_finds_that_in_another_attempt(engine, makes, forward, backward):
    engine, memory = engine
    torch.compiler.reset()
    table = torch.randn(7 * N, requires_grad=True)
    compiled = torch.compile(makes(table), backend=BACKEND)

    def run(*args):
        return engine.run_fused(compiled, args, {})

    expected = gradient(engine, memory, compiled)
    found = []
    for _ in range(5):
        table.grad = None
        try:
            found.append(gradient(engine, memory, run, forward, backward))
        except torch.OutOfMemoryError:
            found.append(None)
        gc.collect()
    assert found[0] is None and all(one is not None and torch.equal(one, expected) for one in found[-2:])


def test_while_memory_is_not_tight_nothing_is_looked_at(engine, compiled):
    engine, memory = engine

    def run(*args):
        return engine.run_fused(compiled, args, {})

    results = [gradient(engine, memory, run) for _ in range(5)]  # by then nobody expects a lack
    assert engine.survival.guarded_steps == 3 and all(torch.equal(one, results[0]) for one in results)
    with pytest.raises(torch.OutOfMemoryError):
        gradient(engine, memory, run, N)
    assert engine.survival.guard.lacks == engine.mover.evictions == 0


def trained(model, around=None) -> list[torch.Tensor]:
    """Losses of two steps, and what parameters are then."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(3)
    found = []
    for _ in range(2):
        with contextlib.nullcontext() if around is None else around.step():
            loss = loss_of(model, TEXT.repeat(16, 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(one.detach().clone() for one in model.parameters())]


@pytest.mark.parametrize("share", [0.9, 0.65])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.needs_torch("2.7", "compiled backwards allocate otherwise")
def test_room_is_made_before_compiled_layers(in_place, share):
    """In the first step, too: nobody has seen what they take."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Net(6, 32)
    for number, block in enumerate(model.blocks):
        if in_place:
            block.compile(backend=BACKEND)
        else:
            model.blocks[number] = torch.compile(block, backend=BACKEND)
    with counted() as memory:
        plain = copy.deepcopy(model)
        expected = trained(plain)
        del plain
        gc.collect()
        memory.reset_peak()
        trained(copy.deepcopy(model))
        gc.collect()
        limit = share * memory.peak / 2**30
        with mindspeed_mem.attach(model, None, survive=True, device_memory_gib=limit) as attached:
            found = trained(model, attached)
            assert attached.engine.mover.evictions
    assert all(map(torch.equal, found, expected))


class Gate(torch.nn.Module):
    def forward(self, x):
        return x * x.sin()


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = torch.nn.Sequential(torch.nn.Linear(64, 64), Gate())

    def forward(self, x):
        return self.part(x) + x


@pytest.mark.needs_torch("2.7", "compiled backwards allocate otherwise")
def test_what_compiled_code_takes_is_known_where_it_is_run_again():
    """A second run ends within it, once all that backward needs is there, and within its own backward. What is known is
    not measured again, which resets the peak that a user may ask for."""
    torch.compiler.reset()
    model = torch.nn.Sequential(Gated(), Gated())
    for block in model:
        block.part[1].compile(backend=BACKEND)
    x, plan = torch.randn(512, 64), {"recompute_config": {"select_recompute": {"part": True}}}
    with counted() as memory:
        with mindspeed_mem.attach(model, plan, layers=["0", "1"], survive=True, device_memory_gib=1) as attached:
            for _ in range(2):
                torch.empty(1 << 20)
                most = memory.peak
                with attached.step():
                    model(x).sum().backward()
            assert attached.engine.survival.guarded_steps == 2 and memory.peak == most >= 4 << 20
    torch.compiler.reset()


FUSED = {
    "activations": ("squared_relu",),
    "fusions.fused_bias_geglu": ("quick_gelu",),
    "fusions.fused_cross_entropy": (
        *("calculate_logits_max", "calculate_predicted_logits"),
        *("calculate_cross_entropy_loss", "calculate_gradients"),
    ),
}


def beside_fused(module: str) -> tuple[list[str], int]:
    """What differs in any bit where Megatron's functions of this module are compiled, as they are on a device, and less
    memory is there; and how often some of it left."""
    from tests.limited_runs import Training, different, surviving

    home = importlib.import_module(f"megatron.core.{module}")
    compiles, patched = torch._dynamo.config.patch(disable=False), pytest.MonkeyPatch.context()
    with counted() as memory, parallel(pp=2), compiles, patched as patch:
        for name in FUSED[module]:
            patch.setattr(home, name, torch._dynamo.optimize(BACKEND)(getattr(home, name)))
        activations = importlib.import_module("megatron.core.activations")

        gated, share = module == "fusions.fused_bias_geglu", 0.7
        of_model = {"layers": 4, "cross_entropy_loss_fusion": True, "tied": False}
        if gated:
            share = 0.6
            of_model |= {"gated_linear_unit": True, "bias_activation_fusion": False, "ffn_hidden_size": 1024}

        def training() -> Training:
            function = home.quick_gelu if gated else activations.squared_relu  # as it is by now
            return Training(memory, "dense", 4, activation_func=function, **of_model)

        plain = training()
        expected = [plain.step() for _ in range(3)]
        room = int(share * plain.peak)
        del plain
        with surviving() as engine:
            mine = training()
            found = different(mine.step(), expected[0])
            for one in expected[1:]:
                found += different(mine.step(room), one)
            torch.compiler.reset()
            return found, engine.mover.evictions


@pytest.mark.distributed
@pytest.mark.parametrize("module", FUSED)
@pytest.mark.needs_torch("2.7", "compiled backwards allocate otherwise")
def test_room_is_made_before_what_megatron_fuses(module):
    """In a pipeline, where no step is tried again."""
    results = on_ranks(2, beside_fused, module, timeout=60)
    assert [found for found, _ in results] == [[], []] and any(evictions for _, evictions in results)


def in_place(layers, number):
    layers[number]._compiled_call_impl = torch._dynamo.optimize(BACKEND)(layers[number]._call_impl)  # as `compile()`


def by_a_wrapper(layers, number):
    layers[number] = torch._dynamo.optimize(BACKEND)(layers[number])


def its_forward(layers, number):
    layers[number].forward = torch._dynamo.optimize(BACKEND)(layers[number].forward)


def beside_compiled(compiles) -> tuple[list[str], int]:
    """As `beside_fused`, of layers that a user compiles."""
    from tests.guarding import settled
    from tests.limited_runs import Training, different, surviving
    from tests.worlds import applied

    with applied("sdpa_attention"), counted() as memory, parallel(pp=2), torch._dynamo.config.patch(disable=False):

        def training() -> Training:
            made = Training(memory, "dense", 4, layers=4)
            made.tokens = made.length = 32
            for chunk in made.chunks:
                layers = chunk.module.decoder.layers
                for number in range(len(layers)):
                    compiles(layers, number)
            return made

        before = settled(memory)
        plain = training()
        expected, peaks = [], []
        for _ in range(3):
            expected.append(plain.step())
            peaks.append(plain.peak)
        room = settled(memory) - before + int(0.8 * max(peaks))
        del plain
        gc.collect()
        limit = memory.allocated + room
        with surviving() as engine:
            mine = training()
            mine.total = limit
            found = [line for one in expected for line in different(mine.step(), one)]
            torch.compiler.reset()
            return found, engine.mover.evictions


@pytest.mark.distributed
@pytest.mark.parametrize("compiles", but([in_place, by_a_wrapper, its_forward], by_a_wrapper, its_forward))
@pytest.mark.needs_torch("2.7", "compiled backwards allocate otherwise")
def test_room_is_made_before_layers_that_a_user_of_megatron_compiles(compiles):
    results = on_ranks(2, beside_compiled, compiles, timeout=60)
    assert [found for found, _ in results] == [[], []] and any(evictions for _, evictions in results)

"""What others hold anyway does not travel with every micro-batch, and not at all where its library says so."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.device import get_backend
from mindspeed_mem.patching import REGISTRY
from mindspeed_mem.plan import load_memory_config
from tests.memory.test_ownership import tagged
from tests.swap_runs import entry, op
from tests.worlds import applied

WIDTH, ROWS = 64, 8
WEIGHTS = 2 * WIDTH * WIDTH * 2  # bytes of both layers' weights in bfloat16


class LowPrecision(torch.autograd.Function):
    """A product with a weight that its module keeps in another precision, as TransformerEngine does with fp8."""

    @staticmethod
    def forward(ctx, x, weight, low):
        ctx.save_for_backward(x, low)
        return x @ low.float().t()

    @staticmethod
    def backward(ctx, gradient):
        x, low = ctx.saved_tensors
        return gradient @ low.float(), gradient.t() @ x, None


class Linear(torch.nn.Module):
    def __init__(self, marked: bool):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.marked, self._workspaces = marked, {}

    def forward(self, x):
        if not self._workspaces:
            self._workspaces["weight"] = low = self.weight.detach().to(torch.bfloat16)
            if self.marked:
                low._TE_do_not_offload = True
        return LowPrecision.apply(x, self.weight, self._workspaces["weight"])


class Layer(torch.nn.Module):
    def __init__(self, marked: bool):
        super().__init__()
        self.mlp = Linear(marked)

    def forward(self, x):
        return torch.tanh(self.mlp(x))


def copied(marked: bool, activations: str) -> list[int]:
    """Bytes that left with each of four micro-batches."""
    plan = entry(activations=activations, op_swap=[op("mlp", 1)])
    with ExitStack() as stack:
        stack.enter_context(applied("activation_saved_tensors"))
        engine = engines.start(load_memory_config(plan), get_backend("cpu"))
        stack.callback(REGISTRY.undo, ["mindspeed_mem.patches.activation_stacks"])
        stack.callback(engines.stop)
        layers = [Layer(marked) for _ in range(2)]
        tagged(layers, engine)
        engine.resolve()
        found = []
        for _ in range(4):
            before = engine.mover.bytes_out
            engine.passes.begin_schedule(("test",))
            engine.passes.begin_forward(0, 0)
            x = torch.randn(ROWS, WIDTH)
            for layer in layers:
                x = layer(x)
            loss = x.sum()
            del x
            engine.passes.end_forward(loss)
            engine.passes.begin_backward(loss)
            loss.backward()
            engine.passes.end_backward()
            engine.passes.end_schedule(True)
            found.append(engine.mover.bytes_out - before)
        return found


@pytest.mark.parametrize("activations", ["produced", "saved"])
def test_weights_that_a_module_keeps_leave_once_at_most(activations):
    first, *others = copied(marked=False, activations=activations)
    assert others == [first - WEIGHTS] * 3


@pytest.mark.parametrize("activations", ["produced", "saved"])
def test_what_a_library_marks_does_not_leave(activations):
    marked, unmarked = copied(True, activations), copied(False, activations)
    assert marked == [unmarked[-1]] * 4


@pytest.mark.parametrize(("width", "warnings"), [(WIDTH, 1), (8, 0)])
def test_a_handful_of_bytes_is_not_looked_for(width, warnings, monkeypatch, caplog):
    monkeypatch.setattr(f"{__name__}.WIDTH", width)
    copied(False, "saved")
    said = [one for one in caplog.messages if "the memory is pinned by" in one]
    assert len(said) == warnings and all("in layers 0-1: " in one for one in said)

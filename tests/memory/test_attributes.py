"""What a program has set on tensors and storages that a custom function saves is there in backward, moved or not."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation import regions
from mindspeed_mem.activation.wrappers import region_forward
from mindspeed_mem.device import get_backend
from mindspeed_mem.patching import REGISTRY
from mindspeed_mem.plan import load_memory_config
from tests.swap_runs import again, entry, op, patched

PATCHES = [f"mindspeed_mem.patches.activation_{name}" for name in ("stacks", "saved_tensors")]
PLANS = {
    "kept": entry(op_swap=[op("after", 1)]),
    "swapped": entry(layer_swap=[{"backward_prefetch": 1, "layers": True}], activations="both"),
    "recomputed": again(recompute=[1]),
    "operator recomputed from it": again(["scaled"]),
}


class Masked(torch.autograd.Function):
    """Saves an activation, a view of it, and a mask that needs no gradient."""

    seen: list = []

    @staticmethod
    def forward(ctx, x, part, mask):
        ctx.save_for_backward(x, part, mask)
        return x * mask

    @staticmethod
    def backward(ctx, gradient):
        x, part, mask = ctx.saved_tensors
        same = x.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        kept = [(t.requires_grad, t.is_leaf, t.storage_offset(), t.stride()) for t in (x, part, mask)]
        storage = getattr(x.untyped_storage(), "label", None)
        Masked.seen.append((same, kept, storage, vars(mask), getattr(x, "label", None)))
        return gradient * mask, None, None


class Scaled(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x * x.factor)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.after, self.scaled = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), Scaled()

    def forward(self, x):
        x = self.linear(x)
        x.untyped_storage().label = x.label = "mine"
        mask = (x > 0).to(x.dtype)
        mask.scale = 2
        out = Masked.apply(x, x[2:].t(), mask)
        mask.later = 3
        out.factor = 2
        return self.after(self.scaled(out))


class Exponential(torch.autograd.Function):
    """Saves what it returns."""

    @staticmethod
    def forward(ctx, x):
        out = x.exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class Marked(torch.nn.Module):
    """Sets something on its output that leads back to the output."""

    def __init__(self):
        super().__init__()
        self.made = []

    def forward(self, x):
        out = Exponential.apply(Exponential.apply(x))
        out.total = out.sum()
        self.made.append(weakref.ref(out.total))
        return out


def seen(plan):
    with patched(PATCHES) if plan is not None else contextlib.nullcontext():
        return _seen(plan)


def started(plan, layer):
    engine = engines.start(load_memory_config(plan), get_backend("cpu"))
    for owner in regions.tag_layer(layer, 0):
        REGISTRY.apply_method(owner, "forward", region_forward, PATCHES[0])
    engine.in_force.num_layers = 1
    engine.resolve()
    return engine


def _seen(plan):
    torch.manual_seed(0)
    Masked.seen = []
    layer, engine = Layer(), None
    if plan is not None:
        engine = started(plan, layer)
    try:
        if engine is not None:
            engine.passes.begin_forward(0, 0)
        loss = layer(torch.linspace(-1, 1, 64).view(4, 16)).sum()
        if engine is not None:
            engine.passes.end_forward(loss)
        loss.backward()
        moved = engine is not None and bool(engine.mover.copies_out + sum(engine.mover.second_runs.values()))
        return Masked.seen, [parameter.grad for parameter in layer.parameters()], moved
    finally:
        if engine is not None:
            engines.stop()


@pytest.mark.parametrize("plan", PLANS)
def test_they_are_there_in_backward(plan):
    natively, expected, _ = seen(None)
    with_it, gradients, moved = seen(PLANS[plan])
    assert moved == (plan != "kept")
    assert natively[0][2:] == ("mine", {"scale": 2, "later": 3}, "mine")
    assert with_it == natively
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("plan", PLANS)
def test_an_output_whose_attributes_lead_back_to_it_is_freed_without_backward(plan):
    layer = Layer()
    layer.scaled = Marked()
    with patched(PATCHES):
        engine = started(PLANS[plan], layer)
        try:
            engine.passes.begin_forward(0, 0)
            engine.passes.end_forward(layer(torch.ones(4, 16)).sum())
        finally:
            engines.stop()
    del engine
    gc.collect()
    assert layer.scaled.made and all(made() is None for made in layer.scaled.made)

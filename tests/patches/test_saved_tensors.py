"""Under our saved-tensor hooks a custom function reads what it saved: the very leaves, and others with all marks."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch

from mindspeed_mem.activation.observe.meter import ActivationMeter
from mindspeed_mem.device import get_backend
from tests.swap_runs import patched
from tests.worlds import on_ranks, parallel

PATCH = "mindspeed_mem.patches.activation_saved_tensors"


class Marked(torch.Tensor):
    """A class that only marks."""


class Saves(torch.autograd.Function):
    """Saves what it is given and something of its own, and shows in backward what it reads."""

    seen: list

    @staticmethod
    def forward(ctx, *given):
        leaf = given[0].detach().requires_grad_()
        ctx.save_for_backward(*given, None, leaf)
        ctx.leaf = weakref.ref(leaf)
        return given[0] * 2

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            (ctx.saved_tensors[-1] * 2).backward(gradient)
        *given, none, leaf = ctx.saved_tensors
        assert none is None and leaf is ctx.leaf()
        Saves.seen = given
        return leaf.grad, *[None] * (len(given) - 1)


def read(*given: torch.Tensor) -> list[torch.Tensor]:
    """What backward of `Saves` reads of ``given``."""
    with patched([PATCH]), ActivationMeter(get_backend("cpu")):
        Saves.apply(*given).sum().backward()
    found, Saves.seen = Saves.seen, []
    return found


def test_a_leaf_that_needs_a_gradient_is_itself():
    """Its gradient is read from it; a parameter has its marks, those set after it was saved, too."""
    weight = torch.nn.Parameter(torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    y, _ = read(x * 3, weight)
    assert torch.equal(x.grad, torch.full((3,), 6.0))
    assert read(x * 3, weight)[1] is weight


def test_others_have_their_class_and_attributes():
    x = (torch.ones(3, requires_grad=True) * 3).as_subclass(Marked)
    x.note = "here"
    table = torch.arange(3)
    table.scale = 2.0
    mine, other, plain = read(x, table, torch.zeros(2))
    assert type(mine) is Marked and mine.note == "here" and mine.requires_grad
    assert type(other) is torch.Tensor and other.scale == 2.0 and torch.equal(other, table)
    assert vars(plain) == {}


def test_marks_of_a_frozen_parameter_stay_as_they_are():
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    frozen.count = 0
    with patched([PATCH]), ActivationMeter(get_backend("cpu")):
        result = Saves.apply(torch.ones(3, requires_grad=True) * 3, frozen)
        frozen.count = 1
        result.sum().backward()
    assert Saves.seen[1] is frozen and frozen.count == 1
    Saves.seen = []


def test_a_function_that_runs_another_in_its_backward_reads_its_own():
    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                Saves.apply(inner, weight).backward(gradient)
            assert ctx.saved_tensors[1] is weight is Saves.seen[1]
            return inner.grad, None

    x, weight = torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(3))
    with patched([PATCH]), ActivationMeter(get_backend("cpu")):
        Outer.apply(x * 1, weight).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    Saves.seen = []


def test_hooks_of_others_are_left_alone():
    x = torch.ones(3, requires_grad=True)
    with patched([PATCH]), torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        result = Saves.apply(x * 3)
    with pytest.raises(AssertionError):  # as without us
        result.sum().backward()


def test_nothing_is_kept_alive_after_backward():
    x = torch.ones(3, requires_grad=True)
    with patched([PATCH]), ActivationMeter(get_backend("cpu")):
        result = Saves.apply(x * 3)
        leaf = result.grad_fn.leaf
        result.sum().backward()
    Saves.seen = []
    del result
    gc.collect()
    assert leaf() is None


def fused(overlap: bool) -> tuple[list[str], int]:
    from tests.models import build_gpt, train_step
    from tests.swap_runs import EVERYTHING, SDPA, difference, swap

    def run():
        with parallel():
            chunks = build_gpt("dense", gradient_accumulation_fusion=True, ddp={"overlap_grad_reduce": overlap})
            return train_step(chunks)

    with patched(SDPA):
        without = run()
        with swap(EVERYTHING) as engine:
            return difference(run(), without), engine.report().bytes_out


@pytest.mark.distributed
@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_accumulate_into_main_grad(overlap):
    """With overlap, a weight whose gradient the hook lost would keep its bucket from ever being reduced."""
    for differences, moved in on_ranks(2, fused, overlap, timeout=60):
        assert differences == []
        assert moved > 0


def foreign(overlap: bool) -> list[bool]:
    """A layer that adds to ``main_grad`` by itself and asks the weight that it saved for the flag, as
    TransformerEngine's."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            ctx.main_grad = weight.main_grad
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            ctx.main_grad.add_(grad.t() @ x)
            if not hasattr(weight, "grad_added_to_main_grad"):
                return grad @ weight, None
            weight.grad_added_to_main_grad = True
            return grad @ weight, torch.empty_like(weight)

    def run(hooks):
        torch.manual_seed(0)
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
        config.gradient_accumulation_fusion = True
        layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(2))
        model = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=overlap), layers)
        model.zero_grad_buffer()
        for sync in (model.no_sync, contextlib.nullcontext):
            with sync(), hooks:
                x = torch.randn(4, 8)
                for layer in layers:
                    x = Product.apply(x, layer.weight)
                x.sum().backward()
        model.finish_grad_sync()
        return [layer.weight.main_grad.clone() for layer in layers]

    meter = ActivationMeter(get_backend("cpu"))
    with parallel(), patched([PATCH]):
        return [*map(torch.equal, run(meter), run(contextlib.nullcontext()))]


@pytest.mark.distributed
@pytest.mark.parametrize("overlap", [False, True])
def test_layers_that_accumulate_by_themselves_find_the_flag_on_what_they_saved(overlap):
    for same in on_ranks(2, foreign, overlap, timeout=60):
        assert same == [True, True]

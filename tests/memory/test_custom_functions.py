"""adapt_mem_func_wrapper: a custom function's activations follow the plan, and gradients reach all its tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.swap_runs import EVERYTHING, again, entry, op
from tests.sweeping import apart
from tests.worlds import on_ranks

PLANS = {
    "kept": entry(op_swap=[op(r"self_attention", 2)]),
    "swapped": entry(op_swap=[op("mlp", 1)]),
    "recomputed": again(["mlp"]),
    "layers recomputed, inputs swapped": again(
        swap_config={"swap": True, "op_swap": [], "swap_recompute_inputs": True}, recompute=True
    ),
}


THEIRS = {
    "swapped": entry(activations="both", op_swap=[op("mlp", 1)]),
    "everything": EVERYTHING,
    "recomputed": again(["mlp"]),
}


class ScaledSquare(torch.autograd.Function):
    """x squared times a vector, plus a number."""

    @staticmethod
    def forward(ctx, x, scale, number):
        ctx.save_for_backward(x, scale)
        return x * x * scale + number

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return 2 * x * scale * gradient, (x * x * gradient).flatten(0, -2).sum(0), None


class Again(torch.autograd.Function):
    """An activation that runs again in backward, and reads the gradient of the leaf that it saved for that."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.detach().requires_grad_())
        return torch.nn.functional.gelu(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            again = torch.nn.functional.gelu(ctx.saved_tensors[0])
        torch.autograd.backward(again, gradient)
        return ctx.saved_tensors[0].grad


class AgainOnAView(Again):
    """The same with a leaf that is a view, and really accumulates."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.detach().view(-1, x.shape[-1]).requires_grad_())
        return torch.nn.functional.gelu(x)

    @staticmethod
    def backward(ctx, gradient):
        return Again.backward(ctx, gradient.flatten(0, -2)).view_as(gradient)


class AgainOnItsInput(AgainOnAView):
    """The same with a view of the input itself, asked to accumulate."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.view(-1, x.shape[-1]).requires_grad_())
        return torch.nn.functional.gelu(x)


class OfAView(torch.autograd.Function):
    """An activation that saves a view of its input, made in its forward, which claims to need a gradient there."""

    @staticmethod
    def forward(ctx, x):
        flat = x.view(-1, x.shape[-1])
        flat.rows = len(flat)
        ctx.save_for_backward(flat, None)
        ctx.claims = flat.requires_grad
        return torch.nn.functional.gelu(flat).view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        flat, none = ctx.saved_tensors
        assert none is None and flat.requires_grad == ctx.claims and flat.is_leaf and flat.rows == len(flat)
        with torch.enable_grad():
            flat = flat.detach().requires_grad_()
            again = torch.nn.functional.gelu(flat)
        [found] = torch.autograd.grad(again, flat, gradient.reshape_as(again))
        return found.view_as(gradient)


class AgainOnWhatIsReadAgain(torch.autograd.Function):
    """What it saved it makes a leaf when it reads it, and reads it once more for the gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.view(-1, x.shape[-1]), x.detach())
        return torch.nn.functional.gelu(x)

    @staticmethod
    def backward(ctx, gradient):
        found = 0
        for turn in (0, 1):
            leaf = ctx.saved_tensors[turn].requires_grad_()
            with torch.enable_grad():
                again = torch.nn.functional.gelu(leaf)
            torch.autograd.backward(again, gradient.view_as(again) / 2)
            found = ctx.saved_tensors[turn].grad.view_as(gradient) + found
        return found


class OfAViewItself(OfAView):
    """It asks for the gradient of what only claims to need one, and gets none."""

    @staticmethod
    def backward(ctx, gradient):
        flat, _ = ctx.saved_tensors
        with torch.enable_grad():
            again = torch.nn.functional.gelu(flat)
        [found] = torch.autograd.grad(again, flat, gradient.view_as(again), allow_unused=True)
        return gradient / 2 if found is None and flat._is_view() else found.view_as(gradient)


class OnALeafLater(torch.autograd.Function):
    """What it saves of the same memory is another tensor after some steps: a leaf of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.own = OnALeafLater.step > 2
        ctx.save_for_backward(x.detach().requires_grad_() if ctx.own else x.view(-1, x.shape[-1]))
        return torch.nn.functional.gelu(x)

    @staticmethod
    def backward(ctx, gradient):
        [leaf] = ctx.saved_tensors
        leaf = leaf if ctx.own else leaf.detach().requires_grad_()
        with torch.enable_grad():
            again = torch.nn.functional.gelu(leaf)
        torch.autograd.backward(again, gradient.view_as(again))
        return (ctx.saved_tensors[0] if ctx.own else leaf).grad.view_as(gradient)


class PutsOff(torch.autograd.Function):
    """It reads as a linear layer that puts the gradient of its weight off, for which a stand-in will do; then again."""

    stood_in = 0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.detach())
        return torch.nn.functional.gelu(x)

    @staticmethod
    def backward(ctx, gradient):
        from mindspeed_mem.activation import engine as engines

        engine = engines.current()
        if engine is not None:
            read, later, _ = engine.saved.for_weights(ctx)
            PutsOff.stood_in += later is not None and not any(read[0].stride())
        with torch.enable_grad():
            x = ctx.saved_tensors[0].clone().requires_grad_()  # while what was read first is still there
            again = torch.nn.functional.gelu(x)
        return torch.autograd.grad(again, x, gradient)[0]


def _after_gelu(call: Callable, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x) + call(x)


ODD = [AgainOnWhatIsReadAgain, OfAViewItself, OnALeafLater]


def trained_again(
    around: Any, function: type[torch.autograd.Function] = Again, steps: int = 1
) -> tuple[Any, list[str], Any]:
    """Of the last step."""
    from tests import models, swap_runs
    from tests.worlds import parallel

    with parallel(), around as engine, swap_runs.listening() as messages:
        chunks = models.build_gpt("dense", layers=2)
        for layer in chunks[0].module.decoder.layers:
            # Gelu saves the same memory before a function of `ODD` does.
            both = functools.partial(_after_gelu, function.apply)
            layer.mlp.activation_func = both if function in ODD else function.apply
        for function.step in range(steps):
            result = models.train_step(chunks, micro_batches=2)
        return result, messages, engine.report() if hasattr(engine, "report") else None


def by_odd_functions(function: type[torch.autograd.Function]) -> list[str]:
    """Plans under which the last of some steps, and so each before it, differs."""
    from tests.limited_runs import surviving
    from tests.swap_runs import difference, swap

    def last(around: Any) -> Any:
        return trained_again(around, function, steps=5)[0]

    without, found = last(contextlib.nullcontext()), []
    plans = {**PLANS, **THEIRS, "its operator recomputed": again([r"mlp\.activation_func"])}
    for name, around in {"survived": surviving(), **{name: swap(plan) for name, plan in plans.items()}}.items():
        found += [f"{name}: {what}" for what in difference(last(around), without)]
    return found


def read_after_a_stand_in() -> list[str]:
    PutsOff.stood_in = 0
    found = by_odd_functions(PutsOff)
    return found if PutsOff.stood_in else [*found, "nothing ever stood in"]


def with_views_of_inputs() -> list[str]:
    """What is wrong, with a plan that only what they save follows."""
    from tests.limited_runs import surviving
    from tests.swap_runs import difference, swap

    without, *_ = trained_again(contextlib.nullcontext(), OfAView)
    found = []
    for name, around in {"survived": surviving(), **{name: swap(plan) for name, plan in THEIRS.items()}}.items():
        result, messages, figures = trained_again(around, OfAView)
        found += [f"{name}: {what}" for what in difference(result, without)]
        found += [f"{name}: {one}" for one in messages if "no effect" in one]
        if name == "swapped":
            moved = [(row.layer, row.op) for row in figures.moved_by_operator]
            found += [f"{n}: stayed" for n in (0, 1) if (n, "mlp.activation_func") not in moved]
    return found


def with_own_leaves(function: type[torch.autograd.Function]) -> list[str]:
    from tests.limited_runs import surviving
    from tests.swap_runs import EVERYTHING, difference, swap

    plans = {
        **PLANS,
        "everything swapped": EVERYTHING,
        "what they save swapped": entry(activations="both", op_swap=[op("mlp", 1)]),
        "its input recomputed": again([r"mlp\.linear_fc1"]),
    }
    without, *_ = trained_again(contextlib.nullcontext(), function)
    found = []
    for name, around in {"survived": surviving(), **{name: swap(plan) for name, plan in plans.items()}}.items():
        result, messages, _ = trained_again(around, function)
        found += [f"{name}: {what}" for what in difference(result, without)]
        told = [
            message
            for message in messages
            if f"that {function.__name__} saves has no effect in layers 0-1: " in message
        ]
        if len(told) != (name != "survived"):
            found.append(f"{name}: {messages}")
    return found


class Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, torch.sin(x))
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        x, wave = ctx.saved_tensors
        return 2 * x.detach() * gradient + 0 * wave


class Read(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + Reading.apply(x)


def left_after_reading() -> tuple[int, int]:
    """What is on the device once functions have read what they saved, whose graph is kept, and what of it cannot go."""
    from tests.limited_runs import surviving
    from tests.memory.test_ownership import tagged

    with surviving() as engine:
        layers = [Read(), Read()]
        tagged(layers, engine)
        engine.resolve()
        passes = engine.passes
        passes.begin_schedule(("steps",))
        passes.begin_forward(0, 0)
        x = torch.rand(64, 64).requires_grad_() * 1
        for layer in layers:
            x = layer(x)
        loss = x.square().sum()
        del x
        passes.end_forward(loss)
        passes.begin_backward(loss)
        loss.backward(retain_graph=True)
        there = sum(engine.mover.on_device().values())
        engine.mover.make_room(1 << 40, set())
        left = sum(engine.mover.on_device().values())
        loss.backward()
        passes.end_backward()
        passes.end_schedule(True)
    return there, left


def trained(plan: dict[str, Any] | None) -> tuple[Any, list[torch.Tensor], list[str]]:
    from mindspeed_mem.megatron_adaptor import adapt_mem_func_wrapper
    from tests import models, swap_runs
    from tests.worlds import parallel

    apply = (lambda function, *args: function.apply(*args)) if plan is None else adapt_mem_func_wrapper
    with parallel(), swap_runs.swap(plan) if plan is not None else contextlib.nullcontext() as engine:
        chunks = models.build_gpt("dense")
        scales = [torch.full((256,), 0.5, requires_grad=True) for _ in range(4)]
        for scale, layer in zip(scales, chunks[0].module.decoder.layers, strict=True):
            layer.mlp.activation_func = lambda x, scale=scale: apply(ScaledSquare, x, scale, 1)
        result = models.train_step(chunks, micro_batches=2)
        moved = [] if engine is None else [row.op for row in engine.report().moved_by_operator]
    return result, [scale.grad for scale in scales], moved


def compared(plan: dict[str, Any]) -> tuple[list[str], bool, list[str]]:
    from tests.swap_runs import difference

    (without, scales, _), (result, others, moved) = trained(None), trained(plan)
    return difference(result, without), all(map(torch.equal, scales, others)), moved


@pytest.mark.distributed
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_flow_in_every_disposition(plan):
    [(found, same, moved)] = on_ranks(1, compared, PLANS[plan])
    assert found == [] and same
    assert any("ScaledSquare" in path for path in moved) == (plan == "swapped"), moved


@pytest.mark.distributed
@pytest.mark.parametrize(
    "function", apart([Again, AgainOnAView, AgainOnItsInput], python=[AgainOnItsInput], native=[AgainOnAView])
)
def test_a_function_that_reads_its_own_leafs_gradient_gets_it_and_is_named(function):
    assert on_ranks(1, with_own_leaves, function) == [[]]


@pytest.mark.distributed
def test_a_view_of_an_input_that_a_function_makes_and_saves_leaves():
    assert on_ranks(1, with_views_of_inputs) == [[]]


def test_without_an_engine_it_is_apply():
    from mindspeed_mem.megatron_adaptor import adapt_mem_func_wrapper

    x = torch.rand(3, 4, requires_grad=True)
    scale = torch.rand(4, requires_grad=True)
    adapt_mem_func_wrapper(ScaledSquare, x, scale, 2).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach() * scale.detach()) and scale.grad is not None


@pytest.mark.distributed
@pytest.mark.parametrize(
    "function",
    apart(ODD, python=[OnALeafLater], native=[OfAViewItself]),
    ids=lambda function: function.__name__,
)
def test_what_they_read_is_what_torch_would_have_given_them(function):
    assert on_ranks(1, by_odd_functions, function) == [[]]


@pytest.mark.distributed
def test_a_stand_in_is_read_by_whom_it_is_for_and_nobody_else():
    assert on_ranks(1, read_after_a_stand_in) == [[]]


@pytest.mark.distributed
def test_what_was_read_may_leave_when_memory_runs_out():
    [(there, left)] = on_ranks(1, left_after_reading)
    assert there > 0 and left == 0

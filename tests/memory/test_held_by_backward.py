"""What the running backward has unpacked stays while it works on it, even where nothing but its tensor says so.

Masks and statistics need no gradient: autograd hands a backward the very tensor that the hook returned for them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import pytest

from mindspeed_mem.device import get_backend
from mindspeed_mem.experimental import delegating
from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed

N = 16384  # elements


@pytest.fixture(scope="module")
def folder(tmp_path_factory, limited_memory) -> str:
    place = tmp_path_factory.mktemp("allocator")
    delegating.build(place)
    return str(place)


def functions(lacking: Callable) -> dict[str, Callable]:
    """Functions of one tensor whose backward works on something saved that needs no gradient. In the first, one
    operator runs out of memory (``lacking()``) while another is to use the mask after it."""
    import torch

    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            mask = (x > 0).double() * 3
            ctx.save_for_backward(mask)
            return x * mask.float()

        @staticmethod
        def backward(ctx, gradient):
            (mask,) = ctx.saved_tensors
            with lacking():
                twice = gradient * 2
            return twice * mask.float()

    def of_one_operator(apply: Callable) -> Callable:
        class Around(torch.autograd.Function):  # the memory is short in the next backward
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)

            @staticmethod
            def backward(ctx, gradient):
                short.enter_context(lacking())
                return gradient.view_as(gradient)

        class Over(Around):
            @staticmethod
            def backward(ctx, gradient):
                short.close()
                return gradient.view_as(gradient)

        short = contextlib.ExitStack()
        return lambda x: Around.apply(apply(Over.apply(x)))

    return {
        "function": Masked.apply,
        "mask": of_one_operator(lambda x: x.masked_fill((x > 0).view(torch.uint8).bool(), 2.0)),
        "dropout": of_one_operator(lambda x: torch.native_dropout(x, 0.5, True)[0]),
    }


def gradient(engine, function: Callable) -> bytes:
    """Of a micro-batch outside any layer; ``function`` saves its mask last."""
    import torch

    torch.manual_seed(7)
    leaf = torch.randn(N, requires_grad=True)
    hold = engine.survival.holding_all if engine is not None else contextlib.nullcontext
    if engine is not None:
        engine.passes.begin_forward(0, 0)
    with hold():
        x = leaf
        for _ in range(4):
            x = x.sin()  # each is saved
        loss = function(x).sum()
        del x
    if engine is not None:
        engine.passes.end_forward(loss)
        engine.passes.begin_backward(loss)
    loss.backward()
    if engine is not None:
        engine.passes.end_backward()
    return leaf.grad.numpy().tobytes()


def differing(folder: str) -> list[str]:
    from tests.limited_runs import counted, surviving

    found = []
    with parallel(), counted() as memory:

        @contextlib.contextmanager
        def short():
            memory.limit = memory.allocated + N
            try:
                yield
            finally:
                memory.limit = None

        expected = {name: gradient(None, function) for name, function in functions(contextlib.nullcontext).items()}
        for way in ("operators", "allocator"):
            for name, function in functions(short).items():
                with surviving() as engine, contextlib.ExitStack() as stack:
                    if way == "operators":
                        stack.enter_context(engine.survival.guard)
                    else:
                        patch = stack.enter_context(pytest.MonkeyPatch.context())
                        patch.setenv(delegating.FOLDER_VARIABLE, folder)
                        make_all = functools.partial(engine.mover.make_room, 1 << 40, set())
                        stack.callback(delegating.install(get_backend("cpu"), lambda _, make=make_all: make() or 0))
                    try:
                        same = gradient(engine, function) == expected[name]
                    except RuntimeError as error:
                        same, error.__traceback__ = False, None
                        found.append(f"{name}, {way}: {error}")
                    found += [] if same else [f"{name}, {way}: another gradient"]
                    if not engine.mover.evictions:
                        found.append(f"{name}, {way}: nothing had to leave")
    return found


def test_what_the_running_backward_holds_is_not_emptied(folder):
    assert on_ranks(1, differing, folder) == [[]]

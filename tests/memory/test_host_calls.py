"""What the engine costs the host: how often a layer's forward and backward call into it, once its course is known."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_mem.activation import hot_path
from mindspeed_mem.device import fast_tensors, native_build
from tests.swap_runs import EVERYTHING, again, entry, op
from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
OURS = str(ROOT / "mindspeed_mem"), str(ROOT / "patches")
MOST = {
    "nothing": (entry(op_swap=[]), 75, 70),
    "core attention": (entry(op_swap=[op(r"self_attention\.core_attention", 4)]), 440, 120),
    "everything": (EVERYTHING, 1185, 126),
    "whole layers": (again(recompute=True), 890, 210),
    "norms": (again(select_recompute=[r".*norm"]), 780, 140),
    "inline code": (again(select_recompute=[r"mlp\.activation_func"]), 440, 163),
    "watched": ({}, 147, 120),
}
"""A plan, and the most calls of a layer, without and with what is in C++; some more than there are."""


SURVIVING = {
    "nothing": (entry(op_swap=[]), 875, 125),
    "everything": (EVERYTHING, 1595, 135),
    "norms": (again(select_recompute=[r".*norm"]), 1385, 140),
}
"""The same where any activation may have to leave when memory runs out."""


def calls_of_a_layer(plan: dict, survive: bool = False) -> float:
    import torch

    from mindspeed_mem.activation.storage.own_tensors import APPLY
    from tests.models import build_gpt
    from tests.swap_runs import one_forward, swap

    found = [0]

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code is not APPLY:  # in the place of torch's own, where that is in C
            found[0] += code.co_filename.startswith(OURS)

    here = torch.autograd.set_multithreading_enabled(False)  # all of it on the thread that is looked at
    with here, parallel(), swap(plan, watch_only=not plan, survive=survive) as engine:
        chunks = build_gpt("dense")
        counts = []
        for _ in range(8):
            found[0] = 0
            engine.passes.begin_schedule(("train",))
            sys.setprofile(note)
            try:
                loss = one_forward(engine, chunks)
                engine.passes.begin_backward(loss)
                loss.sum().backward()
            finally:
                sys.setprofile(None)
            engine.passes.end_backward()
            engine.passes.end_schedule(True)
            counts.append(found[0])
        # Of some, as copies on a busy machine's accelerator end at other times, and are asked about once more.
        return min(counts[5:]) / len(chunks[0].module.decoder.layers)


@contextlib.contextmanager
def in_cpp() -> Iterator[None]:
    """Inside, what has been built in C++ is used."""
    from mindspeed_mem.activation import taking_over

    taking_over.use(hot_path.EXTENSION.load())
    fast_tensors.use(fast_tensors.EXTENSION.load())
    try:
        yield
    finally:
        taking_over.use(None)
        fast_tensors.use(None)


def calls_of_each(plans: dict[str, dict], native: bool, survive: bool = False) -> dict[str, float]:
    with in_cpp() if native else contextlib.nullcontext():
        return {name: calls_of_a_layer(plan, survive) for name, plan in plans.items()}


def one_plan_after_the_other(native: bool) -> list[tuple[bool, int]]:
    with in_cpp() if native else contextlib.nullcontext():
        return wrapped_and_copied()


def wrapped_and_copied() -> list[tuple[bool, int]]:
    """Of plans that select nothing, something, nothing: whether operators are wrapped, and how many copies are made."""
    from megatron.core.utils import nvtx_range_push

    from mindspeed_mem.plan import load_memory_config
    from tests.models import build_gpt
    from tests.swap_runs import one_forward, swap

    found, (nothing, something) = [], (MOST["nothing"][0], MOST["core attention"][0])
    with parallel(), swap(nothing) as engine:
        chunks = build_gpt("dense")
        layer = type(chunks[0].module.decoder.layers[0])
        for plan in (nothing, something, nothing):
            engine.adopt(load_memory_config(plan), lambda mine: [mine])
            before = engine.mover.copies_out
            engine.passes.begin_schedule(("train",))
            one_forward(engine, chunks)
            engine.passes.end_schedule(True)
            now = sys.modules[nvtx_range_push.__module__].nvtx_range_push
            wrapped = {hasattr(one, "_declared_by") for one in (layer.forward, now)}
            found.append((wrapped == {True}, engine.mover.copies_out - before))
    return found


def build() -> None:
    if native_build.find_compiler() is None:
        pytest.skip("no C++ compiler")
    for extension in (fast_tensors.EXTENSION, hot_path.EXTENSION):
        extension.build()


def beyond(most: dict, native: bool, survive: bool = False, device: str | None = None) -> dict[str, float]:
    """Those of more calls than that."""
    if native:
        build()
    plans = {name: plan for name, (plan, *_) in most.items()}
    [found] = on_ranks(1, calls_of_each, plans, native, survive, device=device)
    print("calls of a layer:", found)  # with pytest -rP
    return {name: n for name, n in found.items() if n > most[name][-1 if native else 1]}


in_both = pytest.mark.parametrize("native", [False, True], ids=["Python", "C++"])


@in_both
def test_what_may_leave_when_memory_runs_out_costs_little_more(native):
    assert beyond(SURVIVING, native, survive=True) == {}


@in_both
@pytest.mark.needs_torch("2.7", "nobody tells whose saved-tensor hooks are in force")
def test_an_operator_of_which_nothing_is_selected_costs_a_few_calls(native):
    assert beyond(MOST, native) == {}
    [plans] = on_ranks(1, one_plan_after_the_other, native)
    (_, none), (there, some), (there_still, none_now) = plans
    assert there and some > 0 and (none, there_still, none_now) == (0, False, 0), plans

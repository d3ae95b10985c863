"""What the engine costs the host: how often a layer's forward and backward call into it, once its course is known."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.swap_runs import EVERYTHING, again, entry, op
from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
OURS = str(ROOT / "mindspeed_mem"), str(ROOT / "patches")
MOST = {
    "nothing": (entry(op_swap=[]), 165),
    "core attention": (entry(op_swap=[op(r"self_attention\.core_attention", 4)]), 700),
    "everything": (EVERYTHING, 1950),
    "whole layers": (again(recompute=True), 1550),
    "watched": ({}, 900),
}
"""A plan, and the most calls of a layer; some more than there are."""


def calls_of_a_layer(plan: dict) -> float:
    from tests.models import build_gpt
    from tests.swap_runs import one_forward, swap

    found = [0]

    def note(frame, event, _):
        found[0] += event == "call" and frame.f_code.co_filename.startswith(OURS)

    with parallel(), swap(plan, watch_only=not plan) as engine:
        chunks = build_gpt("dense")
        for _ in range(6):
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
        return found[0] / len(chunks[0].module.decoder.layers)


def all_plans() -> dict[str, float]:
    return {name: calls_of_a_layer(plan) for name, (plan, _) in MOST.items()}


def test_an_operator_of_which_nothing_is_selected_costs_a_few_calls():
    [found] = on_ranks(1, all_plans)
    assert {name: n for name, n in found.items() if n > MOST[name][1]} == {}, found

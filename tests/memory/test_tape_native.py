"""Inline code is noted in C++ as in Python, whatever it does, and runs again to the same bits."""

from __future__ import annotations

import pytest
import torch

from mindspeed_mem.activation import engine as engines
from mindspeed_mem.activation import hot_path
from mindspeed_mem.activation.rerun.tape import Tape
from mindspeed_mem.activation.storage import marks
from mindspeed_mem.activation.storage.records import Handle
from mindspeed_mem.device import get_backend
from mindspeed_mem.plan import load_memory_config

WEIGHT = torch.nn.Parameter(torch.randn(4, 4))
marks.of(WEIGHT.untyped_storage()).static = True
MANAGED = torch.randn(4, 4)
marks.mark_managed(MANAGED)


def in_place_on_its_own(x):
    made = torch.empty_like(x)
    made.copy_(x)
    view = made[:, 1:]
    view.mul_(2)
    return torch.add(x, made, out=torch.empty(0))


def views(x):
    first, second = x.t().chunk(2)
    return torch.cat((first, -second), dim=0).expand(3, 4, 4).contiguous().view(-1)


PROGRAMS = {
    "views": views,
    "in place": in_place_on_its_own,
    "products": lambda x: torch.nn.functional.silu(x @ WEIGHT) * x.float().mean(-1, keepdim=True),
    "several results": lambda x: torch.topk(x, 2)[0] + torch.stack(torch.split(x, 2)).sum((0, 1))[:2],
    "random": lambda x: torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x),
    "a generator": lambda x: x * torch.rand(4, 4, generator=torch.Generator()),
    "its input in place": lambda x: x.add_(1) * 2,
    "a view of its input in place": lambda x: x[0].zero_(),
    "conjugates": lambda x: torch.view_as_complex(x.view(4, 2, 2)).conj() * 2,
    "sparse": lambda x: x.to_sparse() * 2,
    "managed": lambda x: x + MANAGED,
    "a parameter as it is": lambda x: x * torch.nn.Parameter(torch.ones(4)),
    "numbers": lambda x: x * 2 + torch.tensor(3.0) ** 2,
    "a storage made anew": lambda x: torch.empty(4, 4).set_(x) * 2,
    "nothing": lambda x: x,
}


def noted(program, in_python: bool) -> dict:
    """What a tape has of it."""
    torch.manual_seed(0)
    engine = engines.start(load_memory_config({"recompute_config": {"recompute": True}}), get_backend("cpu"))
    try:
        tape = Tape(0, "inline", 1, engine.mover)
        if in_python:
            tape._note = tape._note_slowly
        given = torch.randn(4, 4)
        with tape:
            kept = program(given)
        found = {
            "steps": [(*step[:-1], step.random is None) for step in tape._steps],
            "made": sorted(tape._made),
            "blank": tape._blank,
            "arguments": sorted(tape._arguments),
            "why not": tape.why_not,
        }
        again = tape.finish(lambda tensor: Handle(tensor), {})
        del kept
        return found | {"made again": sorted(key for _, key in again), "why not again": tape.why_not}
    finally:
        engines.stop()


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.skipif(hot_path.native is None, reason="the hot path is not in C++")
def test_noted_alike(name):
    assert Tape._note is not Tape._note_slowly
    if name == "its input in place":
        assert noted(PROGRAMS[name], True)["why not"]
    [python, native] = [noted(PROGRAMS[name], in_python) for in_python in (True, False)]
    assert str(python) == str(native)
    assert python["why not again"] == python["why not"]  # a second run has given the same bits
    assert python["made again"] or python["why not"] or name in ("nothing", "a view of its input in place")

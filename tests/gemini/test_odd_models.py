"""Models and loops that read parameters at other times than most: the bits are those of plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mindspeed_mem.gemini import GeminiDDP
from tests.gemini_runs import ADAM, batches, chunked, farthest, loss_of, masters, reference
from tests.odd_models import KINDS, inputs, odd_model

TINY = {"mixed_precision": None, "search_range_mb": 0, "min_chunk_size_mb": 0.004}


def squared(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def penalized(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """With a penalty on the gradient of the input."""
    x = x.clone().requires_grad_()
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + (gradient.norm(dim=-1) - 1).square().mean()


@pytest.mark.parametrize(("kind", "loss"), [*((kind, squared) for kind in KINDS), ("linear", penalized)])
def test_parameters_are_there_whoever_reads_them(kind: str, loss: Callable):
    plain = odd_model(kind)
    adam = torch.optim.AdamW(plain.parameters(), fused=True, **ADAM)
    model, optimizer = chunked(odd_model(kind), **TINY)
    assert len(model.chunks) > 4
    for step in range(3):
        adam.zero_grad()
        wanted = loss(plain, inputs(step))
        wanted.backward()
        adam.step()
        optimizer.zero_grad()
        found = loss(model, inputs(step))
        optimizer.backward(found)
        optimizer.step()
        assert found.item() == wanted.item()
    assert farthest(masters(model), {name: param.detach() for name, param in plain.named_parameters()}) == 0


@pytest.mark.parametrize("way", ["a forward before the step", "through the module inside"])
def test_no_forward_leaves_parameters_that_a_step_changes(way: str):
    data = batches(4)
    losses, wanted = reference(data)
    model, optimizer = chunked()
    for (tokens,), expected in zip(data, losses, strict=True):
        optimizer.zero_grad()
        loss = loss_of(model.module if way == "through the module inside" else model, tokens)
        optimizer.backward(loss)
        if way == "a forward before the step":
            optimizer.clip_grad_norm(max_norm=1e9)
            loss_of(model, tokens)
        optimizer.step()
        assert loss.item() == expected
    assert farthest(masters(model), wanted) == 0


def tied_by_data() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[1].weight.data = model[0].weight.data
    return model


def with_a_buffer_of_a_parameter() -> torch.nn.Module:
    model = torch.nn.Linear(8, 8)
    model.register_buffer("copy", model.weight.data[2:])
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (tied_by_data, "1.weight lies in the memory of 0.weight: tie them by being one Parameter"),
        (with_a_buffer_of_a_parameter, "copy lies in the memory of weight: "),
    ],
)
def test_memory_that_chunks_would_part_is_refused(make: Callable, message: str):
    with pytest.raises(ValueError, match=message):
        GeminiDDP(make(), "cpu")


def test_parts_of_one_piece_of_memory_are_none():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    memory = torch.rand(128)
    for number, linear in enumerate(model):
        linear.weight.data = memory[64 * number : 64 * (number + 1)].view(8, 8)
    assert len(list(GeminiDDP(model, "cpu").parameters())) == 2

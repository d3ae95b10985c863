"""Models and loops that read parameters at other times than most: the bits are those of plain torch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

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


def train_both(plain: torch.nn.Module, given: torch.nn.Module, loss: Callable) -> None:
    """Plain torch, and chunks of the same model, which have to be the same."""
    adam = torch.optim.AdamW(plain.parameters(), fused=True, **ADAM)
    model, optimizer = chunked(given, **TINY)
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


@pytest.mark.parametrize(("kind", "loss"), [*((kind, squared) for kind in KINDS), ("linear", penalized)])
def test_parameters_are_there_whoever_reads_them(kind: str, loss: Callable):
    train_both(odd_model(kind), odd_model(kind), loss)


def test_parts_are_compiled():
    model = odd_model("linear")
    for part in model.children():
        part.compile(backend="aot_eager")
    model.compile(backend="aot_eager")
    train_both(odd_model("linear"), model, squared)


def test_parts_with_parameters_that_a_wrapper_compiles():
    plain, model = odd_model("linear"), odd_model("linear")
    for one in (plain, model):
        for index, layer in enumerate(one.layers):
            one.layers[index] = torch.compile(layer, backend="aot_eager")
    train_both(plain, model, squared)


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


def tied_transposed() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[1].weight.data = model[0].weight.data.t()
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (tied_by_data, "1.weight lies in the memory of 0.weight: tie them by being one Parameter"),
        (tied_transposed, "1.weight lies in the memory of 0.weight: "),
        (with_a_buffer_of_a_parameter, "copy lies in the memory of weight: "),
    ],
)
def test_memory_that_chunks_would_part_is_refused(make: Callable, message: str):
    with pytest.raises(ValueError, match=message):
        GeminiDDP(make(), "cpu")


def test_memory_that_chunks_do_not_part_is_taken():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    memory = torch.rand(128)
    for number, linear in enumerate(model):
        linear.weight.data = memory[64 * number : 64 * (number + 1)].view(8, 8)
    assert len(list(GeminiDDP(model, "cpu").parameters())) == 2
    frozen = tied_by_data().requires_grad_(False)  # which nothing changes
    assert len(list(GeminiDDP(frozen, "cpu").parameters())) == 4


@dataclasses.dataclass
class Itself:
    x: torch.Tensor
    up: Any = None

    def __post_init__(self) -> None:
        self.up = self


class Awkward(torch.nn.Module):
    """Returns, with what depends on its parameter, what has no storage or leads back to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64, 64))

    def forward(self, x: torch.Tensor) -> tuple[Itself, torch.Tensor]:
        return Itself(x @ self.weight), torch.eye(64).to_sparse()


class AroundAwkward(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Awkward(), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, unit = self.first(x)
        return torch.vmap(self.last)(found.x) @ unit


def test_outputs_without_a_storage_and_that_lead_to_themselves():
    torch.manual_seed(3)
    plain = AroundAwkward()
    model, optimizer = chunked(copy.deepcopy(plain), **TINY)
    x = torch.randn(8, 64)
    plain(x).sum().backward()
    loss = model(x).sum()
    assert loss.item() == plain(x).sum().item()
    optimizer.backward(loss)
    wanted = [param.grad.norm() for param in plain.parameters()]
    assert optimizer.clip_grad_norm() == pytest.approx(float(torch.stack(wanted).norm()))

"""What recomputed operators do with unusual backwards, inputs that change, and requests that have no effect."""

from __future__ import annotations

import contextlib
import ctypes

import pytest
import torch

from tests.memory.test_life_cycle import NOTHING
from tests.numerics.test_recompute import ALL_MOVE, EACH, POLICIES
from tests.swap_runs import again, op
from tests.worlds import RankError, on_ranks, parallel

pytestmark = pytest.mark.distributed

NATIVE = {"swap_config": {"swap": False}}
PLANS = {
    "whole layers": POLICIES["whole layers"],
    "defaults": POLICIES["defaults"],
    "each": POLICIES["each"],
    "mix": again({"mlp": [1], ".*norm": True}, {**ALL_MOVE, "swap_recompute_inputs": True}, recompute=[2]),
}


def collect(chunks: list) -> dict[str, torch.Tensor]:
    from tests.models import global_parameters

    return {name: parameter.main_grad.clone() for name, parameter in global_parameters(chunks)}


def unusual(plans: dict, way: str, kind: str = "dropout") -> list[str]:
    """Gradients of an unusual backward natively and with each plan: what differs, and what is left."""
    from tests.models import build_gpt
    from tests.swap_runs import left_over, one_forward, swap

    def run(plan: dict) -> tuple[dict, dict]:
        with parallel(), swap(plan) as engine:
            chunks = build_gpt(kind)
            chunks[0].zero_grad_buffer()
            layers = chunks[0].module.decoder.layers
            ends: list[torch.Tensor] = []  # not the losses: Megatron's loss cannot be taken back twice
            chunks[0].module.decoder.register_forward_hook(lambda *call: ends.append(call[2].square()))
            middle: list[torch.Tensor] = []
            if way == "middle first":
                layers[1].register_forward_hook(lambda *call: middle.append(call[2][0]))
            elif way == "frozen embedding":
                for parameter in chunks[0].module.embedding.parameters():
                    parameter.requires_grad_(False)
            elif way == "frozen layers":
                for parameter in [*layers[1].parameters(), *layers[2].mlp.parameters()]:
                    parameter.requires_grad_(False)
            elif way == "eval mode":
                chunks[0].eval()
            found = {}
            if way == "two forwards, the first one's backward last":
                one, two = one_forward(engine, chunks, 0), one_forward(engine, chunks, 1)
                two.sum().backward()
                one.sum().backward()
                ends.clear()
                return collect(chunks) | found, left_over(engine)
            one_forward(engine, chunks)
            loss = ends.pop()
            if way == "twice":
                loss.sum().backward(retain_graph=True)
                loss.mean().backward()
            elif way == "part first":
                weight = layers[2].mlp.linear_fc1.weight
                [found["part"]] = torch.autograd.grad(loss.sum(), [weight], retain_graph=True)
                loss.sum().backward()
            elif way == "part only":
                weights = [layers[2].mlp.linear_fc1.weight, layers[3].self_attention.linear_proj.weight]
                found = dict(enumerate(torch.autograd.grad(loss.sum(), weights)))
            elif way == "middle first":
                middle.pop().square().sum().backward(retain_graph=True)
                loss.sum().backward()
            else:
                loss.sum().backward()
            del loss
            return collect(chunks) | found, left_over(engine)

    without, _ = run(NATIVE)
    wrong = []
    for name, plan in plans.items():
        grads, left = run(plan)
        if grads.keys() != without.keys():
            wrong.append(f"{name}: {grads.keys() ^ without.keys()}")
        wrong += [f"{name}: {key}" for key in grads if not torch.equal(grads[key], without[key])]
        wrong += [f"{name}: left {left}"] if left != NOTHING else []
    return wrong


WAYS = (
    "twice",
    "part first",
    "part only",
    "middle first",
    "frozen embedding",
    "frozen layers",
    "eval mode",
    "two forwards, the first one's backward last",
)


@pytest.mark.parametrize("way", WAYS)
def test_unusual_backwards_give_the_same_gradients(way):
    assert on_ranks(1, unusual, PLANS, way) == [[]]


def changed(plan: dict, which: str) -> bool:
    """An input of a recomputed operator is changed in place between forward and backward."""
    from tests.models import build_gpt
    from tests.swap_runs import one_forward, swap

    with parallel(), swap(plan) as engine:
        chunks = build_gpt("dense")
        layer, seen = chunks[0].module.decoder.layers[1], []
        if which == "mlp":
            layer.mlp.register_forward_pre_hook(lambda *call: seen.append(call[1][0]))
        elif which == "layer":
            layer.register_forward_hook(lambda *call: seen.append(call[2][0]))  # the next one's input
        else:
            layer.mlp.linear_fc1.register_forward_hook(lambda *call: seen.append(call[2][0]))
        loss = one_forward(engine, chunks)
        with torch.no_grad():
            seen.pop().add_(1)
        loss.sum().backward()
        return True


@pytest.mark.parametrize(("plan", "which"), [("mlp", "mlp"), ("whole layers", "layer"), ("defaults", "first linear")])
def test_an_input_changed_in_place_is_an_error(plan, which):
    with pytest.raises(RankError, match="modified by an inplace operation"):
        on_ranks(1, changed, POLICIES[plan], which)


def impure(plan: dict, how: str) -> None:
    """Layer 2's MLP, after it has shown that it repeats itself, does so no more: it saves more, or another shape."""
    from tests.models import build_gpt
    from tests.swap_runs import one_forward, swap

    with parallel(), swap(plan) as engine:
        chunks = build_gpt("dense")
        mlp = chunks[0].module.decoder.layers[2].mlp
        function, calls = mlp.activation_func, 0

        def wider(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x], -1).exp()[..., : x.shape[-1]]

        def other(x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 1:
                return function(x) if how == "more" else function(wider(x))
            return function(wider(x)) if how == "more" else function(x)

        one_forward(engine, chunks).sum().backward()
        mlp.activation_func = other
        one_forward(engine, chunks).sum().backward()


@pytest.mark.parametrize("plan", ["mlp", "whole layers"])
@pytest.mark.parametrize("how", ["more", "less"])
def test_what_does_not_compute_the_same_twice_is_an_error_that_names_it(plan, how):
    named = r"mlp of layer 2" if plan == "mlp" else r"layer 2"
    with pytest.raises(RankError, match=rf"RuntimeError: {named} saved .* when it was recomputed"):
        on_ranks(1, impure, POLICIES[plan], how)


def said(plan: dict, kind: str = "dense", steps: int = 3) -> list[str]:
    from tests.models import build_gpt, train_step
    from tests.swap_runs import listening, swap

    with parallel(), listening() as messages, swap(plan):
        chunks = build_gpt(kind)
        for step in range(steps):
            train_step(chunks, step=step, micro_batches=2)
        return messages


@pytest.mark.parametrize("name", [r"mlp\.linear_fc2", "mlp_bda"])
def test_recompute_that_saves_nothing_is_reported_once(name):
    [messages] = on_ranks(1, said, again([name]))
    assert len(messages) == 1
    assert f"recompute of {name.replace(chr(92), '')} saves nothing in layers 0-3" in messages[0]


@pytest.mark.parametrize("plan", ["whole layers", "mlp", "defaults", "norms"])
def test_recompute_that_saves_something_says_nothing(plan):
    assert on_ranks(1, said, POLICIES[plan]) == [[]]


def test_a_swapped_operator_whose_consumer_is_recomputed_is_reported_once():
    moved = {"swap": True, "op_swap": [op("pre_mlp_layernorm", 2, [1, 2])]}
    [messages] = on_ranks(1, said, again({"mlp": [1]}, moved))
    assert len(messages) == 1
    for part in ("swap_config.op_swap[0]", "pre_mlp_layernorm", "in layer 1", "mlp is recomputed"):
        assert part in messages[0]
    assert on_ranks(1, said, again({"mlp": [1]}, {**moved, "swap_recompute_inputs": True})) == [[]]


def test_a_swapped_layer_before_a_recomputed_one_is_reported():
    moved = {"swap": True, "layer_swap": [{"backward_prefetch": 2, "layers": [0]}]}
    [messages] = on_ranks(1, said, again(None, moved, recompute=[1]))
    assert len(messages) == 1
    for part in ("swap_config.layer_swap[0]", "mlp_bda", "in layer 0", "layer 1 is recomputed"):
        assert part in messages[0]


def unseen_kernel() -> tuple[list[str], bool]:
    """An activation function that writes memory by no torch operation: nothing may be dropped there."""
    from tests.models import build_gpt
    from tests.swap_runs import listening, one_forward, swap

    def run(plan: dict) -> tuple[list[str], dict]:
        with parallel(), listening() as messages, swap(plan) as engine:
            chunks = build_gpt("dense", layers=2)
            chunks[0].zero_grad_buffer()
            for layer in chunks[0].module.decoder.layers:
                layer.mlp.activation_func = _Unseen.apply
            one_forward(engine, chunks).sum().backward()
            return messages, collect(chunks)

    _, without = run(NATIVE)
    messages, grads = run(POLICIES["defaults"])
    return messages, all(torch.equal(grads[name], without[name]) for name in without)


class _Unseen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = torch.empty_like(x)
        result.detach().numpy()[:] = x.detach().numpy() ** 2
        ctx.save_for_backward(x)
        return result

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def test_inline_code_with_a_kernel_of_its_own_is_left_alone():
    [(messages, same)] = on_ranks(1, unseen_kernel)
    assert same
    assert any("mlp.activation_func" in message for message in messages)


def in_place_inside() -> bool:
    """An activation function that works in place on what it made itself."""
    from tests.models import build_gpt
    from tests.swap_runs import one_forward, swap

    def run(plan: dict) -> dict:
        with parallel(), swap(plan) as engine:
            chunks = build_gpt("dropout", layers=2)
            chunks[0].zero_grad_buffer()
            for layer in chunks[0].module.decoder.layers:
                layer.mlp.activation_func = lambda x: torch.dropout((x * 2).mul_(3).sigmoid_(), 0.2, True)
            one_forward(engine, chunks).sum().backward()
            return collect(chunks)

    without = run(NATIVE)
    return all(
        torch.equal(grads[name], without[name])
        for grads in (run(POLICIES["defaults"]), run(POLICIES["mlp"]), run(again(EACH)))
        for name in without
    )


def test_inline_code_that_works_in_place_on_its_own_tensors_runs_again():
    assert on_ranks(1, in_place_inside) == [True]


def no_room_to_try() -> tuple[list[str], bool, list[int]]:
    """Memory runs out in the first run that is to show whether an activation function repeats itself."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from tests.models import build_gpt
    from tests.swap_runs import listening, one_forward, swap

    calls = ctypes.c_long()  # no trial puts that back

    class Full(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.value += func is torch.ops.aten.gelu.default
            if calls.value == 2 and func is torch.ops.aten.gelu.default:
                raise torch.OutOfMemoryError("full")
            return func(*args, **(kwargs or {}))

    def run(plan: dict, mode: TorchDispatchMode | None) -> tuple[list[str], dict, list[int]]:
        counted = []
        with parallel(), listening() as messages, swap(plan) as engine:
            chunks = build_gpt("dense", layers=2)
            chunks[0].zero_grad_buffer()
            for _ in range(2):
                before = calls.value
                with mode or contextlib.nullcontext():
                    one_forward(engine, chunks).sum().backward()
                counted.append(calls.value - before)
            return messages, collect(chunks), counted

    _, without, _ = run(NATIVE, None)
    messages, grads, counted = run(again({r"mlp\.activation_func": True}), Full())
    return messages, all(torch.equal(grads[name], without[name]) for name in without), counted


def test_where_there_is_no_room_to_try_inline_code_it_stays_and_is_tried_the_next_time():
    [(messages, same, counted)] = on_ranks(1, no_room_to_try)
    assert same and messages == []
    # Layer 0, its trial that fails, layer 1, its trial, layer 1 again; then layer 0, its trial, layer 1, both again.
    assert counted == [5, 5]

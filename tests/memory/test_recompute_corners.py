"""What recompute must not start from, try out on nothing, adopt, or leave behind."""

from __future__ import annotations

import contextlib
import random
import weakref
from typing import Any

import numpy
import pytest
import torch

from tests.swap_runs import again, op
from tests.worlds import on_ranks

pytestmark = pytest.mark.distributed


class Unseen(torch.autograd.Function):
    """Squares twice in a kernel that is no torch operation, as Triton's and pybind's are not."""

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        y.detach().numpy()[:] = x.detach().numpy() ** 2
        ctx.save_for_backward(x)
        return y * 2

    @staticmethod
    def backward(ctx, gradient):
        return 4 * ctx.saved_tensors[0] * gradient


def with_unseen_kernel(plan: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Experts 0 and 1 get all tokens of the first micro-batch, 2 and 3 those of the second."""
    from tests import models, swap_runs
    from tests.worlds import parallel

    results = []
    for engine in (contextlib.nullcontext(), swap_runs.swap(plan)):
        with parallel(), swap_runs.listening() as said, engine:
            chunks = models.build_gpt("moe", gated_linear_unit=False)
            calls = [0]
            for module in chunks[0].modules():
                if type(module).__name__ == "MLP":
                    module.activation_func = Unseen.apply
                if type(module).__name__ == "TopKRouter":

                    def routing(logits, *args, original=module.routing, calls=calls, **kwargs):
                        calls[0] += 1
                        bias = torch.tensor([2.0, 1.0, -8.0, -8.0])
                        return original(logits + (bias if calls[0] <= 4 else bias.flip(0)), *args, **kwargs)

                    module.routing = routing
            results.append(models.train_step(chunks, micro_batches=2))
            models.forget_routing(chunks)
    return swap_runs.difference(*results), said


def test_a_tape_is_tried_out_on_tokens_not_on_none():
    plan = again([r"mlp\.experts\.local_experts\.[0-9]\.activation_func"])
    [(found, said)] = on_ranks(1, with_unseen_kernel, plan)
    assert found == []
    for expert in range(4):
        assert any(f"local_experts.{expert}.activation_func in layers 0-3: run again" in line for line in said)


class Marked(torch.autograd.Function):
    """Doubles what a kernel that is no torch operation marks; it marks all at first, later the positive ones."""

    calls = 0

    @classmethod
    def forward(cls, ctx, x, kind):
        Marked.calls += 1
        marks = torch.empty_like(x, dtype=torch.bool if kind == "booleans" else x.dtype)
        chosen = (x > 0 if Marked.calls > 4 else x == x).numpy()
        marks.detach().numpy()[:] = chosen if kind == "booleans" else numpy.where(chosen, numpy.nan, 1)
        twice = torch.where(marks if kind == "booleans" else marks.isnan(), 2.0, 1.0)
        ctx.save_for_backward(twice)
        return x * twice

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


def with_marks_by_chance(plan: dict[str, Any], kind: str) -> tuple[list[str], list[str]]:
    """Memory without content holds what the kernel writes at first: torch fills it with NaN, or True."""
    from tests import models, swap_runs
    from tests.worlds import parallel

    results = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for engine in (contextlib.nullcontext(), swap_runs.swap(plan)):
            with parallel(), swap_runs.listening() as said, engine:
                Marked.calls = 0
                chunks = models.build_gpt("dense")
                for layer in chunks[0].module.decoder.layers:
                    layer.mlp.activation_func = lambda x: Marked.apply(x, kind)
                results.append(models.train_step(chunks, micro_batches=2))
    finally:
        torch.use_deterministic_algorithms(False)
    return swap_runs.difference(*results), said


@pytest.mark.parametrize(
    ("kind", "why"),
    [("booleans", "it reads memory that no torch operation has written"), ("numbers", "run again, it gives other")],
)
def test_a_tape_is_not_believed_for_what_memory_held_before(kind, why):
    [(found, said)] = on_ranks(1, with_marks_by_chance, again([r"mlp\.activation_func"]), kind)
    assert found == []
    assert any("mlp.activation_func" in line and why in line for line in said), said


@torch.library.custom_op("tests::drawing", mutates_args=())
def drawing(x: torch.Tensor, p: float) -> torch.Tensor:
    return torch.nn.functional.dropout(x, p) if p else x.clone()


@torch.library.custom_op("tests::counting", mutates_args=())
def counting(x: torch.Tensor) -> torch.Tensor:
    Ways.runs += 1
    return x * (1 + 0.1 * Ways.runs) * random.random()


drawing.register_autograd(lambda ctx, gradient: (gradient, None))
counting.register_autograd(lambda ctx, gradient: gradient)


class Ways:
    """What activation functions do whose first runs show little or nothing of it."""

    calls = runs = 0

    @classmethod
    def a_kernel_later(cls, x):
        """It is no torch operation."""
        cls.calls += 1
        if cls.calls <= 2:
            return torch.nn.functional.gelu(x)
        y = torch.empty_like(x)
        y.detach().numpy()[:] = x.detach().numpy()
        return torch.nn.functional.gelu(x) * torch.sin(2 * y)

    @classmethod
    def draws_later(cls, x):
        cls.calls += 1
        return torch.nn.functional.gelu(drawing(x, 0.3 if cls.calls > 2 else 0.0)) * x

    @staticmethod
    def draws(x):
        """Which has no effect on what backward needs."""
        return torch.nn.functional.gelu(x) * x + 0 * drawing(x, 0.3)

    @staticmethod
    def counts(x):
        return torch.nn.functional.gelu(counting(x)) * x


def with_ways(plan: dict[str, Any]) -> dict[str, tuple[list[str], list[str]]]:
    """Of each what differs, and what was said."""
    from tests import models, swap_runs
    from tests.worlds import parallel

    found = {}
    for way in ("a_kernel_later", "draws_later", "draws", "counts"):
        results, after = [], []
        for engine in (contextlib.nullcontext(), swap_runs.swap(plan)):
            with parallel(), swap_runs.listening() as said, engine:
                Ways.calls = Ways.runs = 0
                random.seed(3)
                chunks = models.build_gpt("dense", layers=2)
                for layer in chunks[0].module.decoder.layers:
                    layer.mlp.activation_func = getattr(Ways, way)
                results.append(models.train_step(chunks, micro_batches=2))
                after.append((Ways.runs, random.getstate(), torch.get_rng_state().tolist()))
        found[way] = swap_runs.difference(*results) + ["state"] * (after[0] != after[1]), said
    return found


def test_other_operations_are_tried_anew_and_those_of_libraries_draw_as_they_drew():
    [found] = on_ranks(1, with_ways, again([r"mlp\.activation_func"]))
    for way, (wrong, said) in found.items():
        assert wrong == [], way
        assert any("run again, it gives other values" in line for line in said) == (way in ("a_kernel_later", "counts"))


def taken_and_gone() -> tuple[int, list[bool]]:
    """Bytes that were recomputed, and of what a function in inline code took, whether it is still there after it."""
    from tests import models, swap_runs
    from tests.worlds import parallel

    taken: list[weakref.ref] = []

    def total(parts: list[torch.Tensor]) -> torch.Tensor:
        taken.append(weakref.ref(parts[0]))
        return parts[0] + parts[1]

    def act(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(total([x * 2, x * 3]))

    with parallel(), swap_runs.swap(again([r"mlp\.activation_func"])) as engine:
        chunks = models.build_gpt("dense", layers=2)
        for layer in chunks[0].module.decoder.layers:
            layer.mlp.activation_func = act
        loss = swap_runs.one_forward(engine, chunks).sum()
        there = [one() is not None for one in taken]
        loss.backward()
        return sum(engine.mover.dropped.values()), there


def test_what_functions_in_inline_code_took_is_gone_after_it():
    [(dropped, there)] = on_ranks(1, taken_and_gone)
    assert dropped and there == [False, False]


def left_on_the_host(plan: dict[str, Any]) -> dict[str, int]:
    from tests import swap_runs

    with swap_runs.patched(swap_runs.SDPA), swap_runs.swap(plan) as engine:
        swap_runs.trained({}, {"kind": "swiglu_gqa_rope", "qk_layernorm": True})
        return swap_runs.left_over(engine)


@pytest.mark.parametrize(
    "plan",
    [
        again(
            {r"self_attention\.qkv": True, r"self_attention\.q_layernorm": True},
            {"swap": True, "swap_recompute_inputs": True, "default_prefetch": 10, "op_swap": [op("mlp", 2)]},
        ),
        again(
            {r"self_attention\.qkv": True},
            {"swap": True, "op_swap": [op([r"self_attention\.q_layernorm"], 10, activations="saved")]},
        ),
    ],
    ids=["as an input", "as saved by another"],
)
def test_a_copy_under_way_is_given_up_when_its_storage_can_be_made_again(plan):
    assert on_ranks(1, left_on_the_host, plan) == [{"host bytes": 0, "device bytes": 0}]


def held(plan: dict[str, Any], change: str) -> tuple[int, list[int]]:
    """The peak of a step, and the layers whose MLP ran in its backward, in order.

    ``change``: "fresh", "table" (all layers share one that is no buffer) or "last" (a layer's last operation saves its
    own output).
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from mindspeed_mem.activation.storage.ledger import LEDGER
    from tests import models, swap_runs
    from tests.worlds import parallel

    again_in: list[int] = []
    with parallel(), swap_runs.swap(plan):
        chunks = models.build_gpt("dense")
        table = torch.rand(256)
        for layer in chunks[0].module.decoder.layers:
            layer.mlp.activation_func = lambda x: (
                torch.nn.functional.gelu(x) * (table if change == "table" else table.clone())
            )

            def ran(*_, number=layer.layer_number - 1):
                if torch._C._current_graph_task_id() != -1:
                    again_in.append(number)

            layer.mlp.linear_fc1.register_forward_pre_hook(ran)
        original = TransformerLayer._forward_mlp
        if change == "last":
            TransformerLayer._forward_mlp = lambda self, *args, **kwargs: torch.tanh(original(self, *args, **kwargs))
        try:
            models.train_step(chunks, micro_batches=1)
            again_in.clear()
            LEDGER.reset_peak()
            models.train_step(chunks, micro_batches=1)
        finally:
            TransformerLayer._forward_mlp = original
        return LEDGER.held.peak, again_in


@pytest.mark.parametrize("plan", [again(recompute=True), again(["mlp"])], ids=["whole layers", "mlp"])
def test_tables_and_layers_outputs_belong_to_no_layer(plan):
    """Otherwise the last layer's backward would run other layers first, and hold all that they make."""
    [(peak, order)] = on_ranks(1, held, plan, "fresh")
    assert order == [3, 2, 1, 0]
    for change in ("table", "last"):
        [(other, order)] = on_ranks(1, held, plan, change)
        assert order == [3, 2, 1, 0], change
        assert other <= peak + 4 * 32 * 2 * 64 * 4, change  # at most an output of each layer, which tanh saves


def leaves_of_second_runs() -> list[int]:
    """Bytes that the graphs kept by token dispatchers hold as leaves after a step."""
    from tests import models, swap_runs
    from tests.worlds import parallel

    found = []
    with parallel(), swap_runs.swap(again(recompute=True)):
        chunks = models.build_gpt("moe")
        models.train_step(chunks, micro_batches=2)
        for layer in chunks[0].module.decoder.layers:
            todo = [t.grad_fn for t in vars(layer.mlp.token_dispatcher).values() if isinstance(t, torch.Tensor)]
            seen = {None}
            while todo:
                node = todo.pop()
                if node not in seen:
                    seen.add(node)
                    todo += [other for other, _ in node.next_functions]
                    leaf = getattr(node, "variable", None)
                    if type(leaf) is torch.Tensor:
                        found.append(leaf.untyped_storage().nbytes())
        models.forget_routing(chunks)
    return found


def test_what_experts_keep_of_a_second_run_holds_no_input():
    [found] = on_ranks(1, leaves_of_second_runs)
    assert not any(found)


def swapped_beside(inputs_too: bool) -> tuple[list[str], list[str], int, int]:
    """fc1 is swapped, and the activation function that starts from its output is recomputed."""
    from tests import models, swap_runs
    from tests.worlds import parallel

    plan = {"swap": True, "swap_recompute_inputs": inputs_too, "op_swap": [op(r"mlp\.linear_fc1", 2)]}
    results = []
    for engine in (contextlib.nullcontext(), swap_runs.swap(again([r"mlp\.activation_func"], plan))):
        with parallel(), swap_runs.listening() as said, engine as running:
            chunks = models.build_gpt("swiglu_gqa_rope")
            results.append(models.train_step(chunks, micro_batches=1))
            output = chunks[0].module.decoder.layers[0].mlp.linear_fc1.weight.shape[0] * 4 * 32 * 2
            moved = running and running.report().bytes_out
    return swap_runs.difference(*results), said, moved, output


@pytest.mark.parametrize("inputs_too", [False, True])
def test_what_is_swapped_beside_inline_code_is_no_part_of_it(inputs_too):
    [(found, said, moved, output)] = on_ranks(1, swapped_beside, inputs_too)
    assert found == []
    assert not any("recompute" in line and "activation_func" in line and "in place" in line for line in said), said
    assert moved == (4 * output if inputs_too else 0)


def held_after_a_forward_without_backward(frozen: bool) -> dict[str, int]:
    """Before any schedule has run, so that nothing is known of the model's weights yet."""
    from tests import models, swap_runs
    from tests.worlds import parallel

    with swap_runs.swap(again(["mlp"])) as engine, parallel():
        chunks = models.build_gpt("dense", layers=1)
        for name, module in chunks[0].named_modules():
            if name.endswith("mlp.linear_fc2"):
                module.register_full_backward_hook(lambda module, of_input, of_output: None)
                module.bias.requires_grad_(not frozen)
        swap_runs.one_forward(engine, chunks)
        return swap_runs.left_over(engine)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_view_of_a_weight_that_an_operator_returns_keeps_nothing_of_its_run(frozen):
    [left] = on_ranks(1, held_after_a_forward_without_backward, frozen)
    assert left == {"host bytes": 0, "device bytes": 0}

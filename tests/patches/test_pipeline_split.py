"""What is put off does not outlive its pass, whatever happens, and what --split-backward says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.patches.test_adaptor import TRAIN, python
from tests.worlds import on_ranks, parallel

pytestmark = pytest.mark.distributed

HIDDEN = (32, 1, 256)
"""What the first linear layer of an MLP makes, and the second takes."""


def a_pass_fails() -> dict[str, Any]:
    """The backward of the second micro-batch fails half way; then the step is made again."""
    import torch

    from mindspeed_mem.schedule.weight_gradients import WEIGHT_GRADIENTS
    from tests.models import build_gpt, train_step
    from tests.split_runs import alive, split
    from tests.swap_runs import difference

    def fails(module, gradients):
        seen.append(module)
        if len(seen) == 2:
            raise ValueError("in a pass")

    seen: list = []
    with parallel(), split():
        chunks = build_gpt("dense")
        before = alive(HIDDEN)
        hook = chunks[0].module.decoder.layers[1].register_full_backward_pre_hook(fails)
        try:
            train_step(chunks, micro_batch_size=1)
            error = ""
        except ValueError as raised:
            error = str(raised)
        hook.remove()
        found = {"error": error, "held": alive(HIDDEN) - before, "passes": WEIGHT_GRADIENTS.clear()}
        again = train_step(chunks, micro_batch_size=1)
        found["left"] = alive(HIDDEN) - before
        plain = train_step(build_gpt("dense"), micro_batch_size=1)
    with parallel():
        torch.manual_seed(0)
        megatrons = train_step(build_gpt("dense"), micro_batch_size=1)
    return {**found, "bits": [difference(again, megatrons), difference(plain, megatrons)]}


def test_a_pass_that_fails_leaves_nothing():
    [found] = on_ranks(1, a_pass_fails)
    assert found == {"error": "in a pass", "held": 0, "passes": 0, "left": 0, "bits": [[], []]}


def frozen(what: str) -> tuple[list[str], list[str]]:
    """What is said, and what differs, where these weights take no gradients."""
    import re

    from tests.models import build_gpt, train_step
    from tests.split_runs import split
    from tests.swap_runs import difference, listening

    def train():
        chunks = build_gpt("dense", layers=2, tied=False)
        for name, parameter in chunks[0].module.named_parameters():
            parameter.requires_grad = re.search(what, name) is None
        wrapped = [type(chunks[0])(chunks[0].config, chunks[0].ddp_config, chunks[0].module)]
        for parameter in wrapped[0].parameters():
            parameter.main_grad = getattr(parameter, "main_grad", None)
        return [train_step(wrapped, step=step) for step in range(2)]

    with parallel():
        plain = train()
        with split(), listening() as messages:
            ours = train()
    return messages, [name for pair in zip(ours, plain, strict=True) for name in difference(*pair)]


@pytest.mark.parametrize(("what", "said"), [("linear_qkv", 0), ("linear|output", 1)])
def test_frozen_weights_are_left_alone_and_a_model_of_them_is_named_once(what, said):
    [(messages, differing)] = on_ranks(1, frozen, what)
    assert differing == []
    assert len(messages) == said and all(one.startswith("--split-backward has no effect: ") for one in messages)


def shared_or_watched(change: str) -> list[str]:
    """What differs where two layers have one weight and run again whole, or where hooks watch a tied one."""
    import torch

    from tests.models import build_gpt, train_step
    from tests.split_runs import split
    from tests.swap_runs import difference

    def train():
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        shared = change == "shared"
        chunks = build_gpt("dense", layers=3, dtype=torch.bfloat16, **(recompute if shared else {}))
        model = chunks[0].module.module
        if shared:
            first, *others = (layer.mlp.linear_fc1 for layer in model.decoder.layers)
            for one in others:
                one.weight = first.weight
            chunks = [type(chunks[0])(chunks[0].config, chunks[0].ddp_config, chunks[0].module)]
        else:
            weight = model.embedding.word_embeddings.weight
            weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            model.decoder.layers[0].mlp.linear_fc1.weight.register_hook(lambda gradient: gradient * 2)
        return [train_step(chunks, step=step) for step in range(2)]

    with parallel():
        plain = train()
        with split():
            ours = train()
    return [name for pair in zip(ours, plain, strict=True) for name in difference(*pair)]


@pytest.mark.parametrize("change", ["shared", "watched"])
def test_sums_are_made_and_hooks_called_as_in_the_whole_backward(change):
    assert on_ranks(1, shared_or_watched, change) == [[]]


def changed_in_place() -> str:
    """An operator writes into the gradient that it was given, which a linear layer had, too."""
    import torch

    from tests.models import build_gpt, train_step
    from tests.split_runs import split

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, output):
            return output.view_as(output)

        @staticmethod
        def backward(ctx, gradient):
            kept.append(gradient)
            return gradient

    def keeping(x):
        output, bias = native(x)
        return Keeps.apply(output), bias

    def change(*_):
        kept[-1].mul_(2)

    kept: list[torch.Tensor] = []
    with parallel(), split():
        chunks = build_gpt("dense", layers=1, tied=False)
        mlp = chunks[0].module.decoder.layers[0].mlp
        native, mlp.linear_fc2.forward = mlp.linear_fc2.forward, keeping
        mlp.linear_fc1.register_full_backward_hook(change)
        try:
            train_step(chunks, micro_batches=1)
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_gradient_that_is_changed_in_place_is_refused():
    [message] = on_ranks(1, changed_in_place)
    assert "changed in place" in message and "leave --split-backward out" in message


ADAPTED = """
    import json, sys
    import mindspeed_mem.megatron_adaptor as mem
    exec(sys.argv.pop(1))
    losses = [train(3)]
    swap = {"swap_config": {"swap": True, "smallest_bytes": 0, "layer_swap": {"backward_prefetch": 1, "layers": True}}}
    mem.configure({"device": "cpu", "split_backward": True, "memory_config": swap})
    from mindspeed_mem.schedule.weight_gradients import WEIGHT_GRADIENTS
    losses.append(train(3))
    mem.report()
    print(json.dumps([losses, WEIGHT_GRADIENTS.count]))
"""


def test_through_the_adaptor():
    out, errors = python(ADAPTED, TRAIN, "--device", "cpu")
    (without, split), count = json.loads(out.splitlines()[-1])
    assert without == split
    # Steps, micro-batches, linear layers of two layers, the output layer and the embedding, which has its weight.
    assert count == 3 * 2 * (2 * 4 + 1 + 1)
    assert "--split-backward" not in errors

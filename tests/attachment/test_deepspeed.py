"""Plans beside DeepSpeed."""

import copy
import importlib.util
import subprocess
import sys

import pytest
import torch

import mindspeed_mem
from tests.attachment.plain_models import MIXED, Net, accumulated, results, same
from tests.examples.jobs import free_port


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("stage", ["2", "3"])
def test_bits_are_the_same(stage):
    plans = ["swap", "saved", "whole", "parts", "mixed"]
    command = [sys.executable, "-m", "tests.attachment.zero_run", str(free_port()), stage, *plans]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert "wrong: []" in ran.stdout, ran.stdout + ran.stderr


class PreBackwardFunctionForModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class PostBackwardFunctionModule(PreBackwardFunctionForModule):
    pass


def test_what_modules_pass_on_as_aliases_is_known_as_theirs():
    """As with ZeRO-3, whose hooks make an alias of each tensor that a module takes or returns, by functions with these
    names."""
    plain, model = Net(), Net()
    plain.load_state_dict(model.state_dict())
    figures = []
    for one in (plain, model):
        if one is model:
            for module in one.modules():
                module.register_forward_pre_hook(
                    lambda _, given: tuple(PostBackwardFunctionModule.apply(x) for x in given)
                )
                module.register_forward_hook(lambda _, __, found: PreBackwardFunctionForModule.apply(found))
        expected = results(copy.deepcopy(one), accumulated)
        with mindspeed_mem.attach(one, MIXED) as attached:
            assert same(results(one, accumulated), expected)
            figures.append(attached.engine.report())
    assert figures[0].bytes_out == figures[1].bytes_out > 0
    assert figures[0].recomputed_bytes == figures[1].recomputed_bytes > 0

"""attach(model, "auto") with Hugging Face's models, where their gradient checkpointing is what a user would turn to."""

import gc
import logging

import pytest
import torch

import mindspeed_mem
from mindspeed_mem.plan import load_memory_config
from tests.limited_runs import counted

hf = pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("limited_memory"), pytest.mark.host]

IDS = torch.arange(4 * 96).view(4, 96) * 11 % 61


def llama():
    """Its MLPs multiply, and its layers add, between modules: a plan reaches what that makes by whole layers only."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2, "vocab_size": 61}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_hidden_layers=6, use_cache=False)).train()


class Training:
    def __init__(self, model):
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters())

    def step(self):
        """Its loss and gradients, by numpy, whose memory is not counted."""
        ids = IDS.clone()  # which is gone with the step, as a batch is
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        found = [one.detach().numpy().copy().tobytes() for one in (loss, *(p.grad for p in self.model.parameters()))]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found


def trained(memory, model, steps):
    """What steps compute, and the bytes that the last takes."""
    training = Training(model)
    found = [training.step() for _ in range(steps - 1)]
    gc.collect()
    memory.reset_peak()
    return [*found, training.step()], memory.peak


def searched(limit, expected):
    """Steps under a limit: the state of the search and the bytes that had to leave for want of room, after each."""
    model, seen = llama(), []
    with mindspeed_mem.attach(model, "auto", device_memory_gib=limit / 2**30) as attached:
        training = Training(model)
        for found in expected:
            with attached.step():
                now = training.step()
            assert now == found
            seen.append((attached.engine.adaptation.state, attached.engine.mover.evicted_bytes))
    return seen


def test_where_the_models_checkpoints_fit_a_plan_does(caplog):
    caplog.set_level(logging.INFO)
    with counted() as memory:
        expected, _ = trained(memory, llama(), 20)
        model = llama()
        model.gradient_checkpointing_enable()
        _, peak = trained(memory, model, 2)
        del model
        gc.collect()
        seen = searched(1.03 * peak, expected)
    assert seen[-1][0] == "settled" and "no plan fits" not in caplog.text
    assert not [
        one for one in caplog.records if one.levelno >= logging.WARNING and one.name.startswith("mindspeed_mem")
    ]
    assert {evicted for state, evicted in seen if state == "settled"} == {seen[-1][1]}


def test_where_no_plan_fits_it_is_told_once_and_eviction_goes_on(caplog):
    caplog.set_level(logging.INFO)
    with counted() as memory:
        expected, peak = trained(memory, llama(), 32)
        gc.collect()
        seen = searched(0.28 * peak, expected)
    assert seen[-1][0] == "settled" and seen[-1][1] > seen[-11][1]
    assert "until then activations are evicted when memory runs out" in caplog.text
    assert "planning again" not in caplog.text and "stops planning" not in caplog.text


@pytest.mark.parametrize("asked", [True, False])
def test_what_has_no_effect_is_told_to_whoever_asked_for_it(asked, caplog):
    model, config = llama(), load_memory_config({"recompute_config": {"select_recompute": {r"mlp\.down_proj": True}}})
    with mindspeed_mem.attach(model, config) as attached:
        if not asked:  # as an adaptive plan is
            attached.engine.adopt(config, lambda mine: [mine], (), tell=False)
        training = Training(model)
        for _ in range(3):
            training.step()
    warned = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert any("recompute of mlp.down_proj saves nothing in layers 0-5" in one for one in warned) == asked
    assert asked or not warned

"""Hugging Face's models: the same bits with a plan, whatever else is switched on."""

import copy
import gc

import pytest

import mindspeed_mem
from mindspeed_mem.activation.storage.ledger import LEDGER
from tests.attachment.hf_models import NAMES, accumulated, build
from tests.attachment.plain_models import SAVED, SWAP, WHOLE, results, same

pytest.importorskip("transformers")

NORMS = {
    "gpt2": r"ln_.*",
    "llama": r".*norm",
    "mixtral": r".*norm",
    "vit": r"layernorm_.*",
    "t5": r"layer\.\d\.layer_norm",
}
PLANS = {"swap": SWAP, "saved": SAVED, "whole": WHOLE, "norms": None}
CASES = [
    pytest.param(name, plan, marks=[] if (name, plan) in (("llama", "norms"), ("t5", "swap")) else pytest.mark.sweep)
    for name in NAMES
    for plan in PLANS
]


def check(model, step, plan):
    """Returns what the plan did."""
    plain = results(copy.deepcopy(model), step)
    with mindspeed_mem.attach(model, plan) as attached:
        assert same(results(model, step), plain)
        gc.collect()
        assert LEDGER.held.now == 0
        return attached.engine.report()


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_models(name, plan):
    model, given = build(name)
    figures = check(
        model, accumulated(given), PLANS[plan] or {"recompute_config": {"select_recompute": {NORMS[name]: True}}}
    )
    assert figures.bytes_out or figures.recomputed_bytes


@pytest.mark.sweep
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_with_checkpoints_of_its_own(name, reentrant, plan):
    model, given = build(name)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    check(model, accumulated(given), PLANS[plan] or {"recompute_config": {"select_recompute": {NORMS[name]: True}}})


@pytest.mark.sweep
@pytest.mark.parametrize("plan", ["swap", "whole"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_with_lora(name, plan):
    peft = pytest.importorskip("peft")
    model, given = build(name)
    targets = ["c_attn"] if name == "gpt2" else ["q_proj", "v_proj", "up_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, r=2, lora_dropout=0.1))
    figures = check(model, accumulated(given), PLANS[plan])
    assert figures.bytes_out or figures.recomputed_bytes

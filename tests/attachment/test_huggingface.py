"""Hugging Face's models: the same bits with a plan, whatever else is switched on."""

import contextlib
import copy
import gc
import itertools
import logging

import pytest
import torch

import mindspeed_mem
from mindspeed_mem.activation.storage.ledger import LEDGER
from tests.attachment import plain_models
from tests.attachment.hf_models import IDS, NAMES, accumulated, build
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


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_plan_that_such_checkpoints_leave_nothing_to_do_is_told(reentrant, caplog):
    model, given = build("llama")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    entry = {"op_name": "mlp", "backward_prefetch": 1, "layers": True}
    recompute = {"select_recompute": {"self_attn": True}}
    plan = {"swap_config": {"swap": True, "op_swap": [entry]}, "recompute_config": recompute}
    with caplog.at_level(logging.WARNING), mindspeed_mem.attach(model, plan):
        for _ in range(3):
            results(model, accumulated(given))
    told = sorted(one for one in caplog.messages if "has no effect" in one)
    assert len(told) == 2, told
    assert told[0].startswith("recompute_config.select_recompute.self_attn has no effect on self_attn in layers 0-")
    assert told[1].startswith("swap_config.op_swap[0] has no effect in layers 0-")


def test_a_cache_keeps_layers_from_running_again_which_is_told(caplog):
    model, given = build("llama")
    given = {**given, "use_cache": True}
    check(model, accumulated(given), WHOLE)
    with mindspeed_mem.attach(model, WHOLE):
        for _ in range(2):
            model(**given)  # which no backward follows
        gc.collect()
        assert LEDGER.held.now == 0
    assert "recompute has no effect on the layer in layers 0-2: it keeps what it computes in " in caplog.text
    assert "train with use_cache=False" in caplog.text


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


def trained(folder, callbacks, fails=None, **settings):
    """Parameters after some steps of Hugging Face's Trainer, and the model; the forward numbered `fails` raises."""
    import transformers

    model, _ = build("llama")
    forwards = itertools.count()

    def fail(*_):
        if next(forwards) == fails:
            raise ArithmeticError("in the middle of a step")

    model.lm_head.register_forward_hook(fail)
    data = [{"input_ids": one, "labels": one} for one in IDS.repeat(6, 2)]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=14, per_device_train_batch_size=2, save_strategy="no", report_to=[], **settings
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
    trainer.train()
    return [one.detach().clone() for one in model.parameters()], model


@pytest.mark.parametrize(
    "arguments",
    [
        {"plan": "auto", "device_memory_gib": 0.5},
        pytest.param({"plan": SWAP, "survive": True}, marks=pytest.mark.sweep),
    ],
    ids=["auto", "swap"],
)
def test_trainer(arguments, tmp_path, caplog):
    pytest.importorskip("accelerate")
    caplog.set_level(logging.INFO, "mindspeed_mem")
    settings = {"use_cpu": True, "disable_tqdm": True, "gradient_accumulation_steps": 2}
    plain, _ = trained(tmp_path, None, **settings)
    callback = mindspeed_mem.trainer_callback(**arguments)
    found, model = trained(tmp_path, [callback], **settings)
    assert same(found, plain)
    assert "activation memory, per rank" in caplog.text
    assert arguments["plan"] != "auto" or "settled on plan" in caplog.text
    assert callback.attached is None and not any("forward" in vars(one) for one in model.modules())


def test_wrong_arguments_of_the_callback_are_refused_where_it_is_made():
    with pytest.raises(TypeError, match="device_gib"):
        mindspeed_mem.trainer_callback("auto", device_gib=1)
    with pytest.raises(ValueError, match=r"nofile.yaml: cannot be read .* allowed: the name of a YAML file"):
        mindspeed_mem.trainer_callback("nofile.yaml")


def test_a_trainer_that_takes_data_parallel_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    import transformers

    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", 2)
    callback = mindspeed_mem.trainer_callback(SWAP)
    with pytest.raises(ValueError, match=r"n_gpu: got 2, .* DataParallel; .* \(torchrun .* \(CUDA_VISIBLE_DEVICES=0\)"):
        trained(tmp_path, [callback], use_cpu=True, disable_tqdm=True)
    assert callback.attached is None


@pytest.mark.parametrize("new", [False, True])  # as the cell of a notebook has, run again
def test_trainer_after_a_training_that_failed(new, tmp_path, caplog):
    pytest.importorskip("accelerate")
    caplog.set_level(logging.INFO, "mindspeed_mem")
    settings = {"use_cpu": True, "disable_tqdm": True}
    plain, _ = trained(tmp_path, None, **settings)
    callback = mindspeed_mem.trainer_callback("auto", device_memory_gib=0.5)
    with pytest.raises(ArithmeticError):
        trained(tmp_path, [callback], fails=3, **settings)
    assert "are profiled" in caplog.text and callback.attached is not None
    if new:
        callback = mindspeed_mem.trainer_callback("auto", device_memory_gib=0.5)
    found, model = trained(tmp_path, [callback], **settings)
    assert same(found, plain)
    assert "settled on plan" in caplog.text
    assert callback.attached is None and not any("forward" in vars(one) for one in model.modules())


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    model, given = build("llama")

    def train(model, attach):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(3)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        with attach(model) as attached:
            for _ in range(2):
                with contextlib.nullcontext() if attached is None else attached.step():
                    for half in given["input_ids"].split(2):
                        with accelerator.accumulate(model):
                            accelerator.backward(model(input_ids=half, labels=half).loss)
                            optimizer.step()
                            optimizer.zero_grad()
            if attached is not None:
                assert attached.engine.report().bytes_out
        return [one.detach().clone() for one in model.parameters()]

    plain = train(copy.deepcopy(model), lambda _: contextlib.nullcontext())
    assert same(train(model, lambda model: mindspeed_mem.attach(model, SWAP, survive=True)), plain)


@pytest.mark.parametrize("first", [True, False])
def test_accelerate_unwraps_what_is_attached(first):
    """In mixed precision it has put a forward on the model, and looks for what is below it."""
    accelerate = pytest.importorskip("accelerate")

    def train(model, attaches):
        accelerate.state.AcceleratorState._reset_state()
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attached = mindspeed_mem.attach(model, plain_models.SWAP) if attaches and first else None
        model, optimizer = accelerator.prepare(model, optimizer)
        if attaches and not first:
            attached = mindspeed_mem.attach(model, plain_models.SWAP)
        torch.manual_seed(3)
        losses = []
        for number in range(4):
            if number == 2:
                model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
            losses.append(plain_models.loss_of(model))
            accelerator.backward(losses[-1])
            optimizer.step()
            optimizer.zero_grad()
        if attached is not None:
            assert attached.engine.report().bytes_out
            attached.detach()
            assert not any(name.startswith("_mindspeed") for name in vars(model))
            assert "forward" not in vars(model.blocks[0].fc1)
            losses.append(plain_models.loss_of(model))
            with mindspeed_mem.attach(model, plain_models.SWAP):
                losses.append(plain_models.loss_of(model))
        else:
            losses += [plain_models.loss_of(model), plain_models.loss_of(model)]
        return [one.detach() for one in losses]

    torch.manual_seed(0)
    model = plain_models.Net()
    try:
        plain = train(copy.deepcopy(model), False)
        assert same(train(model, True), plain)
    finally:
        accelerate.state.AcceleratorState._reset_state()

"""Options: unknown ones and impossible values are refused together, with what is allowed."""

import copy
import pickle

import pytest
import torch

from mindspeed_mem.gemini import ChunkManager, GeminiAdamOptimizer, GeminiDDP, GeminiManager, OptionError, ZeroDDP
from mindspeed_mem.gemini.loss_scaler import LossScaler
from tests.gemini_runs import chunked, plain


def model():
    return torch.nn.Linear(4, 4)


def trained(model):
    return [param for param in model.parameters() if param.requires_grad]


def grouped(**settings):
    model = plain()
    return chunked(model, adam={"params": [{"params": trained(model), **settings}]})


def saved(kind, **settings):
    return kind(trained(plain()), **settings).state_dict()


@pytest.mark.parametrize(
    ("make", "messages"),
    [
        (
            lambda: GeminiDDP(model(), "cpu", placment_policy="auto"),
            ["no option 'placment_policy'; did you mean 'placement_policy'", "allowed are module, device"],
        ),
        (
            lambda: GeminiDDP(model(), "cpu", "const"),
            ["one of device, cuda, npu, host, cpu, static, auto, not 'const'"],
        ),
        (
            lambda: GeminiDDP(model(), "cpu", "auto", offload_optim_frac=0.5),
            ["offload_optim_frac=0.5 has a meaning with placement_policy='static' only"],
        ),
        (
            lambda: GeminiDDP(model(), "cpu", shard_param_frac=2, offload_param_frac="all", max_prefetch=-1),
            ["shard_param_frac is a fraction", "offload_param_frac is a fraction", "max_prefetch is a whole number"],
        ),
        (lambda: GeminiDDP(model(), "cpu", offload_param_frac=0.5, shard_param_frac=0.1), ["only shards rest on the"]),
        (lambda: GeminiDDP(model(), "cpu", mixed_precision=torch.int8), ["mixed_precision is one of torch.float16"]),
        (lambda: GeminiDDP(model(), "cpu", search_range_mb=-1), ["search_range_mb is a number of at least 0, not -1"]),
        (lambda: ZeroDDP(model(), None, strict_ddp_mode=True), ["ZeroDDP has no option 'strict_ddp_mode'"]),
        (lambda: GeminiManager("cuda", None, prefetch=2), ["no option 'prefetch'; did you mean 'max_prefetch'"]),
        (lambda: ChunkManager(0), ["chunk_size is a number of elements of at least 1"]),
        (
            lambda: GeminiAdamOptimizer(model(), clipping_norm=1.0, max_norm=-1, hysteresis=0, growth_factor=1),
            [
                "GeminiAdamOptimizer has no option 'clipping_norm'",
                "model is a GeminiDDP or ZeroDDP, not Linear",
                "max_norm is a number of at least 0, not -1",
                "hysteresis is at least 1",
                "growth_factor is above 1",
            ],
        ),
        (lambda: GeminiDDP(model(), "cpu", hidden_dim=0), ["hidden_dim is a number of elements of at least 1"]),
        (
            lambda: GeminiDDP(model(), "cpu", search_range_mb=float("nan")),
            ["search_range_mb is a number of at least 0"],
        ),
        (lambda: GeminiDDP(model(), "cpu", gather_budget_mb="all"), ["gather_budget_mb is a number above 0 or None"]),
        (lambda: GeminiDDP(model(), "cpu", process_group=-100), ["process_group is one that this rank is in"]),
        (
            lambda: GeminiDDP(model().double(), "cpu", mixed_precision=None),
            ["parameters of torch.float64 cannot be trained: masters and gradients are fp32"],
        ),
        (lambda: GeminiDDP(chunked()[0].module, "cpu"), ["has no memory: it lies in the chunks of another model"]),
        (lambda: chunked()[1].clip_grad_norm(max_norm=-1.0), ["max_norm is a number of at least 0, not -1.0"]),
        (lambda: chunked()[1].add_param_group({"params": model().weight}), ["1 of params are not trained"]),
        (lambda: chunked(adam={"params": [torch.nn.Parameter(torch.ones(1))]}), ["1 of params are not trained"]),
        (lambda: grouped(maximize=True, amsgrad=True), ["maximize=True: this Adam has", "amsgrad=True: this Adam has"]),
        (lambda: chunked()[1].load_state_dict(saved(torch.optim.AdamW, amsgrad=True)), ["amsgrad=True: this Adam has"]),
        (lambda: grouped(decoupled_weight_decay=False), ["this one was made with adamw_mode=True"]),
        (lambda: copy.deepcopy(chunked()[1]), ["load its state_dict() into one built anew"]),
        (lambda: copy.deepcopy(chunked()[0].module), ["load its state_dict() into a model built anew"]),
        (lambda: pickle.dumps(chunked()[1]), ["save optimizer.state_dict()"]),
    ],
)
def test_refused(make, messages):
    with pytest.raises(OptionError) as refused:
        make()
    for message in messages:
        assert message in str(refused.value)


def test_newer_names_and_outputs_in_fp32():
    wrapped = GeminiDDP(model(), "cpu", search_range_m=0, min_chunk_size_m=0, force_outputs_fp32=True)
    assert wrapped(torch.ones(2, 4)).dtype is torch.float32
    assert wrapped.chunk_manager.get_chunk(wrapped.module.weight).whole.dtype is torch.float16


def test_a_scaled_loss_is_not_to_be_bypassed():
    wrapped, optimizer = chunked(mixed_precision=torch.float16)
    assert wrapped.loss_scale == 2.0**16
    with pytest.raises(OptionError, match="call optimizer.backward"):
        wrapped(torch.zeros(1, 12, dtype=torch.int64)).sum().backward()


def test_the_loss_scale_follows_its_rule():
    scaler = LossScaler(scale=16.0, growth_interval=2, hysteresis=2, min_scale=4.0)
    scales = []
    for overflow in (True, True, False, False, True, False, True, True, True, True):
        scaler.update(overflow)
        scales.append(scaler.scale)
    assert scales == [16, 8, 8, 16, 16, 16, 8, 4, 4, 4]

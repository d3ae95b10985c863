"""Every layout, precision and recomputation of the CPU backend gives the numbers of one plain rank."""

from __future__ import annotations

import contextlib

import pytest

from tests.worlds import applied, on_ranks, parallel

pytestmark = pytest.mark.distributed

STEPS = 3
SHARDED = {"use_distributed_optimizer": True}
OVERLAPPED = SHARDED | {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20_000}


def losses(kind: str, layout: dict, model: dict, dtype: str = "float32") -> list[float]:
    """The loss of each of a few steps with Megatron's optimizer."""
    import torch

    from tests.models import build_gpt, build_optimizer, train_step

    with _attention_for(kind), parallel(**layout):
        chunks = build_gpt(kind, dtype=getattr(torch, dtype), **model)
        optimizer = build_optimizer(chunks)
        return [train_step(chunks, optimizer=optimizer, step=step).loss for step in range(STEPS)]


def gradients(kind: str, layout: dict, model: dict) -> tuple[float, dict]:
    """Loss and gradients of one step, for each name the shard's dimension (None: not sharded) and the numbers."""
    from tests.models import build_gpt, global_parameters, train_step

    with _attention_for(kind), parallel(**layout):
        chunks = build_gpt(kind, **model)
        result = train_step(chunks)
        dims = {
            name: parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
            for name, parameter in global_parameters(chunks)
        }
        return result.loss, {name: (dims[name], grad.numpy()) for name, grad in result.grads.items()}


def _attention_for(kind: str):
    """Megatron's local attention cannot do multi-latent attention."""
    return applied("sdpa_*") if kind == "mla" else contextlib.nullcontext()


_plain: dict = {}


def plain(function, kind, *more):
    """What one rank gives, computed once."""
    key = function.__name__, kind, *more
    if key not in _plain:
        _plain[key] = on_ranks(1, function, kind, {}, {}, *more)[0]
    return _plain[key]


@pytest.mark.parametrize(
    ("size", "kind", "layout", "model"),
    [
        pytest.param(2, "dense", {"tp": 2}, {}, id="tp2"),
        pytest.param(2, "dense", {"tp": 2}, {"sequence_parallel": True}, id="tp2-sp"),
        pytest.param(2, "dense", {"pp": 2}, {}, id="pp2"),
        pytest.param(2, "dense", {"pp": 2, "vpp": 2}, {}, id="pp2-vpp2"),
        pytest.param(2, "dense", {"pp": 2, "vpp": 2}, {"overlap_p2p_comm": False}, id="pp2-vpp2-no-overlap"),
        pytest.param(2, "dense", {}, {"ddp": SHARDED}, id="dp2-sharded"),
        pytest.param(2, "dense", {}, {"ddp": OVERLAPPED}, id="dp2-sharded-overlapped"),
        pytest.param(2, "dense", {"tp": 2}, {"gradient_accumulation_fusion": True}, id="tp2-fused-wgrad"),
        pytest.param(4, "dense", {"tp": 2, "pp": 2}, {"sequence_parallel": True}, id="tp2-sp-pp2"),
        pytest.param(4, "dense", {"pp": 2}, {"ddp": SHARDED}, id="pp2-dp2-sharded"),
        pytest.param(2, "swiglu_gqa_rope", {"tp": 2}, {"sequence_parallel": True}, id="swiglu-tp2-sp"),
        pytest.param(2, "swiglu_gqa_rope", {"pp": 2, "vpp": 2}, {}, id="swiglu-pp2-vpp2"),
        pytest.param(2, "mla", {"tp": 2}, {"sequence_parallel": True}, id="mla-tp2-sp"),
        pytest.param(2, "mla", {"pp": 2}, {}, id="mla-pp2"),
        pytest.param(2, "moe", {"pp": 2}, {}, id="moe-pp2"),
        pytest.param(2, "moe", {"ep": 2}, {}, id="moe-ep2"),
    ],
)
def test_a_layout_trains_as_one_rank_does(size, kind, layout, model):
    for found in on_ranks(size, losses, kind, layout, model):
        assert found == pytest.approx(plain(losses, kind), abs=1e-5)


@pytest.mark.parametrize("kind", ["dense", "swiglu_gqa_rope", "mla", "moe"])
def test_the_loss_falls(kind):
    found = plain(losses, kind)
    assert found[-1] < found[0] - 0.2


@pytest.mark.parametrize("kind", ["dense", "swiglu_gqa_rope", "mla", "moe"])
def test_bf16_stays_near_fp32(kind):
    found = on_ranks(1, losses, kind, {}, {}, "bfloat16")[0]
    assert found == pytest.approx(plain(losses, kind), abs=0.05)
    assert found != plain(losses, kind)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        pytest.param({"tp": 2}, {}, id="tp2"),
        pytest.param({"tp": 2}, {"sequence_parallel": True}, id="tp2-sp"),
        pytest.param({"pp": 2}, {}, id="pp2"),
        pytest.param({"pp": 2, "vpp": 2}, {}, id="pp2-vpp2"),
    ],
)
def test_every_gradient_of_a_layout_is_that_of_one_rank(layout, model):
    import numpy

    loss, expected = plain(gradients, "dense")
    ranks = on_ranks(2, gradients, "dense", layout, model)
    found: dict = {}
    for rank_loss, grads in ranks:
        assert rank_loss == pytest.approx(loss, abs=1e-5)
        for name, (dim, grad) in grads.items():
            if name in found and dim is not None and "tp" in layout:
                grad = numpy.concatenate([found[name], grad], axis=dim)
            found[name] = grad
    assert found.keys() == expected.keys()
    for name, (_, grad) in expected.items():
        numpy.testing.assert_allclose(found[name], grad, rtol=1e-4, atol=1e-6, err_msg=name)


FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}


def selective(*modules: str) -> dict:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


@pytest.mark.parametrize(
    ("size", "kind", "layout", "model", "recompute"),
    [
        pytest.param(1, "dropout", {}, {}, FULL | {"recompute_method": "uniform"}, id="full-uniform"),
        pytest.param(1, "dropout", {}, {}, FULL | {"recompute_method": "block"}, id="full-block"),
        pytest.param(1, "dropout", {}, {}, selective("core_attn"), id="core_attn"),
        pytest.param(1, "dropout", {}, {}, selective("core_attn", "layernorm"), id="layernorm"),
        # Not with a bias: megatron.core returns the parameter itself from its checkpoint, and backward never ends.
        pytest.param(1, "dropout", {}, {"add_bias_linear": False}, selective("mlp"), id="mlp"),
        pytest.param(1, "moe", {}, {"hidden_dropout": 0.1}, selective("moe"), id="moe"),
        pytest.param(
            2, "dropout", {"tp": 2}, {"sequence_parallel": True}, FULL | {"recompute_method": "uniform"}, id="tp2-sp"
        ),
        pytest.param(2, "dropout", {"pp": 2, "vpp": 2}, {}, FULL | {"recompute_method": "uniform"}, id="pp2-vpp2"),
        pytest.param(
            2,
            "dropout",
            {"tp": 2},
            {},
            FULL | {"recompute_method": "uniform", "distribute_saved_activations": True},
            id="tp2-distributed",
        ),
    ],
)
def test_recomputation_repeats_the_dropout_masks(size, kind, layout, model, recompute):
    """Megatron restores the state of a generator that the host does not have by that name: then nothing raises."""
    import numpy

    kept = on_ranks(size, gradients, kind, layout, model)
    again = on_ranks(size, gradients, kind, layout, model | recompute)
    for (kept_loss, kept_grads), (loss, grads) in zip(kept, again, strict=True):
        assert loss == kept_loss
        assert grads.keys() == kept_grads.keys()
        for name, (_, grad) in grads.items():
            numpy.testing.assert_array_equal(grad, kept_grads[name][1], err_msg=name)


def test_dropout_drops():
    assert plain(losses, "dropout") != plain(losses, "dense")

"""--sdpa-attention against Megatron's DotProductAttention: outputs, gradients, random numbers, what is saved."""

from __future__ import annotations

import pytest
import torch

import mindspeed_mem
from mindspeed_mem.sdpa import SdpaError, core_attention, hides_the_future
from tests.worlds import RankError, applied, on_ranks, parallel

LENGTH, BATCH, HEADS, CHANNELS = 16, 2, 4, 8


def tensors(key_heads=HEADS, channels=CHANNELS, value_channels=None, length=LENGTH, dtype=torch.float32):
    """Query, key, value and an output gradient, sequence first, the same each time."""
    generator = torch.Generator().manual_seed(5)

    def make(heads, width):
        return torch.randn(length, BATCH, heads, width, generator=generator).to(dtype).requires_grad_()

    value_channels = value_channels or channels
    key_value = make(key_heads, channels), make(key_heads, value_channels)
    return make(HEADS, channels), *key_value, make(1, HEADS * value_channels).detach()[:, :, 0]


def plain_attention(query, key, value, hidden, scale):
    """The definition, in double precision."""
    groups = query.shape[2] // key.shape[2]
    query, key, value = (tensor.double().permute(1, 2, 0, 3) for tensor in (query, key, value))
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    weights = (query @ key.transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ value).permute(2, 0, 1, 3).flatten(2)


def with_gradients(attention, *inputs, **kwargs):
    """The output and the gradients of query, key, value."""
    *qkv, output_grad = inputs
    output = attention(*qkv, **kwargs)
    return [output, *torch.autograd.grad(output, qkv, output_grad.to(output.dtype))]


def future(length=LENGTH):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def padding():
    hidden = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    hidden[1, ..., -5:] = True
    return hidden


def documents():
    """Two documents in a row: not just causal."""
    hidden = future().clone()
    hidden[7:, :7] = True
    return hidden[None, None].expand(BATCH, 1, -1, -1)


SHAPES = [
    pytest.param({}, id="plain"),
    pytest.param({"key_heads": 2}, id="grouped"),
    pytest.param({"key_heads": 1}, id="one-key-head"),
    pytest.param({"channels": 12, "value_channels": 8}, id="latent"),
    pytest.param({"channels": 8, "value_channels": 12}, id="wide-value"),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", [future, padding, documents])
def test_follows_the_definition(shape, mask):
    inputs = tensors(**shape)
    expected = with_gradients(plain_attention, *inputs, hidden=mask(), scale=0.3)
    found = with_gradients(core_attention, *inputs, hidden=mask(), scale=0.3)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", [future, padding, documents])
def test_follows_the_definition_on_a_gpu(shape, mask):
    inputs = [tensor.detach().cuda().requires_grad_() for tensor in tensors(**shape, dtype=torch.bfloat16)]
    inputs[-1].requires_grad_(False)
    expected = with_gradients(plain_attention, *inputs, hidden=mask().cuda(), scale=0.3)
    found = with_gradients(core_attention, *inputs, hidden=mask().cuda(), scale=0.3)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # on a GPU flash attention, and another kernel
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_is_recomputed_whatever_lies_in_memory_that_no_dropout_uses(device, dtype):
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(HEADS * CHANNELS, HEADS * CHANNELS)

        def forward(self, x):
            heads = self.linear(x).view(LENGTH, BATCH, HEADS, CHANNELS)
            return core_attention(heads, heads, heads, causal=True)

    torch.manual_seed(1)
    model = torch.nn.Sequential(Attention(), Attention()).to(device, dtype)
    x = torch.randn(LENGTH, BATCH, HEADS * CHANNELS).to(device, dtype)

    def gradients():
        litter = [torch.full((size,), number, device=device) for size in (1, 2, 64) for number in range(200)]
        del litter
        model.zero_grad()
        model(x).square().sum().backward()
        return [one.grad.clone() for one in model.parameters()]

    plain = gradients()
    with mindspeed_mem.attach(model, {"recompute_config": {"recompute": True}}, layers=["0", "1"]) as attached:
        found = [gradients() for _ in range(3)]
        figures = attached.engine.report()
    assert figures.recomputed_bytes > 0
    for again in found:
        for one, other in zip(again, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_causal_without_a_mask_and_the_default_scale():
    inputs = tensors()
    expected = with_gradients(plain_attention, *inputs, hidden=future(), scale=CHANNELS**-0.5)
    for one, other in zip(with_gradients(core_attention, *inputs, causal=True), expected, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-4, atol=1e-5)


def test_bf16():
    inputs = tensors(dtype=torch.bfloat16)
    expected = plain_attention(*inputs[:3], hidden=future(), scale=CHANNELS**-0.5)
    found = core_attention(*inputs[:3], causal=True)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", [None, future])
def test_saves_no_matrix_of_sequence_squared(shape, mask):
    """Like flash attention: query, key, value, output and a number for each query and head."""
    length = 64
    query, key, value, _ = tensors(length=length, **shape)
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hidden = None if mask is None else mask(length)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        core_attention(query, key, value, hidden, causal=hidden is None)
    width = max(query.shape[-1], value.shape[-1])  # the narrower ones are padded
    key_heads = HEADS if torch.__version__.startswith("2.6.") else key.shape[2]
    allowed = (2 * HEADS + 2 * key_heads) * BATCH * length * width * 4 + BATCH * HEADS * length * 4
    assert 0 < sum(saved.values()) <= allowed
    assert allowed < BATCH * HEADS * length * length * 4 * 2  # else the bound above would not say much


def test_a_query_that_may_look_nowhere_gives_zeros():
    hidden = future().clone()
    hidden[4] = True
    output, *grads = with_gradients(core_attention, *tensors(), hidden=hidden)
    assert torch.count_nonzero(output[4]) == 0
    assert all(bool(grad.isfinite().all()) for grad in grads)


def test_one_query_sees_the_whole_cache():
    query, key, value, _ = tensors()
    found = core_attention(query[:1], key, value, causal=True)
    torch.testing.assert_close(found, core_attention(query[:1], key, value))
    with pytest.raises(SdpaError, match="as many keys as queries, not 16 and 5"):
        core_attention(query[:5], key, value, causal=True)


def test_masks_that_hide_the_future_are_recognised():
    mask = future()
    assert hides_the_future(mask) and hides_the_future(mask)
    assert hides_the_future(mask[None, None].expand(2, 1, -1, -1))
    assert not hides_the_future(documents())
    assert not hides_the_future(padding())
    assert not hides_the_future(torch.zeros_like(mask))
    mask[0, 0] = True  # the same tensor, changed in place
    assert not hides_the_future(mask)


def megatron(mask_type: str, mask: str | None, key_heads: int, use_sdpa: bool, options: dict) -> list[torch.Tensor]:
    """Output and gradients of Megatron's module, as it is or through our patch, and the generator's state after it."""
    import contextlib

    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = {"attention_dropout": 0.0, "masked_softmax_fusion": False, **options}
    hidden = None if mask is None else globals()[mask]()
    with applied("sdpa_*") if use_sdpa else contextlib.nullcontext(), parallel():
        config = TransformerConfig(
            num_layers=2,
            hidden_size=HEADS * CHANNELS,
            num_attention_heads=HEADS,
            num_query_groups=key_heads,
            **fields,
        )
        module = DotProductAttention(config, 2, AttnMaskType[mask_type], "self")
        found = with_gradients(module, *tensors(key_heads), attention_mask=hidden)
        return [tensor.detach() for tensor in found] + [torch.get_rng_state()]


@pytest.mark.parametrize(
    ("mask_type", "mask", "key_heads", "options"),
    [
        pytest.param("causal", None, 4, {}, id="causal"),
        pytest.param("causal", "future", 4, {}, id="causal-mask"),
        pytest.param("causal", "documents", 2, {}, id="documents"),
        pytest.param("padding", "padding", 4, {}, id="padding"),
        pytest.param("padding", None, 4, {}, id="no-mask"),
        pytest.param("causal", None, 2, {}, id="grouped"),
        pytest.param("causal", None, 4, {"attention_dropout": 0.2}, id="dropout"),
        pytest.param(
            "causal", None, 4, {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}, id="scaling"
        ),
    ],
)
def test_equals_megatrons_own(mask_type, mask, key_heads, options):
    """With dropout too: the weights that are dropped are the same ones, and Megatron's tracker moves on alike."""
    case = mask_type, mask, key_heads
    (expected,) = on_ranks(1, megatron, *case, False, options)
    (found,) = on_ranks(1, megatron, *case, True, options)
    for one, other in zip(found[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert torch.equal(found[-1], expected[-1])


def test_dropout_needs_training():
    (found,) = on_ranks(1, evaluated)
    assert found


def evaluated() -> bool:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    with applied("sdpa_*"), parallel():
        config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=HEADS, attention_dropout=0.5)
        module = DotProductAttention(config, 1, AttnMaskType.causal, "self").eval()
        query, key, value, _ = tensors()
        return torch.equal(module(query, key, value, None), core_attention(query, key, value, causal=True))


def refused(options: dict, forward: dict) -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    with applied("sdpa_*"), parallel():
        config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=HEADS, **options)
        module = DotProductAttention(config, 1, AttnMaskType.causal, "self")
        module(*tensors()[:3], None, **forward)


@pytest.mark.parametrize(
    ("options", "forward", "message"),
    [
        ({"window_size": (4, 0), "softmax_type": "off-by-one"}, {}, "softmax_type 'off-by-one'.*; window_size"),
        ({}, {"packed_seq_params": "packed", "attention_bias": 1}, "layer 1: packed sequences.*; an attention bias"),
    ],
)
def test_what_it_cannot_do_is_refused_all_at_once(options, forward, message):
    with pytest.raises(RankError, match="SdpaError: --sdpa-attention.*" + message):
        on_ranks(1, refused, options, forward)


def trained(kind: str, use_sdpa: bool, attention_mask: bool, layout: dict) -> list[float]:
    import contextlib

    from tests.models import build_gpt, build_optimizer, train_step

    with applied("sdpa_*") if use_sdpa else contextlib.nullcontext(), parallel(**layout):
        chunks = build_gpt(kind)
        optimizer = build_optimizer(chunks)
        steps = [train_step(chunks, optimizer=optimizer, step=step, attention_mask=attention_mask) for step in range(3)]
        return [step.loss for step in steps]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("size", "kind", "attention_mask", "layout"),
    [
        (1, "dense", True, {}),
        (1, "swiglu_gqa_rope", False, {}),
        (1, "dropout", False, {}),
        (2, "dropout", True, {"tp": 2}),
    ],
)
def test_a_model_trains_alike(size, kind, attention_mask, layout):
    expected = on_ranks(size, trained, kind, False, attention_mask, layout)
    found = on_ranks(size, trained, kind, True, attention_mask, layout)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def shared_gradient() -> list[torch.Tensor]:
    import torch.distributed as dist

    from mindspeed_mem.sdpa import share_last_channels

    key = torch.arange(2 * 3 * 4, dtype=torch.float32).view(2, 3, 4).requires_grad_()
    shared = share_last_channels(key, 1, dist.group.WORLD)
    (shared * (dist.get_rank() + 1)).sum().backward()
    return [shared.detach(), key.grad, torch.tensor(shared.data_ptr() == key.data_ptr())]


@pytest.mark.distributed
def test_channels_shared_by_all_heads_of_all_ranks():
    """Two ranks with 3 heads each, whose gradients are 1 and 2: 3 + 6 for the channel that all of them share."""
    for rank, (shared, grad, same_memory) in enumerate(on_ranks(2, shared_gradient)):
        assert torch.equal(shared, torch.arange(24.0).view(2, 3, 4))
        assert bool(same_memory)
        assert torch.equal(grad[..., :3], torch.full((2, 3, 3), rank + 1.0))
        assert torch.equal(grad[..., 3], torch.tensor([[9.0, 0, 0]] * 2))

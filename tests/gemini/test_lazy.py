"""Models built without memory: values are those of a plain build, bit by bit, and building takes little at a time."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from mindspeed_mem.device import get_backend
from mindspeed_mem.gemini import ColoInitContext, GeminiDDP, LazyInitContext, OptionError, lazy_init, materialize
from tests.gemini_runs import TinyGPT, batches, chunked, farthest, masters, plain, reference, train
from tests.guarding import settled


class Unusual(nn.Module):
    """Values that depend on other values, on real numbers, and on what Python reads of them."""

    def __init__(self):
        super().__init__()
        self.product = nn.Parameter(torch.randn(3, 4) * torch.rand(4))
        self.orthogonal = nn.Parameter(torch.empty(6, 6))
        nn.init.orthogonal_(self.orthogonal)
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(6, 6), std=0.02))
        self.copied = nn.Parameter(self.orthogonal.detach().t().contiguous())
        self.orthogonal.data.zero_()
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(8, 8), 0.3))
        self.sum = nn.Parameter(torch.full((2,), self.product.detach().sum().item()))
        self.product.data[1].mul_(2)
        self.permutation = nn.Parameter(torch.randperm(5).float())
        self.coins = nn.Parameter(torch.bernoulli(torch.full((9,), 0.4)))
        self.given = nn.Parameter(torch.empty(3))
        self.given.data.copy_(torch.tensor([1.0, 2.0, 3.0]))
        self.constant = nn.Parameter(torch.tensor([4.0, 5.0]))
        self.rates = torch.linspace(0, 0.1, 3).tolist()
        self.register_buffer("mask", torch.tril(torch.ones(4, 4, device=self.product.device)))
        self.register_buffer("noise", torch.randn(3), persistent=False)
        self.replaced = nn.Linear(2, 3).half()
        self.replaced.weight.data = torch.randn(3, 2)
        self.copies = nn.ModuleList(copy.deepcopy(nn.BatchNorm1d(3)) for _ in range(2))
        self.copies[0].running_mean.add_(1)


def many_modules():
    layers = [nn.Linear(5, 7), nn.Embedding(10, 4, padding_idx=3), nn.Conv2d(3, 4, 3), nn.BatchNorm1d(5)]
    layers += [nn.LSTM(4, 5, 2), nn.TransformerEncoderLayer(8, 2), nn.Bilinear(2, 3, 4), nn.PReLU(), Unusual()]
    layers.append(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)))
    layers.append(nn.Linear(7, 5))
    layers[-1].weight.requires_grad_(False)
    layers.append(nn.Linear(7, 5))
    layers[-1].weight = layers[0].weight
    return nn.Sequential(*layers)


def hugging_face(name, **more):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(transformers, name.partition("For")[0].removesuffix("LMHeadModel") + "Config")(**small, **more)
    return getattr(transformers, name)(config)


LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
BUILDS = {
    "modules": many_modules,
    "tiny": TinyGPT,
    "gpt2": lambda: hugging_face("GPT2LMHeadModel", n_layer=2, n_embd=32, n_head=2, n_positions=16),
    "llama": lambda: hugging_face("LlamaForCausalLM", **LLAMA),
    "bert": lambda: hugging_face("BertForMaskedLM", **LLAMA),
    "t5": lambda: hugging_face("T5ForConditionalGeneration", d_model=32, d_ff=48, num_layers=2, num_heads=2),
}


@pytest.mark.parametrize("build", BUILDS)
def test_values_are_those_of_a_plain_build(build):
    torch.manual_seed(3)
    wanted = BUILDS[build]()
    after = torch.rand(4)
    torch.manual_seed(3)
    with lazy_init():
        model = BUILDS[build]()
    assert torch.equal(torch.rand(4), after)
    most = [param for param in model.parameters() if param.is_meta]
    assert sum(p.numel() for p in most) > 0.95 * sum(p.numel() for p in model.parameters())
    materialize(model)
    found = {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}
    expected = {**dict(wanted.named_buffers()), **dict(wanted.named_parameters(remove_duplicate=False))}
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert found[name].requires_grad == value.requires_grad, name
    assert len(list(model.parameters())) == len(list(wanted.parameters()))  # ties
    if build == "modules":
        assert model[8].rates == wanted[8].rates


def test_training_from_a_lazily_built_model_is_that_of_a_plain_one():
    data = batches(2)
    losses, wanted = reference(data)
    for context in (lazy_init(), ColoInitContext(device="cpu"), LazyInitContext()):
        with context:
            model = plain()
        model, optimizer = chunked(model, placement_policy="host")
        assert train(model, optimizer, data) == losses
        assert farthest(masters(model), wanted) == 0


def test_building_takes_the_memory_of_a_chunk_and_a_parameter_on_the_host():
    backend = get_backend("cpu")
    sizes = {"layers": 8, "hidden": 128}
    total = 4 * sum(param.numel() for param in plain(**sizes).parameters())
    largest = 4 * max(param.numel() for param in plain(**sizes).parameters())
    for placement, most in (("host", 6 * largest), ("device", total + 6 * largest)):
        backend.limit_memory(2**30)
        try:
            if backend.peak() is None:
                pytest.skip("no C++ compiler: nobody counts the host's memory")
            before = settled(backend)
            torch.manual_seed(5)
            with lazy_init():
                model = TinyGPT(**sizes)
            building = backend.peak() - before
            model = GeminiDDP(
                model, "cpu", placement, mixed_precision=torch.float32, min_chunk_size_mb=0, search_range_mb=0
            )
            peak = backend.peak() - before
        finally:
            backend.limit_memory(None)
        assert building <= 3 * largest
        assert largest < peak <= most < 2 * total
        assert farthest(masters(model), {n: p for n, p in plain(**sizes).named_parameters() if p.requires_grad}) == 0


def test_types_are_rounded_and_foreign_meta_tensors_refused():
    torch.manual_seed(3)
    wanted = nn.Linear(3, 4).weight.to(torch.bfloat16)
    torch.manual_seed(3)
    with lazy_init(dtype=torch.bfloat16):
        model = nn.Linear(3, 4)
    assert torch.equal(materialize(model).weight, wanted)
    with pytest.raises(OptionError, match=r"a tensor of shape \(4, 3\) is on the meta device"):
        GeminiDDP(nn.Linear(3, 4, device="meta"), "cpu")
    with pytest.raises(OptionError, match="floating-point type or None, not torch.int8"):
        lazy_init(dtype=torch.int8)
    assert nn.Linear(3, 4).weight.device == torch.device("cpu")  # nothing is left of the contexts


def frozen(tensor):
    return nn.Parameter(tensor, requires_grad=False)


SHAPES = {
    "no dimensions": lambda: nn.Parameter(torch.ones([]) * 2.6592),  # CLIP's logit_scale
    "no elements": lambda: nn.Parameter(torch.empty(0)),
    "a dimension of 0": lambda: nn.Parameter(torch.randn(4, 0, 3)),
    "transposed": lambda: nn.Parameter(torch.randn(3, 4).t()),
    "gaps": lambda: nn.Parameter(torch.randn(3, 4)[:, 1::2]),
    "expanded": lambda: nn.Parameter(torch.randn(3, 1).expand(3, 4)),
    "complex": lambda: frozen(torch.randn(3, dtype=torch.complex64)),
    "conjugate": lambda: frozen(torch.randn(3, dtype=torch.complex64).conj()),
    "negative": lambda: frozen(torch.randn(3, dtype=torch.complex64).conj().imag),
    "integers": lambda: frozen(torch.arange(5)),
    "an integer": lambda: frozen(torch.tensor(3, dtype=torch.int8)),
    "booleans": lambda: frozen(torch.arange(5) > 2),
    "double": lambda: frozen(torch.randn(3, dtype=torch.float64)),
}


class Odd(nn.Module):
    def __init__(self, make, as_buffer):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        made = make()
        if as_buffer:
            self.register_buffer("odd", made.detach())
        else:
            self.odd = made

    def forward(self, x):
        return self.linear(x) + (self.odd.exp().sum() if self.odd.requires_grad else 0)


@pytest.mark.parametrize("as_buffer", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_tensors_of_any_shape_and_type_train_as_in_a_plain_build(shape, as_buffer):
    states = []
    for context in (contextlib.nullcontext(), lazy_init()):
        torch.manual_seed(3)
        with context:
            model = Odd(SHAPES[shape], as_buffer)
        model, optimizer = chunked(model, mixed_precision=None)
        optimizer.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        states.append(model.state_dict())
    for value, wanted in zip(states[1].values(), states[0].values(), strict=True):
        assert value.dtype == wanted.dtype and torch.equal(value, wanted)


class Slopes(nn.Module):
    """A tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.slopes = nn.Linear(4, 4), [torch.linspace(1, 2, 4)]

    def forward(self, x):
        return self.linear(x) * self.slopes[0]


def test_tensors_that_are_no_buffers_have_their_values():
    torch.manual_seed(3)
    wanted = Slopes()(torch.ones(2, 4))
    torch.manual_seed(3)
    with lazy_init():
        model = Slopes()
    assert torch.equal(GeminiDDP(model, "cpu", mixed_precision=None)(torch.ones(2, 4)), wanted)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: nn.init.ones_(model.weight),
        lambda model: model.to(torch.bfloat16),
        lambda model: model.running_mean.fill_(3),
    ],
)
def test_changes_after_the_context_are_refused(change):
    with lazy_init():
        model = nn.BatchNorm1d(4)
    change(model)
    with pytest.raises(OptionError, match="changed or converted after it"):
        GeminiDDP(model, "cpu")


def test_hooks_on_parameters_stay():
    with lazy_init():
        model = nn.Linear(3, 4)
        model.weight.register_hook(lambda grad: grad * 2)
    materialize(model)(torch.ones(1, 3)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((4, 3), 2.0))

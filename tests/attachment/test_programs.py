"""What training programs do on a device, under plans: the same bits as without.

On a CPU some of them; `make test TESTS=tests/attachment/test_programs.py` where there is a GPU runs all on it, too.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import gc
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mindspeed_mem
from mindspeed_mem.activation.storage.ledger import LEDGER
from tests.attachment.plain_models import SAVED, SWAP, WHOLE, same

PLANS = {"swap": SWAP, "saved": SAVED, "whole": WHOLE, "auto": "auto"}
WIDTH, HEADS, LENGTH, WORDS, STEPS = 64, 4, 32, 61, 12


class Block(nn.Module):
    """A layer with attention, of so many heads of keys."""

    def __init__(self, groups=HEADS):
        super().__init__()
        keys = WIDTH // HEADS * groups
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, keys), nn.Linear(WIDTH, keys)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), Mlp()

    def attend(self, query, key, value):
        drops = 0.1 if self.training else 0.0
        grouped = key.size(1) != query.size(1)
        return F.scaled_dot_product_attention(query, key, value, dropout_p=drops, is_causal=True, enable_gqa=grouped)

    def attention(self, x):
        heads = (
            f(x).view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        return self.out(self.attend(*heads).transpose(1, 2).reshape(x.shape))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.drop, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.fc2(self.drop(F.gelu(self.fc1(x)))) * 1.1


class Flexible(Block):
    """Attention as a higher-order operation, compiled."""

    def attend(self, query, key, value):
        from torch.nn.attention.flex_attention import flex_attention

        return _compiled(flex_attention)(query, key, value)


_compiled = functools.cache(torch.compile)


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.lstm = nn.LayerNorm(WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return x + self.lstm(self.norm(x))[0]


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return x + self.second(F.relu(self.norm(self.first(x.transpose(1, 2))), inplace=True)).transpose(1, 2)


class Net(nn.Module):
    def __init__(self, block=Block, side=None):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.side = side
        """A stream on which every other layer runs."""

    def forward(self, text):
        x = self.embedding(text)
        for number, block in enumerate(self.blocks):
            x = block(x) if self.side is None or number % 2 == 0 else self.beside(block, x)
        return self.head(self.norm(x))

    def beside(self, block, x):
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            y = block(x)
        x.record_stream(self.side)
        main.wait_stream(self.side)
        y.record_stream(main)
        return y


def encoder():
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, activation="gelu", batch_first=True, norm_first=True)


def one_graph(device):
    """Parts that are compiled, and must not fall back."""
    model = Net().to(device)
    for block in model.blocks:
        block.mlp.compile(backend="aot_eager", fullgraph=True)
    return model


def compiled_parts(device):
    model = Net().to(device)
    for block in model.blocks:
        block.mlp.compile()
    return model


def graphed(device):
    """A linear as a CUDA graph."""
    model = Net().to(device)
    x = torch.zeros(2, LENGTH, WIDTH, device=device, requires_grad=True)
    model.blocks[1].mlp.fc1 = torch.cuda.make_graphed_callables(model.blocks[1].mlp.fc1, (x,))
    return model


MODELS = {
    "grouped queries": lambda device: Net(lambda: Block(2)).to(device),
    "one head of keys, bf16": lambda device: Net(lambda: Block(1)).to(device, torch.bfloat16),
    "recurrent": lambda device: Net(Recurrent).to(device),
    "convolution": lambda device: Net(Convolution).to(device),
    "torch's encoder": lambda device: Net(encoder).to(device),
    "checkpointed": lambda device: Net(Checkpointed).to(device),
    "bf16 by autocast": lambda device: Net().to(device),
    "fp16 by autocast, scaled": lambda device: Net().to(device),
    "fused optimizer": lambda device: Net().to(device),
    "parts in one graph": one_graph,
}
ON_GPU = {
    "compiled parts": compiled_parts,
    "side stream": lambda device: Net(side=torch.cuda.Stream()).to(device),
    "flexible attention": lambda device: Net(Flexible).to(device, torch.bfloat16),
    "CUDA graph": graphed,
}
QUICK = {
    ("grouped queries", "auto"),
    ("parts in one graph", "auto"),
    ("fp16 by autocast, scaled", "swap"),
    ("recurrent", "whole"),
}
CASES = [
    pytest.param(name, plan, device, marks=marks)
    for device in ("cpu", "cuda")
    for name in (MODELS if device == "cpu" else MODELS | ON_GPU)
    for plan in PLANS
    for marks in [pytest.mark.gpu if device == "cuda" else [] if (name, plan) in QUICK else pytest.mark.sweep]
]


def train(model, name, device, attached=None):
    """Losses of some steps of two micro-batches, and the parameters after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=name == "fused optimizer")
    scaler = torch.amp.GradScaler(device, init_scale=2.0**20, growth_interval=3, enabled="fp16" in name)
    kind = {"bf16 by autocast": torch.bfloat16, "fp16 by autocast, scaled": torch.float16}.get(name)
    torch.manual_seed(3)
    found = []
    for number in range(STEPS):
        text = torch.randint(WORDS, (4, LENGTH + 1), generator=torch.Generator().manual_seed(number)).to(device)
        with attached.step() if attached is not None else contextlib.nullcontext():
            optimizer.zero_grad()
            for half in text.split(2):
                with torch.autocast(device, kind, enabled=kind is not None):
                    words = model(half[:, :-1]).float()
                    loss = F.cross_entropy(words.flatten(0, 1), half[:, 1:].flatten())
                scaler.scale(loss).backward()
                found.append(loss.detach().clone())
            scaler.step(optimizer)
            scaler.update()
    return found + [one.detach().clone() for one in model.parameters()] + [torch.tensor(scaler.get_scale())]


@pytest.fixture(autouse=True)
def reproducible(monkeypatch):
    """Kernels of a GPU, where there are such."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    yield
    torch.set_deterministic_debug_mode(before)


@pytest.mark.parametrize(("name", "plan", "device"), CASES)
def test_a_program_trains_as_without_a_plan(name, plan, device, caplog):
    caplog.set_level(logging.INFO, "mindspeed_mem")

    def model():
        torch.manual_seed(0)
        torch.compiler.reset()
        return (MODELS | ON_GPU)[name](device)

    expected = train(model(), name, device)
    assert same(train(model(), name, device), expected), "not reproducible without a plan"
    mine = model()
    limit = {"device_memory_gib": 2} if plan == "auto" else {}
    with mindspeed_mem.attach(mine, copy.deepcopy(PLANS[plan]), **limit) as attached:
        assert same(train(mine, name, device, attached), expected)
        figures = attached.engine.report()
    if plan == "auto":
        assert "settled on plan" in caplog.text
    elif name not in ("checkpointed", "recurrent"):  # the first makes itself again, the second may not be made again
        assert figures.bytes_out or figures.recomputed_bytes
    del mine
    gc.collect()
    assert LEDGER.held.now == 0


@pytest.mark.sweep
@pytest.mark.parametrize("plan", ["auto", "whole"])
def test_flexible_attention_as_it_is_on_a_gpu(plan, monkeypatch, caplog):
    """A higher-order operation; torch refuses only its backward on a CPU, for a reason that is not ours."""
    module = pytest.importorskip("torch.nn.attention.flex_attention")
    if not hasattr(module, "_validate_device"):
        pytest.skip("this torch refuses it elsewhere")
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)

    def causal(score, batch, head, to, of):
        return torch.where(to >= of, score, -torch.inf)

    class Plain(Block):
        def attend(self, query, key, value):
            return attend(query, key, value, score_mod=causal)

    attend = torch.compile(module.flex_attention, backend="aot_eager")  # CPUs have no kernel for its backward

    monkeypatch.setitem(MODELS, "flexible", lambda device: Net(Plain).to(device))
    test_a_program_trains_as_without_a_plan("flexible", plan, "cpu", caplog)


def test_compiled_parts_run_again_compiled_and_are_not_compiled_for_that():
    graphs, runs = ctypes.c_long(), ctypes.c_long()  # nothing puts these back

    def counting(graph, _):
        graphs.value += 1

        def run(*args):
            runs.value += 1
            return graph.forward(*args)

        return run

    torch.compiler.reset()
    model = nn.Sequential(nn.Sequential(Mlp(), nn.Tanh()), nn.Sequential(Mlp(), nn.Tanh()))
    model[0][0].compile(backend=counting, dynamic=False)
    with mindspeed_mem.attach(model, WHOLE):
        for length in (2, 3, 2, 3):
            model(torch.randn(length, WIDTH)).sum().backward()
    assert graphs.value == 2
    assert runs.value >= 2 * 4, "each time once more"

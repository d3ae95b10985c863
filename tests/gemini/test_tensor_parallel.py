"""A GPT-2 with layers split over some ranks and chunks shared by others, against the whole one in plain torch.

The small model has the names of Hugging Face's layers; theirs is trained as well where transformers is installed.
"""

import importlib.util
import math
import sys

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from mindspeed_mem.device import get_backend
from mindspeed_mem.gemini import ChunkManager, GeminiAdamOptimizer, GeminiDDP, OptionError, ProcessGroup, lazy_init
from mindspeed_mem.ranks import Alone
from tests.examples.jobs import EXAMPLES
from tests.gemini_runs import BATCH, LENGTH, VOCABULARY, average, chunked, farthest, loss_of, masters, reference, train
from tests.guarding import settled
from tests.worlds import on_ranks

sys.path.insert(0, str(EXAMPLES))
from gpt2_tensor_parallel import problems, split_layers  # noqa: E402

HEADS = 4


class Conv1D(torch.nn.Module):
    def __init__(self, columns, rows):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(rows, columns).normal_(std=0.1))
        self.bias = torch.nn.Parameter(torch.empty(columns).normal_(std=0.1))

    def forward(self, x):
        return x @ self.weight + self.bias


class Attention(torch.nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.num_heads, self.head_dim, self.split_size = heads, hidden // heads, hidden
        self.c_attn, self.c_proj = Conv1D(3 * hidden, hidden), Conv1D(hidden, hidden)

    def forward(self, x):
        parts = self.c_attn(x).split(self.split_size, dim=-1)
        query, key, value = (part.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for part in parts)
        y = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class FeedForward(torch.nn.Module):
    def __init__(self, hidden, dropout):
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(4 * hidden, hidden), Conv1D(hidden, 4 * hidden)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(torch.nn.functional.gelu(self.c_fc(x))))


class Block(torch.nn.Module):
    def __init__(self, hidden, heads, dropout):
        super().__init__()
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
        self.attn, self.mlp = Attention(hidden, heads), FeedForward(hidden, dropout)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class SmallGPT2(torch.nn.Module):
    def __init__(self, hidden=32, layers=2, heads=HEADS, recompute=False, dropout=0.0):
        super().__init__()
        self.recompute = recompute
        self.wte, self.wpe = torch.nn.Embedding(VOCABULARY, hidden), torch.nn.Embedding(LENGTH, hidden)
        self.h = torch.nn.ModuleList(Block(hidden, heads, dropout) for _ in range(layers))
        self.ln_f = torch.nn.LayerNorm(hidden)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.ln_f(x) @ self.wte.weight.t()


class HuggingFace(torch.nn.Module):
    def __init__(self):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_embd": 32, "n_layer": 2, "n_head": HEADS, "n_positions": LENGTH, "vocab_size": VOCABULARY}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        self.gpt2 = GPT2LMHeadModel(GPT2Config(use_cache=False, bos_token_id=1, eos_token_id=2, **sizes, **dropout))

    def forward(self, tokens):
        return self.gpt2(input_ids=tokens).logits


KINDS = {
    "small": SmallGPT2,
    "recomputed": lambda: SmallGPT2(recompute=True),
    "hugging_face": HuggingFace,
}


def build(kind):
    torch.manual_seed(5)
    return KINDS[kind]()


def parts_of(values, kind, group):
    """This rank's parts of the parameters `values` of the whole model."""
    model = build(kind)
    model.load_state_dict(values, strict=False)
    split_layers(model, group)
    return {name: param.detach() for name, param in model.named_parameters()}


def data_of(group, steps=4):
    """[steps, 1, batch, length]: the same for ranks that share layers, others for those that share chunks."""
    replicas = group.dp_process_group()
    generator = torch.Generator().manual_seed(11)
    return torch.randint(0, VOCABULARY, (steps, 1, replicas.size(), BATCH, LENGTH), generator=generator)[
        :, :, replicas.rank()
    ]


def split(kind, group, **options):
    with lazy_init():
        model = build(kind)
        split_layers(model, group.tp_process_group())
    assert all(param.is_meta for param in model.parameters())
    return chunked(model, process_group=group, **options)


def trained(kind, tp_degree, dtype, **options):
    """How far this rank is from plain torch, and what has to be the same on all ranks."""
    group = ProcessGroup(tp_degree=tp_degree)
    data, max_norm = data_of(group), 0.5
    losses, wanted = reference(data, dtype, max_norm, model=build(kind))
    model, optimizer = split(kind, group, mixed_precision=dtype, adam={"max_norm": max_norm}, **options)
    shared = [name for name, p in model.named_parameters() if not getattr(p, "tensor_model_parallel", False)]
    parts = group.tp_process_group()
    initial = parts_of({}, kind, parts)
    first = farthest(masters(model), initial)
    found = train(model, optimizer, data)
    after, state = masters(model), optimizer.state_dict()["state"]
    moments = dict(zip(after, state.values(), strict=True))
    return {
        "initial": first,
        "losses": [abs(one - other) / other for one, other in zip(found, losses, strict=True)],
        "masters": farthest(after, parts_of(wanted, kind, parts)),
        "moved": not any(torch.equal(after[name], initial[name]) for name in after),
        "shared": {name: (after[name], moments[name]["exp_avg"], moments[name]["exp_avg_sq"]) for name in shared},
        "ratio": sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in build(kind).parameters()),
    }


CASES = {
    "tp 2, dp 2": ("small", 2, torch.float32),
    "tp 4, dp 1": ("small", 4, torch.float32),
    "recomputed, on the host": ("recomputed", 2, torch.float32, "host"),
    "bf16": ("small", 2, torch.bfloat16),
}
if importlib.util.find_spec("transformers"):
    CASES["hugging face"] = ("hugging_face", 2, torch.float32)


def training_cases():
    return {
        name: trained(kind, tp_degree, dtype, placement_policy=(*place, "static")[0])
        for name, (kind, tp_degree, dtype, *place) in CASES.items()
    }


@pytest.mark.distributed
def test_training_is_that_of_the_whole_model():
    ranks = on_ranks(4, training_cases)
    for name, (_, _, dtype, *_) in CASES.items():
        near = (1e-6, 1e-4) if dtype is torch.float32 else (1e-2, 5e-2)
        for found in (rank[name] for rank in ranks):
            assert found["initial"] == 0, name
            assert found["losses"][0] < near[0] and max(found["losses"]) < near[1], name
            assert found["masters"] < (1e-3 if dtype is torch.float32 else 0.2), name
            assert found["moved"] and found["ratio"] < 0.6, name
            assert found["shared"].keys() == ranks[0][name]["shared"].keys()
            for param, values in found["shared"].items():
                for one, other in zip(values, ranks[0][name]["shared"][param], strict=True):
                    assert torch.equal(one, other), (name, param)


def norm_and_overflow():
    """(norm, that of plain torch, loss scale, change); the last two after a step in which one rank's part overflows."""
    group = ProcessGroup(tp_degree=2)
    tokens = data_of(group)[0, 0]
    model, optimizer = split("small", group)
    optimizer.backward(loss_of(model, tokens))
    norm = optimizer.clip_grad_norm(max_norm=1.0)
    whole = build("small")
    loss_of(whole, tokens).backward()
    wanted = math.sqrt(sum(average(param.grad).norm().item() ** 2 for param in whole.parameters()))

    model, optimizer = split(
        "small", group, mixed_precision=torch.float16, adam={"initial_scale": 8.0, "hysteresis": 1}
    )
    before = masters(model)
    if dist.get_rank() == 3:
        model.module.h[1].mlp.c_fc.weight.register_hook(lambda grad: grad * float("inf"))
    train(model, optimizer, data_of(group, 1))
    return norm, wanted, optimizer.scaler.scale, farthest(masters(model), before)


@pytest.mark.distributed
def test_the_norm_counts_each_parameter_once_and_overflow_is_everybodys():
    found = on_ranks(4, norm_and_overflow)
    for norm, wanted, scale, change in found:
        assert norm == pytest.approx(wanted, rel=1e-5)
        assert norm == found[0][0]
        assert (scale, change) == (4.0, 0)


def building_peak():
    """Bytes that building takes at most, as a share of the whole model; None if nobody counts."""
    group, backend, sizes = ProcessGroup(tp_degree=2), get_backend("cpu"), {"hidden": 128, "layers": 8}
    plain_chunks = {"mixed_precision": torch.float32, "min_chunk_size_mb": 0, "search_range_mb": 0}
    with torch.device("meta"):
        whole = 4 * sum(param.numel() for param in SmallGPT2(**sizes).parameters())
    backend.limit_memory(2**30)
    try:
        if backend.peak() is None:
            return None
        before = settled(backend)
        with lazy_init():
            model = SmallGPT2(**sizes)
            split_layers(model, group.tp_process_group())
        GeminiDDP(model, "cpu", **plain_chunks, process_group=group)
        return (backend.peak() - before) / whole
    finally:
        backend.limit_memory(None)


@pytest.mark.distributed
def test_no_rank_holds_the_whole_model_while_it_is_built():
    peaks = on_ranks(2, building_peak)
    if None in peaks:
        pytest.skip("no C++ compiler: nobody counts the host's memory")
    assert max(peaks) < 0.8


def refusals():
    """What wrong groups and degrees are answered with."""
    everybody = dist.group.WORLD
    found = []
    for wrong in (
        lambda: ProcessGroup(tp_degree=3),
        lambda: ProcessGroup(tp_degre=2),
        lambda: split_layers(SmallGPT2(heads=1, dropout=0.1), everybody),
        lambda: split_layers(torch.nn.Linear(2, 2), everybody),
        lambda: [split_layers(model, everybody) for model in [SmallGPT2()] * 2],
        lambda: GeminiAdamOptimizer(unnamed()),
        lambda: GeminiAdamOptimizer(unnamed(), tensor_parallel_group=-100),
    ):
        with pytest.raises(OptionError) as error:
            wrong()
        found.append(str(error.value))
    return found


def unnamed():
    model = SmallGPT2()
    split_layers(model, dist.group.WORLD)
    return GeminiDDP(model, "cpu", process_group=ProcessGroup(tp_degree=2).dp_process_group())


@pytest.mark.distributed
def test_wrong_groups_and_models_are_refused():
    wanted = [
        ["tp_degree divides the number of ranks, 2: it is one of 1, 2, not 3"],
        ["ProcessGroup has no option 'tp_degre'; did you mean 'tp_degree'?"],
        [
            "tp_degree 2 does not divide 1 attention heads: it is one of 1",
            "dropout is 0, in attn_pdrop, resid_pdrop and embd_pdrop",
        ],
        ["there are no layers of GPT-2 in Linear"],
        ["the layers are split already"],
        [
            "12 parameters (h.0.attn.c_attn.weight, ...) are marked as split over",
            "process_group=ProcessGroup(tp_degree=...)",
        ],
        ["tensor_parallel_group is one that this rank is in, or None, not -100"],
    ]
    for found in on_ranks(2, refusals):
        for message, parts in zip(found, wanted, strict=True):
            assert all(part in message for part in parts), message


def test_a_degree_that_divides_not_all_is_refused_with_those_that_do():
    sizes = [("attention heads", 20), ("feed-forward columns", 5120), ("ranks", 8)]
    assert [problems(degree, sizes) for degree in (1, 2, 4)] == [[], [], []]
    (message,) = problems(8, sizes)
    assert message == "tp_degree 8 does not divide 20 attention heads: it is one of 1, 2, 4"
    (message,) = problems(3, sizes)
    assert "20 attention heads, 5120 feed-forward columns, 8 ranks: it is one of 1, 2, 4" in message
    assert "it is one of 1, 2, 4" in problems(0, sizes)[0]


def test_one_process_is_a_group_of_its_own():
    group = ProcessGroup()
    assert isinstance(group.tp_process_group(), Alone) and isinstance(group.dp_process_group(), Alone)
    assert ChunkManager(10, group, init_device="cpu").group.size() == 1
    model = build("small")
    before = dict(model.named_parameters())
    split_layers(model, group.tp_process_group())
    assert all(param is before[name] for name, param in model.named_parameters())

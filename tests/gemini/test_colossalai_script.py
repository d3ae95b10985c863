"""A script that uses the API as ColossalAI's GPT-2 example does, against plain torch: only its imports are ours."""

import contextlib
import itertools
import logging
import os
import subprocess

import pytest
import torch
import torch.distributed as dist
from packaging import version
from torch import nn
from torch.utils.checkpoint import checkpoint

import mindspeed_mem.gemini as colossalai
from mindspeed_mem.gemini import (
    ChunkManager,
    ColoInitContext,
    ColoParameter,
    ComputePattern,
    ComputeSpec,
    GeminiAdamOptimizer,
    GeminiDDP,
    GeminiManager,
    HybridAdam,
    LowLevelZeroOptimizer,
    OptionError,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
    ZeroDDP,
    ZeroOptimizer,
    disable_existing_loggers,
    get_current_device,
    get_dist_logger,
    options,
)
from tests import warm
from tests.worlds import on_ranks

VOCABULARY, LENGTH, HIDDEN, STEPS = 40, 12, 32, 4


class Conv1D(nn.Module):
    """Hugging Face's: the weight is [in, out]."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs).normal_(std=0.1))
        self.bias = nn.Parameter(torch.empty(outputs).normal_(std=0.1))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.bias.shape[0])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj, self.dropout = Conv1D(3 * HIDDEN, HIDDEN), Conv1D(HIDDEN, HIDDEN), nn.Dropout(0.1)

    def forward(self, x):
        query, key, value = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, dim=-1))
        scores = self.dropout((query @ key.transpose(-1, -2) / 3).softmax(dim=-1))
        return self.dropout(self.c_proj((scores @ value).transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj, self.dropout = Conv1D(4 * HIDDEN, HIDDEN), Conv1D(HIDDEN, 4 * HIDDEN), nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.c_proj(nn.functional.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attn, self.mlp = Attention(), FeedForward()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """With dropout, recomputation, and an output layer tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.ln_f, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(LENGTH))
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.ln_f(x))


def get_data():
    return torch.randint(0, VOCABULARY, (2, LENGTH), device=get_current_device())


def criterion(logits, tokens):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def split(dim, param, pg):
    param.set_tensor_spec(ShardSpec([dim], [pg.tp_world_size()]), ComputeSpec(ComputePattern.TP1D))


def tensor_parallelize(model, pg):
    """The same layers in the same way as the example."""
    for name, module in model.named_modules():
        for own, param in module.named_parameters(recurse=False):
            if hasattr(param, "visited"):
                continue
            assert isinstance(param, ColoParameter)
            param.set_dist_spec(ReplicaSpec())
            if "mlp.c_fc" in name:
                split(-1, param, pg)
                param.compute_spec.set_output_replicate(False)
            elif "mlp.c_proj" in name and own == "weight":
                split(0, param, pg)
            elif any(part in name for part in ("wte", "wpe", "c_attn", "attn.c_proj")):
                split(-1, param, pg)
            param.visited = True


def wrapped(model, pg, placement, variant, **precision):
    if variant == "GeminiDDP":
        assert version.parse("0.1.10") < version.parse(colossalai.__version__) < version.parse("0.2.0")
        model = GeminiDDP(
            model,
            device=get_current_device(),
            placement_policy=placement,
            pin_memory=True,
            search_range_mb=32,
            **precision,
        )
        return model, GeminiAdamOptimizer(model, lr=1e-3, initial_scale=2**5)
    chunk_size = ChunkManager.search_chunk_size(model, 64 * 1024, 32)
    chunk_manager = ChunkManager(
        chunk_size, pg, enable_distributed_storage=True, init_device=GeminiManager.get_default_device(placement)
    )
    model = ZeroDDP(model, GeminiManager(placement, chunk_manager), **precision)
    optimizer = HybridAdam(model.parameters(), lr=1e-3)
    return model, ZeroOptimizer(optimizer, model, initial_scale=2**5)


def script(tp_degree, shardinit, placement, variant, **precision):
    """Losses, and the number of this rank's elements."""
    torch.manual_seed(123)
    default_pg = ProcessGroup(tp_degree=tp_degree)
    default_dist_spec = ShardSpec([-1], [tp_degree]) if shardinit else None
    with ColoInitContext(device="cpu", default_dist_spec=default_dist_spec, default_pg=default_pg):
        model = GPT()
    tensor_parallelize(model, default_pg)
    model, optimizer = wrapped(model, default_pg, placement, variant, **precision)
    numel, losses = sum(p.numel() for p in model.parameters()), []
    model.train()
    for _ in range(STEPS):
        tokens = get_data()
        optimizer.zero_grad()
        loss = criterion(model(tokens), tokens)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses, numel


def plain(zero=False):
    torch.manual_seed(123)
    model, losses = GPT(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    if zero:
        optimizer = LowLevelZeroOptimizer(
            optimizer, overlap_communication=True, partition_grad=zero == "zero2", verbose=True
        )
    for _ in range(STEPS):
        tokens = get_data()
        optimizer.zero_grad()
        loss = criterion(model(tokens), tokens)
        (optimizer.backward if zero else torch.Tensor.backward)(loss)
        if zero:
            optimizer.sync_grad()
        optimizer.step()
        losses.append(loss.item())
    return losses, sum(p.numel() for p in model.parameters())


def farthest(losses, wanted):
    return max(abs(one - other) for one, other in zip(losses, wanted, strict=True))


CASES = [  # shardinit, placement, variant
    (False, "cpu", "GeminiDDP"),
    (True, "cuda", "GeminiDDP"),
    (False, "auto", "ZeroDDP"),
    (True, "cpu", "ZeroDDP"),
]


@contextlib.contextmanager
def levels_of_loggers():
    """The rank's next case finds them as they are now."""
    before = {name: logging.getLogger(name).level for name in list(logging.Logger.manager.loggerDict)}
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@levels_of_loggers()
def all_cases():
    """What is far from plain torch, and all losses: ranks draw the same batches, as they do in the example."""
    environment = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    os.environ |= {key: str(one) for key, one in environment.items()} | {"MASTER_ADDR": "none", "MASTER_PORT": "1"}
    disable_existing_loggers()
    colossalai.launch_from_torch(config={})
    logger = get_dist_logger()
    (wanted, whole), wrong, ranks = plain(), [], dist.get_world_size()
    assert wanted[-1] < wanted[0]
    for tp_degree, more in itertools.product(range(1, ranks + 1), CASES):
        case = tp_degree, *more
        losses, numel = script(*case, mixed_precision=torch.float32)
        if farthest(losses, wanted) > 1e-5 or (numel < whole) is not (tp_degree > 1):
            wrong.append((case, losses, wanted, numel))
        logger.info(f"{case} Loss: {losses[-1]:.3f}", ranks=[0])
    losses, _ = script(ranks, False, "cpu", "GeminiDDP")  # fp16, the example's own
    wrong += [("fp16", losses, wanted)] * (farthest(losses, wanted) > 0.02)
    for zero in ("zero1", "zero2"):
        losses, _ = plain(zero)
        wrong += [(zero, losses, wanted)] * (farthest(losses, wanted) > 1e-5)
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_script_trains_as_plain_torch(ranks):
    assert on_ranks(ranks, all_cases) == [[]] * ranks


# ---- layers


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8, padding_idx=3)
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, tokens):
        return self.layers(self.embedding(tokens))


SPLITS = {  # dimensions along which parameters are split
    "columns": {"layers.0.weight": 0, "layers.0.bias": 0, "layers.4.weight": -2},
    "rows": {"layers.2.weight": 1, "layers.4.weight": -1},
    "columns with a whole bias, then rows with one split": {
        "layers.0.weight": 0,
        "layers.2.weight": 1,
        "layers.2.bias": 0,
    },
    "embedding": {"embedding.weight": -1, "layers.0.weight": 1},
}


def layers(case, together):
    torch.manual_seed(5)
    with ColoInitContext(default_pg=ProcessGroup(tp_degree=dist.get_world_size())):
        model = Layers()
    for name, dim in SPLITS[case].items():
        split(dim, model.get_parameter(name), model.get_parameter(name).get_process_group())
        if name.endswith("weight") and "layers.0" in name and not together:
            model.get_parameter(name).compute_spec.set_output_replicate(False)
    model = GeminiDDP(model, mixed_precision=torch.float32)
    return model, GeminiAdamOptimizer(model, lr=0.1, eps=1.0, max_norm=0.1)


def all_splits():
    """Parameters that are not those of plain torch after a step, whose gradients were clipped to their norm."""
    wrong = []
    tokens = torch.tensor([[1, 3, 5], [7, 1, 0]])
    torch.manual_seed(5)
    reference = Layers()
    nn.functional.mse_loss(reference(tokens), torch.ones(2, 3, 4)).backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.optim.AdamW(reference.parameters(), lr=0.1, eps=1.0, weight_decay=0.0).step()
    for case, together in itertools.product(SPLITS, (True, False)):
        model, optimizer = layers(case, together or "layers.2.weight" not in SPLITS[case])
        optimizer.backward(nn.functional.mse_loss(model(tokens), torch.ones(2, 3, 4)))
        optimizer.step()
        for name, value in model.state_dict().items():
            wanted = reference.state_dict()[name]
            if name in SPLITS[case]:
                wanted = wanted.chunk(2, SPLITS[case][name])[dist.get_rank()]
            if value.shape != wanted.shape or not torch.allclose(value, wanted, atol=1e-6):
                wrong.append((case, together, name))
    return wrong


def told(change, wrap=GeminiDDP):
    pg = ProcessGroup(tp_degree=2)
    with ColoInitContext(default_pg=pg):
        model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Embedding(4, 6, max_norm=1.0))
    try:
        change(model, pg)
        wrap(model)
    except OptionError as error:
        return str(error)
    return "nothing"


def refusals():
    def with_managers(model):
        return ZeroDDP(model, GeminiManager("cpu", ChunkManager(100)))

    return [
        told(lambda model, pg: split(0, model[1].weight, pg)),
        told(lambda model, pg: split(0, model[0].bias, pg)),
        told(lambda model, pg: split(-1, model[2].weight, pg)),
        told(
            lambda model, pg: split(0, model[0].weight, ProcessGroup(tp_degree=1)) or split(0, model[0].weight, pg),
            with_managers,
        ),
        told(lambda model, pg: model[0].weight.set_process_group(ProcessGroup())),
        told(lambda model, pg: model[0].weight.set_dist_spec(ShardSpec([0], [3]))),
    ]


def seeded(differently):
    """Warnings at building a model with dropout."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("mindspeed_mem.gemini").addHandler(handler)
    try:
        pg = ProcessGroup(tp_degree=2)
        torch.manual_seed(dist.get_rank() if differently else 5)
        with ColoInitContext(default_pg=pg):
            model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
        split(0, model[0].weight, pg)
        GeminiDDP(model)
    finally:
        logging.getLogger("mindspeed_mem.gemini").removeHandler(handler)
    return [line for line in lines if "random states" in line]


def test_different_seeds_are_told():
    assert on_ranks(2, seeded, False) == [[], []]
    assert all(len(lines) == 1 for lines in on_ranks(2, seeded, True))


def test_each_kind_of_layer_computes_with_its_parts():
    assert on_ranks(2, all_splits) == [[], []]


def test_what_cannot_be_split_is_told():
    for found in on_ranks(2, refusals):
        assert "1 (LayerNorm) cannot be split: this is known of torch.nn.Linear and Embedding" in found[0]
        assert "0 (Linear) cannot be split: its bias is split, and its weight is not" in found[1]
        assert "2 (Embedding) cannot be split: an embedding" in found[2]
        assert "process group has tp_degree 2; give it to the ChunkManager, too" in found[3]
        assert "process groups of different tp_degree: 1, 2" in found[4]
        assert "ShardSpec([0], [3]) does not divide a parameter of shape (4, 8)" in found[5]


# ---- options


def test_what_has_no_effect_is_said_once(caplog):
    options.say_once.cache_clear()
    for _ in range(2):
        ColoInitContext(default_dist_spec=ShardSpec([-1], [1]))
        model = GeminiDDP(nn.Linear(4, 4), "cpu")
        GeminiAdamOptimizer(model, gpu_margin_mem_ratio=0.6)
    said = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in said] == ["ColoInitContext:", "gpu_margin_mem_ratio"]


def test_settings_of_another_optimizer_are_taken():
    model = GeminiDDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "cpu", mixed_precision=torch.float32)
    first, second = (list(layer.parameters()) for layer in model.module)
    groups = [{"params": first, "lr": 0.5}, {"params": second, "weight_decay": 0.1}]
    optimizer = ZeroOptimizer(torch.optim.Adam(groups, lr=0.25), model)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.5, 0), (0.25, 0.1)]
    assert type(optimizer.inner) is torch.optim.Adam
    assert type(ZeroOptimizer(HybridAdam(first), model).inner) is torch.optim.AdamW
    with pytest.raises(OptionError, match="norm_type is 2.0, not 1; optim is HybridAdam, or torch's .*, not SGD"):
        ZeroOptimizer(torch.optim.SGD(first, lr=1.0), model, norm_type=1)
    with pytest.raises(OptionError, match="optim has amsgrad=True, which chunks do not support"):
        ZeroOptimizer(torch.optim.Adam(first, amsgrad=True), model)
    with pytest.raises(OptionError, match="not trained parameters of the model"):
        ZeroOptimizer(HybridAdam(nn.Linear(2, 2).parameters()), model)
    with pytest.raises(OptionError, match="HybridAdam has no option 'nvme_offload_dir'"):
        HybridAdam(first, nvme_offload_dir="here")


def test_specs_are_checked():
    for dims, parts in (([0, 1], [2, 2]), ([0], [0]), (0, [2]), ([0], [1.5])):
        with pytest.raises(OptionError, match="is a list of one whole number"):
            ShardSpec(dims, parts)
    with pytest.raises(OptionError, match="compute_pattern is ComputePattern.TP1D, not 'TP1D'"):
        ComputeSpec("TP1D")
    with pytest.raises(OptionError, match="default_pg is a ProcessGroup or None"):
        ColoInitContext(default_pg=3, default_dist_spec=2)
    with pytest.raises(OptionError, match="dp_degree is 1, 1 ranks / tp_degree, or None, not 2"):
        ProcessGroup(tp_degree=1, dp_degree=2)


def test_it_leaves_the_process_group_at_exit():
    """gloo's threads now and then abort an interpreter that ends with them."""
    script = """
import atexit, torch.distributed as dist
atexit.register(lambda: print("left" if not dist.is_initialized() else "still there"))
import mindspeed_mem.gemini as colossalai
colossalai.launch_from_torch(config={})
"""
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    environment = {**os.environ, **launched, "MINDSPEED_MEM_DEVICE": "cpu"}
    done = subprocess.run([warm.python(), "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["left"]


def test_it_starts_under_torchrun_only(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OptionError, match="RANK, LOCAL_RANK, WORLD_SIZE.* not set; start with torchrun"):
        colossalai.launch_from_torch(config={})
    assert colossalai.get_default_parser().parse_args(["--local_rank", "1"]).local_rank == 1

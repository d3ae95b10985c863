"""ChunkManager: the chunk sizes that ColossalAI finds, what lies in a chunk, and chunks moved by hand."""

import pytest
import torch

from mindspeed_mem.gemini import ChunkManager, GeminiManager, OptionError, ZeroDDP, init_chunk_manager
from mindspeed_mem.zero.layout.model_tensors import published
from tests.worlds import on_ranks


class Named(torch.nn.Module):
    """A published model's parameters, without memory."""

    def __init__(self, name):
        super().__init__()
        sizes = [one.elements for one in published(name)]
        self.all = torch.nn.ParameterList(torch.empty(size, device="meta") for size in sizes)


@pytest.mark.parametrize(
    ("name", "oldest", "newest"),
    [
        ("gpt2-medium", 52_428_800, 51_432_448),
        ("gpt2-xl", 20_725_760, 51_236_864),
        ("llama-7b", 108_003_328, 45_101_056),
    ],
)
def test_the_sizes_of_colossalai(name, oldest, newest):
    model = Named(name)
    assert ChunkManager.search_chunk_size(model, 64 * 1024**2, 32) == oldest
    manager = init_chunk_manager(model, "cpu")
    assert manager.chunk_size == newest
    for param in model.parameters():
        if "all" not in manager.groups:
            manager.create_group("all")
        manager.append_tensor(param, "all")
    plans = manager.plan()
    held, used = sum(plan.capacity for plan in plans), sum(param.numel() for param in model.parameters())
    assert held - used < 1e-3 * used
    assert [param for plan in plans for param in plan.pieces] == list(model.parameters())
    assert all(plan.capacity <= newest + 128 or len(plan.pieces) == 1 for plan in plans)


def by_hand():
    """Chunks without a model: what is whole when, what lies where, values, gradients."""
    world = torch.distributed.get_world_size()
    manager = ChunkManager(1000, init_device="cpu")
    manager.create_group("param")
    params = [torch.nn.Parameter(torch.full((size,), float(size))) for size in (300, 500, 400, 2000)]
    for param in params:
        manager.append_tensor(param, "param")
    chunks = manager.get_chunks(params)
    assert [len(chunk.params) for chunk in chunks] == [2, 1, 1]
    assert manager.get_chunk(params[1]) is chunks[0]
    shards = sum(chunk.whole.numel() for chunk in chunks) * 4 // world
    assert manager.total_mem == {"device": shards, "host": 0}
    manager.move_chunk(chunks[2], "host")
    assert manager.total_mem == {"device": shards - chunks[2].nbytes // world, "host": chunks[2].nbytes // world}
    for chunk in chunks:
        manager.access_chunk(chunk)
        manager.access_chunk(chunk)
    assert all(torch.equal(param.data, torch.full_like(param, param.numel())) for param in params)
    assert manager.total_mem["device"] == shards - chunks[2].nbytes // world + sum(chunk.nbytes for chunk in chunks)
    for chunk in chunks:
        manager.release_chunk(chunk)
    assert not any(chunk.gathered for chunk in chunks)
    manager.copy_tensor_to_chunk_slice(params[3], torch.arange(2000.0))
    manager.access_chunk(chunks[2])
    assert torch.equal(params[3].data, torch.arange(2000.0))
    manager.copy_tensor_to_chunk_slice(params[3], torch.ones(2000))
    assert torch.equal(params[3].data, torch.ones(2000))
    manager.release_chunk(chunks[2])
    chunks[1].open_gradients()
    chunks[1].grad.fill_(float(torch.distributed.get_rank()))
    manager.reduce_chunk(chunks[1])
    assert torch.equal(chunks[1].grad_shard, torch.full_like(chunks[1].grad_shard, (world - 1) / 2))
    return True


@pytest.mark.distributed
def test_chunks_by_hand():
    for ranks in (1, 2):
        assert all(on_ranks(ranks, by_hand))


def test_a_model_by_the_old_names():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    x, wanted = torch.randn(4, 8), None
    with torch.no_grad():
        wanted = module(x)
    device = GeminiManager.get_default_device("cpu")
    manager = ChunkManager(ChunkManager.search_chunk_size(module, 64, 8), None, True, init_device=device)
    model = ZeroDDP(module, GeminiManager("cpu", manager), force_outputs_fp32=True, mixed_precision=None)
    with torch.no_grad():
        assert torch.equal(model(x), wanted)
    assert manager.total_mem["device"] == 0 and manager.total_mem["host"] > 0


def test_mistakes_are_named():
    manager = ChunkManager(64, init_device="cpu")
    manager.create_group("a")
    param = torch.nn.Parameter(torch.ones(3))
    for action, message in [
        (lambda: manager.create_group("a"), "exists already"),
        (lambda: manager.append_tensor(param, "b"), "there is no group 'b'"),
        (lambda: manager.append_tensor(torch.ones(3), "a"), "takes torch.nn.Parameters"),
        (lambda: manager.get_chunk(param), "is in no chunk"),
    ]:
        with pytest.raises(OptionError, match=message):
            action()
    manager.append_tensor(param, "a")
    with pytest.raises(OptionError, match="each once"):
        manager.append_tensor(param, "a")
    with pytest.raises(OptionError, match="cannot take frozen parameters of torch.float32"):
        manager.append_tensor(torch.nn.Parameter(torch.ones(3), requires_grad=False), "a")
    with pytest.raises(OptionError, match="shape"):
        manager.copy_tensor_to_chunk_slice(param, torch.ones(4))
    with pytest.raises(ValueError, match="a multiple of n_grids, 3, not 10"):
        ChunkManager.search_chunk_size(torch.nn.Linear(2, 2), 10, 3)

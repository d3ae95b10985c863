"""Training in chunks against plain torch: bit for bit where sums have the same order, in every type and placement."""

import contextlib

import pytest
import torch

from mindspeed_mem.device import get_backend
from mindspeed_mem.device.simulated import RaceError, SimulatedBackend
from mindspeed_mem.gemini import OptionError, chunk_manager
from mindspeed_mem.zero.core import shard_memory
from mindspeed_mem.zero.core.use_order import ChunkOrderError
from tests.gemini_runs import TinyGPT, average, batches, chunked, farthest, loss_of, masters, plain, reference, train
from tests.sweeping import but
from tests.worlds import on_ranks

PLACEMENTS = {
    "device": {"placement_policy": "device"},
    "host": {"placement_policy": "cpu"},
    "swapped": {"placement_policy": "host", "adam": {"step_on_host": False}},
    "static": {
        "placement_policy": "static",
        "shard_param_frac": 0.6,
        "offload_optim_frac": 0.5,
        "offload_param_frac": 0.3,
    },
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def settings(place, dtype, **adam):
    options = dict(PLACEMENTS[place])
    return options | {"mixed_precision": dtype, "adam": options.pop("adam", {}) | adam}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", PLACEMENTS)
def test_one_rank_is_bit_equal_to_plain_torch(place, dtype):
    data = batches(3, micro=2)
    scale = 1.0 if dtype is torch.float32 else 2.0**8
    losses, wanted = reference(data, dtype, scale=scale)
    model, optimizer = chunked(**settings(place, dtype, initial_scale=scale))
    assert train(model, optimizer, data) == losses
    assert farthest(masters(model), wanted) == 0
    assert losses[-1] < losses[0]


ONLY_MASTERS = {"placement_policy": "static", "shard_param_frac": 0.6, "offload_optim_frac": 1.0}


@pytest.mark.parametrize("place", [*PLACEMENTS, "only masters on the host"])
def test_copies_beside_computation_have_no_races_and_change_no_bit(place, monkeypatch):
    backend = SimulatedBackend()
    monkeypatch.setattr(chunk_manager, "get_backend", lambda name: backend)
    monkeypatch.setitem(PLACEMENTS, "only masters on the host", ONLY_MASTERS)
    data = batches(3, micro=2)
    losses, wanted = reference(data, torch.bfloat16)
    with backend.tracker():
        model, optimizer = chunked(**settings(place, torch.bfloat16))
        assert train(model, optimizer, data) == losses
        model.load_state_dict(model.state_dict())  # the host writes where copies may still read
        assert farthest(masters(model), wanted) == 0
    backend.check()
    assert (shard_memory.USE_AFTER_UP in backend.reasons) == (place != "device")


def test_parameters_made_of_masters_on_the_host_are_waited_for(monkeypatch):
    backend = SimulatedBackend()
    backend.leave_out = {shard_memory.USE_AFTER_UP}
    monkeypatch.setattr(chunk_manager, "get_backend", lambda name: backend)
    (tokens,) = batches(1)[0]
    with backend.tracker(), pytest.raises(RaceError):
        model, optimizer = chunked(mixed_precision=torch.bfloat16, **ONLY_MASTERS)
        optimizer.backward(loss_of(model, tokens))
        optimizer.step()


@pytest.mark.parametrize("dtype", DTYPES)
def test_clipping_and_loss_scale_in_every_placement(dtype):
    data = batches(3)
    start = 2.0**24  # overflows in fp16, and in no other type
    losses, wanted = reference(data, dtype, max_norm=0.1, scale=start)
    unclipped = reference(data, dtype, scale=start)[1]
    ends = []
    for place in PLACEMENTS:
        adam = {"max_norm": 0.1, "initial_scale": start, "hysteresis": 1}
        model, optimizer = chunked(**settings(place, dtype, **adam))
        assert train(model, optimizer, data) == pytest.approx(losses, rel=2e-3)
        assert (optimizer.scaler.scale < start) == (dtype is torch.float16)
        ends.append(masters(model))
        assert farthest(ends[-1], ends[0]) == 0
    assert farthest(ends[0], wanted) < 1e-3
    if dtype is not torch.float16:  # there all three steps are skipped
        assert farthest(ends[0], unclipped) > 1e-3


def test_the_norm_is_that_of_torch_and_a_loss_scale_does_not_change_it():
    tokens = batches(1)[0, 0]
    wanted = plain()
    loss_of(wanted, tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(wanted.parameters(), 1.0).item()
    for scale in (None, 1024.0):
        model, optimizer = chunked(adam={"initial_scale": scale})
        optimizer.backward(loss_of(model, tokens))
        assert optimizer.clip_grad_norm(model, max_norm=1.0) == pytest.approx(norm, rel=1e-6)


def test_parameters_without_gradient_are_not_stepped_and_frozen_ones_never():
    model, optimizer = chunked()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, batches(2))
    after = model.state_dict()
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {"positions.weight", "unused.weight", "unused.bias", "scale", "steps"}
    model.module.positions.weight.requires_grad_(True)
    with pytest.raises(OptionError, match="frozen when the model was wrapped, and not any more: positions.weight"):
        optimizer.step()


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
def test_recompute_gathers_no_more_and_changes_no_bit(recompute):
    data = batches(3)
    losses, wanted = reference(data)
    gathers = {}
    for kind in ("none", recompute):
        # Enough for the chunks of one block, which recompute goes through forward and then backward.
        model, optimizer = chunked(plain(recompute=kind), placement_policy="host", gather_budget_mb=0.125)
        found, counts = train(model, optimizer, data[:2]), model.chunk_manager.gathering.counts
        before = counts.gathers  # in the first steps the order of uses is not known
        assert found + train(model, optimizer, data[2:]) == losses
        assert farthest(masters(model), wanted) == 0
        gathers[kind] = counts.gathers - before
    assert 0 < gathers[recompute] <= gathers["none"]


def test_gradients_are_forgotten_after_their_step():
    (tokens,) = batches(1)[0]
    model, optimizer = chunked(mixed_precision=torch.float16, adam={"initial_scale": 4.0, "growth_interval": 1})
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    norms = []
    for _ in range(3):  # no zero_grad: the scale grows after each step, and gradients of two scales do not add up
        optimizer.backward(loss_of(model, tokens))
        norms.append(optimizer.clip_grad_norm(max_norm=0.1))
        optimizer.step()
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-3)
    assert model.loss_scale == 32


def test_an_evaluation_between_steps_changes_nothing():
    data = batches(4)
    losses, wanted = reference(data)
    model, optimizer = chunked()

    def evaluate():
        with torch.no_grad():
            loss_of(model, data[0, 0])
        with torch.inference_mode():
            loss_of(model, data[0, 0])
        assert not any(chunk.gathered for chunk in model.chunk_manager.gathering.chunks)

    assert train(model, optimizer, data, evaluate) == losses
    assert farthest(masters(model), wanted) == 0
    assert model.chunk_manager.gathering.order.deviations == 0


def test_after_an_exception_training_goes_on():
    data = batches(3)
    losses, wanted = reference(data)
    model, optimizer = chunked()
    found = train(model, optimizer, data[:1])
    broken = model.module.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, data[0, 0])
    broken.remove()
    assert not any(chunk.gathered for chunk in model.chunk_manager.gathering.chunks)

    def fail(grad):
        raise ZeroDivisionError

    broken = model.module.blocks[1].register_forward_hook(lambda m, i, output: output.register_hook(fail) and None)
    with pytest.raises(ZeroDivisionError):
        optimizer.backward(loss_of(model, data[0, 0]))
    broken.remove()
    assert found + train(model, optimizer, data[1:]) == losses
    assert farthest(masters(model), wanted) == 0


def test_a_gather_budget_is_kept_and_one_that_is_too_small_refused():
    data = batches(3)
    losses = reference(data)[0]
    budget = 40 * 2**10
    model, optimizer = chunked(gather_budget_mb=budget / 2**20)
    assert train(model, optimizer, data) == losses
    counts = model.chunk_manager.gathering.counts
    assert 0 < counts.peak_bytes <= budget and counts.over_budget == 0
    with pytest.raises(OptionError, match="one module reads chunks of .* at once; give at least that"):
        chunked(gather_budget_mb=0.001)


def test_auto_takes_the_room_that_there_is_and_changes_no_bit():
    data = batches(5)
    losses, wanted = reference(data)
    backend = get_backend("cpu")
    on_device = {}
    for room in (2**20, 2**24):
        with limited(backend, room):
            model, optimizer = chunked(placement_policy="auto")
            found = train(model, optimizer, data[:2])
            assert all(one.shard_on_host for one in model.chunks)
            found += train(model, optimizer, data[2:])
            assert backend.peak() <= backend.limit()
        assert found == losses
        assert farthest(masters(model), wanted) == 0
        on_device[room] = sum(not one.shard_on_host for one in model.chunks)
    assert 0 < on_device[2**20] < on_device[2**24] == len(model.chunks)


@contextlib.contextmanager
def limited(backend, room):
    """The CPU with so many bytes more than it has in use."""
    backend.limit_memory(2**32)
    try:
        if backend.peak() is None:
            pytest.skip("no C++ compiler: nobody counts the host's memory")
        backend.limit_memory(backend.allocated() + room)
        yield
    finally:
        backend.limit_memory(None)


class Uneven(TinyGPT):
    """Uses `unused` everywhere, but on rank 1 alone its result."""

    def forward(self, tokens):
        logits = super().forward(tokens)
        extra = self.unused(self.wte(tokens)).mean()
        return logits * (1 + extra) if torch.distributed.get_rank() == 1 else logits


def uneven():
    torch.manual_seed(5)
    return Uneven()


def rank_cases():
    """By case: whether losses are the reference's, how far masters are from it, and which share of them is here."""
    data = batches(3, micro=2)
    found = {}
    for dtype in DTYPES[:2]:
        losses, wanted = reference(data, dtype)
        for place in PLACEMENTS:
            model, optimizer = chunked(**settings(place, dtype))
            same = train(model, optimizer, data) == losses
            whole = sum(one.chunk.whole.numel() for one in model.chunk_manager.built.values() if one.sharded)
            shards = sum(one.chunk.shard.numel() for one in model.chunk_manager.built.values() if one.sharded)
            found[place, dtype] = same, farthest(masters(model), wanted), shards / whole
    losses, wanted = reference(data)
    model, optimizer = chunked()
    for step in data:
        optimizer.zero_grad()
        with model.no_sync():
            optimizer.backward(loss_of(model, step[0]))
        optimizer.backward(loss_of(model, step[1]))
        optimizer.step()
    found["no_sync"] = None, farthest(masters(model), wanted), 0
    losses, wanted = reference(data, model=uneven(), all_used=True)
    model, optimizer = chunked(uneven(), shard_param_frac=0.0)
    found["uneven"] = train(model, optimizer, data) == losses, farthest(masters(model), wanted), 0
    with pytest.raises(ChunkOrderError, match="have to run the same modules in the same order"):
        train(*chunked(uneven()), data)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", but([2, 3], 3))
def test_several_ranks(ranks):
    for found in on_ranks(ranks, rank_cases):
        for case, (same_losses, difference, share) in found.items():
            if ranks == 2 and case != "no_sync":  # there sums are in another order
                assert same_losses and difference == 0, case
            assert difference < 1e-3 and share in (0, 1 / ranks), case


def overflow_on_one_rank():
    """What each rank has after a step in which rank 1 has an infinite gradient, and one in which none has."""
    import torch.distributed as dist

    model, optimizer = chunked(mixed_precision=torch.bfloat16, adam={"initial_scale": 8.0, "hysteresis": 1})
    before, tokens = masters(model), batches(1)[0, 0]
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, tokens) * (float("inf") if dist.get_rank() == 1 else 1.0))
    optimizer.step()
    skipped, scale = farthest(masters(model), before), optimizer.scaler.scale
    train(model, optimizer, batches(1))
    return skipped, scale, farthest(masters(model), before)


def norms():
    """The norm of two ranks as data-parallel, and as tensor-parallel ones of which each has a part of one parameter."""
    import torch.distributed as dist

    tokens, ranks = batches(1)[0, 0], dist.group.WORLD
    model, optimizer = chunked()
    optimizer.backward(loss_of(model, tokens))
    data_parallel = optimizer.clip_grad_norm(max_norm=1.0)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    split = plain()
    split.blocks[0].fc1.weight.tensor_model_parallel = True
    model, optimizer = chunked(split, process_group=alone, adam={"tensor_parallel_group": ranks})
    optimizer.backward(loss_of(model, tokens))
    tensor_parallel = optimizer.clip_grad_norm(max_norm=1.0)
    wanted = plain()
    loss_of(wanted, tokens).backward()
    own = torch.stack([p.grad.norm() ** 2 for p in wanted.parameters() if p.grad is not None]).sum()
    part = wanted.blocks[0].fc1.weight.grad.norm() ** 2
    first, parts = own.clone(), part.clone()
    dist.broadcast(first, 0)
    dist.broadcast(parts, 0)
    dist.all_reduce(part)
    mean = [average(p.grad) for p in wanted.parameters() if p.grad is not None]
    both = torch.stack([grad.norm() ** 2 for grad in mean]).sum()
    return data_parallel, both.sqrt().item(), tensor_parallel, (first - parts + part).sqrt().item()


@pytest.mark.distributed
def test_overflow_on_any_rank_and_norms_over_ranks():
    for skipped, scale, trained in on_ranks(2, overflow_on_one_rank):
        assert (skipped, scale) == (0, 4.0) and trained > 0
    for data_parallel, mean, tensor_parallel, parts in on_ranks(2, norms):
        assert data_parallel == pytest.approx(mean, rel=1e-6)
        assert tensor_parallel == pytest.approx(parts, rel=1e-6)

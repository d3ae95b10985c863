"""Checkpoints and state dicts of models whose parameters are kept as shards: complete, exact, for any layout."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from mindspeed_mem.device import get_backend
from mindspeed_mem.device.cpu import CpuBackend
from mindspeed_mem.zero.buffers import runtime
from mindspeed_mem.zero.buffers.settings import ChunkSettings
from mindspeed_mem.zero.buffers.whole_states import ChunkStateError, copied_ahead
from mindspeed_mem.zero.core.placement import Placement
from tests.worlds import RankError, applied, on_ranks, parallel

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZE = 16384  # elements, about half a layer
BY_PARAMETER, BY_BUCKET = "fully_reshardable", "dp_reshardable"
pytestmark = pytest.mark.distributed

SHARDED = {"stage": 3}
TIGHT = {"stage": 3, "policy": "host", "budget": 200_000}
GRADIENTS = {"stage": 2}
STOCK = {"stage": 0}
FP32 = {"dtype": torch.float32}
MIXED = {"fp32_norms": True}


# ---- on the ranks


@contextlib.contextmanager
def job(
    stage,
    dtype=torch.bfloat16,
    policy="device",
    budget=None,
    layout=None,
    size=SIZE,
    fp32_norms=False,
    sharded=True,
    **model,
):
    """A model and its optimizer as (chunks, make_optimizer), with chunks of about `size` elements."""
    from tests.models import DEVICE, build_gpt, build_optimizer

    placed, backend = Placement(policy, budget), Watching() if DEVICE == "cpu" else get_backend(DEVICE)
    asked = ChunkSettings(
        stage=stage, backend=backend, min_chunk_size=size, search_range=size, hidden_size=64, placement=placed
    )
    runtime.use(asked)
    own_apply = torch.nn.LayerNorm._apply
    try:
        with parallel(**(layout or {})), applied("chunk_*") if stage else contextlib.nullcontext():
            if fp32_norms:
                torch.nn.LayerNorm._apply = lambda self, *unused: self
            model = {"kind": "dense", "layers": 2, "ddp": {"use_distributed_optimizer": sharded}, **model}
            chunks = build_gpt(dtype=dtype, **model)
            torch.nn.LayerNorm._apply = own_apply
            yield chunks, lambda: build_optimizer(chunks)
    finally:
        torch.nn.LayerNorm._apply = own_apply
        runtime.use(ChunkSettings())  # forgets the models


class Watching(CpuBackend):
    """Notes how many chunks are whole whenever host memory is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: Any = ()
        self.whole: list[int] = []

    def host_empty(self, nbytes: int) -> torch.Tensor:
        self.whole.append(sum(chunk.whole.untyped_storage().nbytes() > 0 for chunk in self.chunks))
        return super().host_empty(nbytes)


def digest(tensor):
    return hashlib.sha256(tensor.detach().contiguous().float().numpy().tobytes()).hexdigest()[:16]


def masters(chunks, optimizer, digested=True):
    """{(global name, "param" and Adam's moments): all of it, fp32}, put together without Megatron's checkpoints."""
    from tests.models import global_parameters

    found = {}
    for name, param in global_parameters(chunks):
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        owner = next(one for one in parts if any(param in buffer.param_index_map for buffer in one.buffers))
        mine = {}
        if param in owner.model_param_group_index_map:
            mine = owner._get_main_param_and_optimizer_states(param)
            span = owner._get_model_param_range_map(param)["param"]
        for key in ("param", "exp_avg", "exp_avg_sq"):
            whole = torch.zeros(param.numel())
            if key in mine:
                whole[span.start : span.end] = mine[key].detach().view(-1).float()
            torch.distributed.all_reduce(whole, group=owner.data_parallel_group)
            found[name, key] = digest(whole) if digested else whole.view(param.shape)
    return found


def steps(chunks, optimizer, numbers):
    from tests.models import train_step

    done = [train_step(chunks, step=number, optimizer=optimizer) for number in numbers]
    return [(one.loss, one.grad_norm) for one in done]


def state(chunks, optimizer, form, is_loading):
    from megatron.core import parallel_state

    metadata = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": form,
    }
    model = chunks[0].module.sharded_state_dict(metadata=metadata)
    found = {"model": model}
    found["optimizer"] = optimizer.sharded_state_dict(found, is_loading=is_loading, metadata=metadata)
    return found


def save_and_go_on(folder, form, **given):
    """A step, a checkpoint, another one: (masters in the checkpoint, then losses and masters at the end)."""
    from megatron.core import dist_checkpointing

    with job(**given) as (chunks, make_optimizer):
        optimizer = make_optimizer()
        steps(chunks, optimizer, range(1))
        saved = masters(chunks, optimizer)
        os.makedirs(folder, exist_ok=True)
        torch.distributed.barrier()
        dist_checkpointing.save(state(chunks, optimizer, form, is_loading=False), str(folder))
        return saved, steps(chunks, optimizer, range(1, 2)), masters(chunks, optimizer)


def load_and_go_on(folder, form, **given):
    """The same from the checkpoint on."""
    from megatron.core import dist_checkpointing

    with job(**given) as (chunks, make_optimizer):
        optimizer = make_optimizer()
        loaded = dist_checkpointing.load(state(chunks, optimizer, form, is_loading=True), str(folder))
        chunks[0].module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        return masters(chunks, optimizer), steps(chunks, optimizer, range(1, 2)), masters(chunks, optimizer)


def cases(folder, saves=(), loads=(), form=BY_PARAMETER):
    """Results of `save_and_go_on` by name, and of `load_and_go_on` in order."""
    saved = {name: save_and_go_on(folder / name, form, **given) for name, given in saves}
    return saved, [load_and_go_on(folder / name, form, **given) for name, given in loads]


# ---- layouts


def same(loaded, saved):
    assert loaded == saved  # masters, losses to come and what they lead to


def same_masters(loaded, saved):
    assert loaded[0] == saved[0]
    assert [loss for loss, _ in loaded[1]] == pytest.approx([loss for loss, _ in saved[1]], rel=1e-3)


def test_masters_are_exact_in_every_stage_placement_and_number_of_ranks(tmp_path):
    saves = [("tight", TIGHT), ("stock", STOCK), ("fp32", FP32 | TIGHT), ("mixed", MIXED | SHARDED)]
    loads = [("tight", TIGHT), ("tight", GRADIENTS | {"size": 3 * SIZE}), ("tight", STOCK), ("stock", SHARDED)]
    loads += [("fp32", FP32 | TIGHT), ("mixed", MIXED | SHARDED)]
    saved, loaded = on_ranks(2, cases, tmp_path, saves, loads)[0]
    for (name, given), result in zip(loads, loaded, strict=True):
        (same if (name, given) in saves else same_masters)(result, saved[name])

    alone, from_two = on_ranks(1, cases, tmp_path, [("alone", FP32 | SHARDED)], [("tight", SHARDED)])[0]
    same_masters(from_two[0], saved["tight"])
    _, (from_one, from_two) = on_ranks(4, cases, tmp_path, (), [("alone", FP32 | TIGHT), ("tight", SHARDED)])[0]
    same_masters(from_one, alone["alone"])
    same_masters(from_two, saved["tight"])


@pytest.mark.sweep
def test_tensor_and_expert_parallel_models_resume(tmp_path):
    tensor = SHARDED | {"layout": {"tp": 2}, "kind": "swiglu_gqa_rope", "tied": False, "sequence_parallel": True}
    experts = TIGHT | {"layout": {"ep": 2}, "kind": "moe"}
    saves = [("tensor", tensor), ("experts", experts)]
    loads = [*saves, ("experts", experts | GRADIENTS | {"policy": "device"})]
    for saved, loaded in on_ranks(4, cases, tmp_path, saves, loads):
        same(loaded[0], saved["tensor"])
        same(loaded[1], saved["experts"])
        same_masters(loaded[2], saved["experts"])


def test_a_checkpoint_by_buckets_needs_the_same_buckets(tmp_path):
    saves = [("buckets", SHARDED)]
    saved, loaded = on_ranks(2, cases, tmp_path, saves, [("buckets", SHARDED), ("buckets", GRADIENTS)], BY_BUCKET)[0]
    for one in loaded:
        same(one, saved["buckets"])
    with pytest.raises(RankError) as refused:
        on_ranks(2, cases, tmp_path, (), [("buckets", SHARDED | {"size": 3 * SIZE})], BY_BUCKET)
    for said in ("saved bucket by bucket", "--min-chunk-size-mib", "--dist-ckpt-optim-fully-reshardable"):
        assert said in str(refused.value)


# ---- written beside training


def written_beside(folder, form, **given):
    """What a checkpoint holds, by name, and one of the same moment that is written after the next step."""
    from megatron.core import dist_checkpointing

    with job(**given) as (chunks, make_optimizer):
        optimizer = make_optimizer()
        steps(chunks, optimizer, range(1))
        for name in ("before", "beside"):
            os.makedirs(folder / name)
        dist_checkpointing.save(state(chunks, optimizer, form, is_loading=False), str(folder / "before"))
        request = dist_checkpointing.save(
            state(chunks, optimizer, form, is_loading=False), str(folder / "beside"), async_sharded_save=True
        )
        steps(chunks, optimizer, range(1, 2))
        request.execute_sync()
        return [read(folder / name) for name in ("before", "beside")]


def read(folder):
    """The tensors of a checkpoint, by name."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_items_iter

    found = dist_checkpointing.load_plain_tensors(str(folder))
    return {name: value for _, name, value in nested_items_iter(found) if isinstance(value, torch.Tensor)}


def handed_over(folder):
    """Whether a step changes what the process that writes was given on the host, and whether that is anything."""
    from megatron.core import dist_checkpointing

    with job(**TIGHT) as (chunks, make_optimizer):
        optimizer = make_optimizer()
        steps(chunks, optimizer, range(1))
        made = state(chunks, optimizer, BY_BUCKET, is_loading=False)
        request = dist_checkpointing.save(made, str(folder), async_sharded_save=True)
        given = [one for one in tree_leaves(request.async_fn_args) if isinstance(one, torch.Tensor)]
        given = [one for one in given if one.device.type == "cpu"]
        before = [one.clone() for one in given]
        steps(chunks, optimizer, range(1, 2))
        return all(map(torch.equal, given, before)), sum(one.numel() for one in given) > 4 * SIZE


@pytest.mark.parametrize("given", [STOCK, STOCK | {"sharded": False}, TIGHT], ids=["stock", "plain", "tight"])
def test_steps_that_follow_are_not_in_a_checkpoint_that_is_written_beside_them(given, tmp_path):
    """On a CPU all of it is memory that training changes."""
    [(before, beside)] = on_ranks(1, written_beside, tmp_path, BY_BUCKET, **given)
    assert before.keys() == beside.keys() and len(before) > 4
    assert [name for name in before if not torch.equal(before[name], beside[name])] == []


def test_chunks_that_rest_on_the_host_are_copied_before_they_are_written_beside_training(tmp_path):
    """On an accelerator, where Megatron copies the rest."""
    assert on_ranks(1, handed_over, tmp_path, device="cuda") == [(True, True)]


# ---- state dicts


def plain_state_dicts():
    """Every way to ask for a state dict gives the masters' values, and keeps them."""
    from tests.models import global_parameters

    with job(**SHARDED) as (chunks, make_optimizer):
        ddp, gpt = chunks[0], chunks[0].module.module
        norm = gpt.decoder.final_layernorm
        before = copy.deepcopy(norm).state_dict()  # a copy while parameters are still whole is a copy
        optimizer = make_optimizer()
        steps(chunks, optimizer, range(1))
        watching = runtime.current().backend
        watching.chunks = runtime.current().gathering.chunks
        wanted = {
            name: value.bfloat16()
            for (name, key), value in masters(chunks, optimizer, digested=False).items()
            if key == "param"
        }
        layer = "decoder.layers.1."
        states = [ddp.state_dict(), ddp.state_dict_for_save_checkpoint(keep_vars=True), ddp.module.state_dict()]
        states += [gpt.state_dict(), {layer + k: v for k, v in gpt.decoder.layers[1].state_dict().items()}]
        states.append({name: entry.data for name, entry in gpt.sharded_state_dict().items()})
        assert max(watching.whole) == 1 and len(watching.chunks) > 4
        assert not any(chunk.gathered for chunk in watching.chunks)
        names = {name for name, _ in global_parameters(chunks)}
        steps(chunks, optimizer, range(1, 2))
        for found in states:
            tensors = {k: v for k, v in found.items() if isinstance(v, torch.Tensor)}
            assert set(tensors) == {name for name in names if found is not states[4] or name.startswith(layer)}
            assert all(torch.equal(value, wanted[name]) for name, value in tensors.items())
        assert before["weight"].eq(1).all()

        file = io.BytesIO()
        torch.save(states[3], file)
        file.seek(0)
        again = torch.load(file)
        assert all(torch.equal(again[name], wanted[name]) for name in names)
        for copying in (copy.deepcopy, lambda model: torch.save(model, io.BytesIO())):
            with pytest.raises((ChunkStateError, TypeError)):  # the latter for Megatron's process groups
                copying(ddp)
            for part in (norm, norm.weight, dict(gpt.named_parameters())):
                with pytest.raises(ChunkStateError, match="would be empty"):
                    copying(part)


def loading_state_dicts():
    """A plain state dict into a sharded model: with the optimizer, without, and into the masters."""
    with job(**STOCK) as (chunks, _):
        wanted = {name: value * 2 for name, value in chunks[0].module.module.state_dict().items() if value is not None}
    tensors = [name for name, value in wanted.items() if isinstance(value, torch.Tensor)]

    for given, sealed_first in ((SHARDED, False), (SHARDED, True), (TIGHT, True), (FP32 | SHARDED, True)):
        with job(**given) as (chunks, make_optimizer):
            gpt = chunks[0].module
            gpt = getattr(gpt, "module", gpt)
            optimizer = make_optimizer() if sealed_first else None
            gpt.load_state_dict(wanted, strict=True)
            optimizer = optimizer or make_optimizer()
            optimizer.reload_model_params()
            found, kept = gpt.state_dict(), masters(chunks, optimizer, digested=False)
            for name in tensors:
                value = wanted[name].to(found[name].dtype)
                assert torch.equal(found[name], value) and torch.equal(kept[name, "param"], value.float())
            with pytest.raises(RuntimeError, match="Missing key"):
                gpt.load_state_dict({name: wanted[name] for name in tensors[1:]}, strict=True)
            with pytest.raises(ChunkStateError, match="without assign"):
                gpt.load_state_dict(wanted, assign=True)
            part = tensors[3]
            gpt.load_state_dict({part: wanted[part] + 1}, strict=False)
            optimizer.reload_model_params({name: wanted[name] * 4 for name in tensors})
            found, kept = gpt.state_dict(), masters(chunks, optimizer, digested=False)
            assert all(torch.equal(kept[name, "param"], wanted[name].float() * 4) for name in tensors)
            if any(chunk.masters for chunk in runtime.current().gathering.chunks):  # they stand for the shards
                assert all(torch.equal(found[name], (wanted[name].float() * 4).to(found[name])) for name in tensors)
            elif gpt.config.bf16:  # else the masters are the parameters
                assert torch.equal(found[part], wanted[part] + 1)
                assert all(torch.equal(found[name], wanted[name]) for name in tensors if name != part)
            assert not any(chunk.gathered for chunk in runtime.current().gathering.chunks)


def legacy_format(folder):
    """One rank saves the model, for which all have to copy first; the optimizer's file is Megatron's own."""
    with job(**TIGHT) as (chunks, make_optimizer):
        optimizer = make_optimizer()
        steps(chunks, optimizer, range(2))
        optimizer.save_parameter_state(str(folder / "optimizer"))
        with copied_ahead(chunks):
            if torch.distributed.get_rank() == 0:
                torch.save([chunks[0].state_dict_for_save_checkpoint(), optimizer.state_dict()], folder / "model")
        torch.distributed.barrier()
        saved = masters(chunks, optimizer), steps(chunks, optimizer, range(2, 4))
    with job(**TIGHT) as (chunks, make_optimizer):
        optimizer = make_optimizer()
        model, rest = torch.load(folder / "model", weights_only=False)
        chunks[0].load_state_dict(model)
        optimizer.load_state_dict(rest)
        optimizer.load_parameter_state(str(folder / "optimizer"))
        assert (masters(chunks, optimizer), steps(chunks, optimizer, range(2, 4))) == saved


def all_state_dicts(folder):
    plain_state_dicts()
    loading_state_dicts()
    legacy_format(folder)


def test_state_dicts_are_complete_and_can_be_loaded(tmp_path):
    on_ranks(2, all_state_dicts, tmp_path)


# ---- a kill


class Arguments(SimpleNamespace):
    """What examples/gpt_checkpoint.py asks for; None for what does not matter here."""

    def __getattr__(self, name):
        return None


def example(folder, load_first, kill):
    """Two steps, a checkpoint as the example saves it, and two more; from the start or from the last checkpoint on.

    kill: rank 1 dies when it has written its part of the checkpoint, before that is complete.
    """
    sys.path.insert(0, str(EXAMPLES))
    import gpt_checkpoint

    args = Arguments(save=str(folder), load=str(folder), use_distributed_optimizer=True)
    schedule = SimpleNamespace(state_dict=dict, load_state_dict=dict)
    with job(**TIGHT) as (chunks, make_optimizer):
        optimizer = make_optimizer()
        parts = chunks, optimizer, schedule, runtime.current().backend
        start = 0
        if load_first:
            start = gpt_checkpoint.find(args)
            gpt_checkpoint.load(args, start, *parts)
        losses = steps(chunks, optimizer, range(start, start + 2))
        if kill and torch.distributed.get_rank() == 1:
            rank = os.getpid()
            os.fsync = lambda file: os.killpg(rank, signal.SIGKILL)  # with the processes that it writes by
        gpt_checkpoint.save(args, start + 2, 0, *parts)
        losses += steps(chunks, optimizer, range(start + 2, start + 4))
        return start, losses


def twice(folder):
    return [example(folder, load_first=True, kill=False) for _ in range(2)]


def test_a_kill_while_saving_leaves_the_last_checkpoint(tmp_path):
    _, losses = on_ranks(2, example, tmp_path, load_first=False, kill=False)[0]
    with pytest.raises(RankError, match=r"rank 1 died \(-9\)"):
        on_ranks(2, example, tmp_path, load_first=True, kill=True)
    written = tmp_path / "iter_0000004.unfinished"
    assert any(written.iterdir()) and not (written / ".metadata").exists()

    (start, again), (next_start, _) = on_ranks(2, twice, tmp_path)[0]
    assert start == 2 and again[:2] == losses[2:]
    assert next_start == 4  # saved over what the kill had left


def test_a_kill_while_a_checkpoint_takes_the_name_of_an_earlier_one_leaves_that(tmp_path):
    _, losses = on_ranks(2, example, tmp_path, load_first=False, kill=False)[0]
    name = tmp_path / "iter_0000002"
    name.rename(tmp_path / "iter_0000002.replaced")
    assert on_ranks(2, example, tmp_path, load_first=True, kill=False)[0][1][:2] == losses[2:]
    assert (tmp_path / "iter_0000002.replaced").is_dir()

    on_ranks(2, example, tmp_path, load_first=False, kill=False)  # saves that iteration again
    assert name.is_dir() and not (tmp_path / "iter_0000002.replaced").exists()

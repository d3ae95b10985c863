"""Checkpoints by megatron.core.dist_checkpointing, from which a run continues bit-identically.

    DIR/iter_0000010/                       model, optimizer, schedule, progress, random states of every rank
    DIR/latest_checkpointed_iteration.txt   written last, at once: what it names is complete

While one is being written its folder is called iter_0000010.unfinished; where that fails it goes, and the one before
stays. One of the same iteration is called iter_0000010.replaced until the new one has its name. Tensors are stored by
their global name and shape, so another layout can read them; random states belong to a rank and return only in the
layout that they were saved in.
"""

import contextlib
import functools
import os
import random
import shutil
from pathlib import Path

import numpy
import torch
from gpt_arguments import UsageError
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from mindspeed_mem import output
from mindspeed_mem.zero.buffers import gathered_states

_GATHER = "get_parameter_state_dp_zero"
TRACKER = "latest_checkpointed_iteration.txt"
MODEL = """num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels group_query_attention num_query_groups
max_position_embeddings position_embedding_type padded_vocab_size normalization swiglu add_bias_linear add_qkv_bias
qk_layernorm untie_embeddings_and_output_weights multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim
qk_pos_emb_head_dim v_head_dim num_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size transformer_impl
bf16 fp16 optimizer use_distributed_optimizer""".split()
DATA = "train_samples seq_length seed split".split()
LAYOUT = """world_size tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
layers_per_chunk expert_model_parallel_size""".split()


def latest(directory):
    """The iteration that the tracker in `directory` names, or None without a tracker. Raises UsageError."""
    tracker = Path(directory, TRACKER)
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    if not text.isdigit():
        raise UsageError(f"{tracker} says {text!r} instead of an iteration; write the number of one that exists")
    return int(text)


def find(args):
    """The iteration to continue from: 0 is a fresh start. Raises UsageError when --load DIR has no checkpoint.

    An empty DIR is a fresh start if it is also where checkpoints go: so one command starts a job and restarts it.
    """
    if args.load is None:
        return 0
    iteration = latest(args.load)
    if iteration is not None:
        if not _complete(args.load, iteration).is_dir():
            raise UsageError(f"--load {args.load}: {TRACKER} names iteration {iteration}, whose folder is missing")
        return iteration
    if args.save is not None and os.path.realpath(args.save) == os.path.realpath(args.load):
        return 0
    raise UsageError(f"--load {args.load}: no checkpoint there (no {TRACKER}); name a folder that --save has written")


def save(args, iteration, consumed, chunks, optimizer, schedule, backend):
    """Write the state after `iteration` and `consumed` samples; called on all ranks. Raises UsageError."""
    folder = _folder(args.save, iteration)
    with _told(folder):
        _save(args, folder, iteration, consumed, chunks, optimizer, schedule, backend)


def _save(args, folder, iteration, consumed, chunks, optimizer, schedule, backend):
    first, unfinished = torch.distributed.get_rank() == 0, _unfinished(folder)
    if first:
        shutil.rmtree(unfinished, ignore_errors=True)  # of a job that was killed
        unfinished.mkdir(parents=True)
    torch.distributed.barrier()
    if args.overlap_param_gather:  # the last step still owes the other ranks their parameters
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)
    metadata = _metadata(args)
    state = _state(chunks, optimizer, metadata, is_loading=False)
    state |= {
        "iteration": iteration,
        "consumed_train_samples": consumed,
        "data": _values(args, DATA),
        "model_arguments": _values(args, MODEL),
        "layout": _values(args, LAYOUT),
        "schedule": schedule.state_dict(),
        "random": _random_object(random_state(backend)),
    }
    kept = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
    dist_checkpointing.save(state, str(unfinished), content_metadata=kept)
    torch.distributed.barrier()
    if first:
        earlier = _replaced(folder)
        if folder.exists():  # otherwise that may be all there is, of a job that was killed between the two renames
            shutil.rmtree(earlier, ignore_errors=True)
            folder.rename(earlier)
        unfinished.rename(folder)
        shutil.rmtree(earlier, ignore_errors=True)
        output.write(Path(args.save, TRACKER), str(iteration))


@contextlib.contextmanager
def _told(folder):
    """What goes wrong with the disk as a UsageError with path and reason, and without the half that was written."""
    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        reasons = _reasons(error)
        if not reasons:
            raise
        shutil.rmtree(_unfinished(folder), ignore_errors=True)
        place = next(one for one in folder.parents if one.exists())
        free = f"{shutil.disk_usage(place).free / 2**20:.0f} MiB are free in {place}"
        raise UsageError(f"cannot save {folder}: {'; '.join(reasons)} ({free})") from error


def _reasons(error):
    """What a failure to write says, each once; nothing where it is of another kind."""
    if isinstance(error, CheckpointException):  # by rank: the error and where it came from
        return list(dict.fromkeys(f"rank {rank}: {_plain(str(one[0]))}" for rank, one in error.failures.items()))
    if isinstance(error, OSError):
        return [error.strerror or str(error)]
    return [_plain(str(error))] if _is_riddle(str(error)) else []


def _is_riddle(text):
    """Whether torch's file format says so that a file could not be written: as what it then met, not why."""
    return "inline_container" in text or "PytorchStreamWriter" in text


def _plain(text):
    return "torch could not write a file" if _is_riddle(text) else text


def load(args, iteration, chunks, optimizer, schedule, backend):
    """Put back what `save` wrote after `iteration`: (consumed samples, remarks for the log). Raises UsageError."""
    folder = str(_complete(args.load, iteration))
    try:
        common = dist_checkpointing.load_common_state_dict(folder)
        _compare(folder, common.get("model_arguments", {}), _values(args, MODEL))
        metadata = _metadata(args) | (dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {})
        state = _state(chunks, optimizer, metadata, is_loading=True)
        same_layout = common["layout"] == _values(args, LAYOUT)
        if same_layout:
            state["random"] = _random_object(None)
        state = dist_checkpointing.load(state, folder)
    except (CheckpointingException, OSError, KeyError) as error:
        raise UsageError(f"cannot load {folder}: {error}") from error
    for name, chunk in _named(chunks):
        chunk.module.load_state_dict(state[name])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    remarks = []
    if same_layout:
        set_random_state(state["random"], backend)
    else:
        remarks.append("the checkpoint is from another layout: dropout continues from --seed, not from where it was")
    if state["data"] != _values(args, DATA):
        remarks.append("other data, seed or sequence length than before: the samples to come are not the next ones")
    return state["consumed_train_samples"], remarks


def random_state(backend):
    """All that random numbers on this rank depend on."""
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": backend.rng_state(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_random_state(state, backend):
    """Put back what `random_state` returned."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    backend.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])


def _folder(directory, iteration):
    return Path(directory, f"iter_{iteration:07d}")


def _complete(directory, iteration):
    """Where its checkpoint is: under its own name, or as it was called while another was to take that."""
    folder = _folder(directory, iteration)
    return folder if folder.is_dir() or not _replaced(folder).is_dir() else _replaced(folder)


def _unfinished(folder):
    return folder.with_name(folder.name + ".unfinished")


def _replaced(folder):
    return folder.with_name(folder.name + ".replaced")


def _values(args, names):
    return {name: getattr(args, name) for name in names}


def _named(chunks):
    """Megatron's names for the model chunks of a rank."""
    if len(chunks) == 1:
        return [("model", chunks[0])]
    return [(f"model{i}", chunk) for i, chunk in enumerate(chunks)]


def _metadata(args):
    """How tensors are cut up, for Megatron's sharded_state_dict methods."""
    metadata = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    if args.use_distributed_optimizer:
        # The other kind, dp_reshardable, can only be read with the same layout and the same bucket size.
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return metadata


def _state(chunks, optimizer, metadata, is_loading):
    state = {name: chunk.module.sharded_state_dict(metadata=metadata) for name, chunk in _named(chunks)}
    with _gathered_with_padding(optimizer):
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return state


@contextlib.contextmanager
def _gathered_with_padding(optimizer):
    """Repairs what megatron-core 0.16.1 saves behind a bucket of gradients that is padded."""
    gathering = [one for one in getattr(optimizer, "chained_optimizers", [optimizer]) if hasattr(one, _GATHER)]
    for one in gathering:
        setattr(one, _GATHER, functools.partial(_gather, one, getattr(one, _GATHER)))
    try:
        yield
    finally:
        for one in gathering:
            delattr(one, _GATHER)


def _gather(optimizer, original, *args, **kwargs):
    state = original(*args, **kwargs)
    return state and gathered_states.with_padding(state, optimizer.buffers)


def _random_object(state):
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return ShardedObject("random", state, (world,), (rank,), replica_id=0)


def _compare(folder, saved, wanted):
    wrong = [
        f"  --{name.replace('_', '-')}: the checkpoint has {saved[name]}, this run {wanted[name]}"
        for name in wanted
        if name in saved and saved[name] != wanted[name]
    ]
    if wrong:
        raise UsageError("\n".join([f"cannot load {folder} into another model; give the arguments it has:", *wrong]))

"""Process groups on gloo, whatever a script or Megatron asks for; and sends that survive what Megatron does next."""

from __future__ import annotations

import torch

from mindspeed_mem.patching import around


@around("torch.distributed.distributed_c10d:init_process_group")
def _init_process_group(original, backend=None, *args, **kwargs):
    """No group is bound to a device."""
    kwargs.pop("device_id", None)
    kwargs.pop("pg_options", None)
    return original(_gloo(backend), *args, **kwargs)


@around("torch.distributed.distributed_c10d:new_group")
def _new_group(original, ranks=None, timeout=None, backend=None, pg_options=None, *args, **kwargs):
    """The options are NCCL's."""
    kwargs.pop("device_id", None)
    return original(ranks, timeout, _gloo(backend), None, *args, **kwargs)


@around("torch.distributed.distributed_c10d:isend")
def _isend(original, tensor, *args, **kwargs):
    """Send a private copy.

    gloo reads the tensor later, from a thread of its own, while Megatron's `deallocate_output_tensor` already takes its
    storage away (on a device, stream order protects it). Without an error: corrupted activations with interleaved
    pipelines and overlap_p2p_comm. batch_isend_irecv comes through here as well.
    """
    return original(tensor.detach().clone(), *args, **kwargs)


@around("megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu")
def _split_sizes(original, tensor, as_numpy=False, *args, **kwargs):
    """On the host already; but gloo's all_to_all_single takes numbers, not tensors, as sizes."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _gloo(backend):
    """The backend's name with NCCL replaced: "nccl", "cpu:gloo,cuda:nccl", None (then gloo, not what torch detects)."""
    if backend is None or not isinstance(backend, str):
        return backend
    return "gloo" if "nccl" in backend.lower() else backend

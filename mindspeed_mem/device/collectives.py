"""Collectives as operators of torch: which these are, and what they allocate on the device besides their arguments.

What one allocates in the calling thread, it does before it sends anything; once it has sent, it cannot run again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_iter

from mindspeed_mem.device.base import Backend

NAMESPACES = ("c10d", "_c10d_functional", "symm_mem")
# They send from where their tensors lie.
_IN_PLACE = frozenset("send recv_ recv_any_source_ barrier monitored_barrier_ broadcast_ allreduce_ reduce_".split())
# So do these where the library has buffers of its own (NCCL, HCCL); gloo copies what it reduces and scatters.
_IN_PLACE_ON_ACCELERATORS = frozenset(
    "_allgather_base_ _reduce_scatter_base_ allgather_into_tensor_coalesced_ reduce_scatter_tensor_coalesced_ "
    "alltoall_base_ allreduce_coalesced_ all_reduce_ all_reduce_coalesced_".split()
)


def scratch_bytes(op: Any, args: tuple, kwargs: dict, backend: Backend) -> int:
    """At most how many bytes of device memory the collective `op` allocates before it sends; 0: probably none.

    That is as much as its tensors on the device have, and for those that make the gathered tensor as much as this.
    """
    name = op._schema.name.partition("::")[2]
    if name in _IN_PLACE or name == "wait_tensor":
        return 0
    if backend.index() is not None and name in _IN_PLACE_ON_ACCELERATORS:
        return 0
    tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor) and backend.owns(leaf)]
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    size = given.get("group_size", 1)
    copies = size if isinstance(size, int) and "gather" in name else 1
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) * copies

"""Checkpoints that are written beside training (`--async-save`), for those of our patches that keep states on the host.
No patch itself.

Upstream hands what lies on the host to the process that writes as it is, since it is a copy otherwise. A worker that
lives on (`--use-persistent-ckpt-worker`) shares its memory: the steps that follow would be in the checkpoint.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch


def save(original: Callable, lasts: Callable[[torch.Tensor], bool], *args: Any, **kwargs: Any) -> Any:
    """`original` is dist_checkpointing.save: tensors for which `lasts` is true are copied for it first."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    def apart(value: Any) -> Any:
        if not isinstance(value, ShardedBase) or not isinstance(value.data, torch.Tensor) or not lasts(value.data):
            return value
        return replace(value, data=value.data.detach().clone())

    given = inspect.signature(original).bind(*args, **kwargs)
    if given.arguments.get("async_sharded_save"):
        given.arguments["sharded_state_dict"] = dict_list_map_outplace(apart, given.arguments["sharded_state_dict"])
    return original(*given.args, **given.kwargs)
